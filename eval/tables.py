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
            f"{row['system'][:14]:<14}{row['draft_length']:>3}{row['temperature']:>5.1f}"
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
