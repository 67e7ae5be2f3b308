"""Results as text tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def print_results(result: Mapping[str, Any], file: Any = None) -> None:
    """Prints the rows of a benchmark's result."""
    header = f"{'system':<14}{'L':>3}{'T':>5}  {'tau':>5} {'[95 %]':>13}  {'tok/s':>7}  {'speed-up':>8} {'[95 %]':>13}"
    print(header + f"  {'rep-4':>5}  {'equal':>9}  acceptance by position", file=file)
    for row in result["results"]:
        acceptance, speed = row["acceptance"], row.get("speed_up")
        print(
            f"{row['system'][:14]:<14}{row['draft_length']:>3}{row['temperature']:>5.3g}"
            f"  {_number(acceptance['acceptance_length'], 5)} {_interval(acceptance['acceptance_length_interval'])}"
            f"  {_number(row['tokens_per_second']['value'], 7, 1)}"
            f"  {_number(speed['value'] if speed else None, 8)} {_interval(speed)}"
            f"  {_number(row['repeated_4gram_share'], 5)}"
            f"  {_equality(row['equals_plain']):>9}"
            f"  {' '.join(f'{rate:.2f}' for rate in acceptance['joint'])}",
            file=file,
        )


def _number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _interval(estimate: Mapping[str, Any] | None) -> str:
    if not estimate or estimate["low"] is None:
        return f"{'-':>13}"
    low, high = estimate["low"], estimate["high"]
    return f"{f'[{low:.2f}, {high:.2f}]':>13}"


def _equality(equal: Mapping[str, Any] | None) -> str:
    return f"{equal['identical']}/{equal['compared']}" if equal else "-"


def print_head_cost(result: Mapping[str, Any], file: Any = None) -> None:
    """Prints heads, parts of steps and the cost law's predictions."""
    print("head            rank   weights    ms/call      nu   bytes  nu alone  of drafting   kappa", file=file)
    for head in result["heads"]:
        print(
            f"{head['name'][:14]:<14}{head['rank'] or '-':>6}{head['num_params'] / 1e6:>9.2f}M"
            f"  {1e3 * head['seconds']:>9.3f}  {_number(head['nu'], 6, 3)}  {head['byte_ratio']:>6.3f}"
            f"  {head['nu_alone']:>8.3f}  {100 * head['share_of_drafting']:>9.0f} %  {_number(head['kappa'], 6)}",
            file=file,
        )
    names = list(result["steps"][0]["parts"])
    print(file=file)
    print("ms a step       L" + "".join(f"{name:>23}" for name in names), file=file)
    for row in result["steps"]:
        parts = "".join(f"{1e3 * row['parts'][name]:>23.3f}" for name in names)
        print(f"{row['system'][:14]:<14}{row['draft_length']:>3}{parts}", file=file)
    print(file=file)
    print("                L    sum  engine     tau  break-even  predicted  measured   error", file=file)
    for row in result["steps"]:
        predicted = row.get("predicted_speed_up")
        error = row.get("prediction_error")
        print(
            f"{row['system'][:14]:<14}{row['draft_length']:>3}{1e3 * row['step_seconds']:>7.2f}"
            f"{1e3 * row['measured_step_seconds']:>8.2f}  {_number(row['acceptance_length'], 6)}"
            f"  {_number(row.get('break_even_acceptance_length'), 10)}  {_number(predicted, 9)}"
            f"  {_number(row.get('measured_speed_up'), 8)}  {'-' if error is None else f'{100 * error:+.0f} %':>6}",
            file=file,
        )
