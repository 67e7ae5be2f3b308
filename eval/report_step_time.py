"""The report's section on where the time of a step goes, and what the parts leave unexplained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval import charts
from eval.report_format import decimal, percent
from eval.report_inputs import ReportInputs
from eval.report_page import GREY, PART_COLORS, card, legend, section, table


def step_time(inputs: ReportInputs) -> str:
    """Where the time of a step goes, and what heads cost."""
    steps = [row for row in inputs.head_cost.get("steps", []) if row.get("parts")]
    stacks = [
        charts.Stack(
            label=row["label"],
            parts=[(name, 1e3 * value, PART_COLORS.get(name, GREY)) for name, value in row["parts"].items()],
        )
        for row in steps
    ]
    used = [name for name in PART_COLORS if any(name in row["parts"] for row in steps)]
    heads = table(
        ("head", "rank", "weights", "ms a call", "nu", "byte ratio", "of drafting", "kappa"),
        [
            (
                head["name"],
                str(head["rank"] or "-"),
                charts.number(head["num_params"]),
                decimal(1e3 * head["seconds"], 3),
                decimal(head["nu"], 3),
                decimal(head["byte_ratio"], 3),
                percent(head.get("share_of_drafting")),
                decimal(head.get("kappa")),
            )
            for head in inputs.head_cost.get("heads", [])
        ],
    )
    cards = [
        card(
            "Time of one step",
            charts.stacked_chart(stacks, title="Time of one step by part", unit="ms"),
            legend=legend([(name, PART_COLORS[name], "box") for name in used]),
            note="Each part timed as its own jitted function. host is what a step of plain decoding takes in the "
            "engine beyond its parts, the same for every row, and 0 where the engine's step takes less than they do.",
        ),
        card(
            "Parts beside the whole step",
            _unexplained(steps),
            note="parts: the sum of the above without host. measured: decoding time a step, by the wall clock. The "
            "difference is what the parts do not explain: the host's work, less what the engine saves by running all "
            "parts as one compiled function, so it may be negative.",
        ),
        card(
            "Draft heads",
            heads,
            note="nu is the head's time over the full head's, the byte ratio its floor where reading weights is all "
            "that counts. kappa is all head calls of a step over the rest of it.",
        ),
    ]
    return section("Where a step's time goes", cards)


def _unexplained(steps: Sequence[dict[str, Any]]) -> str:
    rows = []
    for row in steps:
        measured = row.get("measured_step_seconds")
        parts = sum(seconds for name, seconds in row["parts"].items() if name != "host")
        if measured is not None:
            difference = f"{1e3 * (measured - parts):+.2f}"
            rows.append((row["label"], decimal(1e3 * parts), decimal(1e3 * measured), difference))
    return table(("step", "parts, ms", "measured, ms", "not explained by the parts, ms"), rows)
