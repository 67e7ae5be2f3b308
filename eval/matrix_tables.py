"""A comparison of rules as text: one line a configuration as it is measured, one line a comparison at the end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eval.matrix_plan import AUTOREGRESSIVE

HEADER = f"{'rule':<28}{'K':>3}{'L':>4}{'T':>6}   {'tau':>5} {'[95 %]':>14}   {'speed-up':>8}   {'seconds':>8}"


def configuration_line(row: Mapping[str, Any], is_known: bool) -> str:
    """One line about a configuration; what was measured by an earlier command says so."""
    plain = row["verifier"] == AUTOREGRESSIVE
    sizes = "  -   -" if plain else f"{row['num_drafts']:>3}{row['draft_length']:>4}"
    efficiency, seconds = row["block_efficiency"], row["seconds"]
    notes = [f"{seconds['compile']:.1f} of them compiling"] if seconds["compile"] else []
    notes += ["measured before"] if is_known else []
    notes += [f"{row['num_failed']} failed"] if row["num_failed"] else []
    notes += ["not warm: its times count for nothing"] if row["num_compilations"] else []
    return (
        f"{row['verifier']:<28}{sizes}{row['temperature']:>6.2f}   {_number(efficiency['value'])} {_ends(efficiency)}"
        f"   {_number(row['speed_up']['value'], 8)}   {seconds['all']:>8.1f}{'   ' * bool(notes)}{', '.join(notes)}"
    )


def order_lines(result: Mapping[str, Any]) -> list[str]:
    """All comparisons, and what they say together."""
    order = result["order"]
    lines = [
        "Order of block efficiencies: second minus first, in tokens per target call. Intervals hold together: right",
        f"rules are contradicted anywhere with probability {order['family_false_alarm']:g} at most "
        f"({order['num_judged']} judged; Student's t over questions, Bonferroni).",
        f"{'T':>5}  {'first':<36}    {'second':<36} {'sample':<12} {'diff':>6} {'interval':>16}  verdict",
    ]
    for row in result["comparisons"]:
        difference = row["difference"]
        pair = f"{row['first']:<36} {row['relation']:>2} {row['second']:<36} {row['sample']:<12}"
        numbers = f"{_number(difference['value'], 6)} {_ends(difference, 16)}"
        temperature = "all" if row["temperature"] is None else f"{row['temperature']:.2f}"
        lines.append(f"{temperature:>5}  {pair} {numbers}  {row['verdict']}")
    return lines


def verdict_line(result: Mapping[str, Any]) -> str:
    """What the order check found, in one line."""
    order = result["order"]
    if order["num_contradicted"]:
        return f"{order['num_contradicted']} of {order['num_judged']} comparisons contradict the order of the rules"
    return f"the order of the rules is kept: none of {order['num_judged']} comparisons contradicts it"


def _number(value: float | None, width: int = 5) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.2f}"


def _ends(estimate: Mapping[str, Any], width: int = 14) -> str:
    low, high = estimate["low"], estimate["high"]
    text = "-" if low is None or high is None else f"[{low:.2f}, {high:.2f}]"
    return f"{text:>{width}}"
