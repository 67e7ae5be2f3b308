"""The report's section on decoding: speed-up, acceptance by position, tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval import charts
from eval.report_format import decimal, interval, times
from eval.report_inputs import ReportInputs
from eval.report_page import AMBER, GREY, PALETTE, card, legend, section, table


def speed(inputs: ReportInputs) -> str:
    """Speed-up bars with intervals and predictions, and the table of all rows."""
    cards = []
    colors = system_colors(inputs)
    costs = {(row["system"], row["draft_length"]): row for row in inputs.head_cost.get("steps", [])}
    for temperature in sorted({row["temperature"] for row in results(inputs)}):
        rows = [row for row in results(inputs) if row["temperature"] == temperature and row.get("speed_up")]
        bars = [
            charts.Bar(
                label=row["label"],
                value=row["speed_up"]["value"] or 0.0,
                color=colors[row["system"]],
                low=row["speed_up"]["low"],
                high=row["speed_up"]["high"],
                marker=_predicted(row, costs.get((row["system"], row["draft_length"]))),
            )
            for row in rows
        ]
        diamonds = any(bar.marker is not None for bar in bars)
        cards.append(
            card(
                f"Speed-up over plain decoding, T={temperature:g}",
                charts.bar_chart(bars, title=f"Speed-up at temperature {temperature:g}", reference=1.0, unit="x"),
                note="Ratio of token rates while decoding, prefill apart; whiskers are 95 % bootstrap intervals over "
                "prompts; the dashed line is plain decoding."
                + (" Diamonds are the cost law's predictions at the same acceptance length." if diamonds else ""),
            )
        )
        cards.append(_position_card(rows, colors, temperature))
    settings = inputs.benchmark.get("settings", {})
    content = section("Decoding", cards)
    rows_table = table(
        ("system", "L", "T", "tau", "mean tau", "tok/s", "speed-up", "with prefill", "rep-4", "equal"),
        [_table_row(row) for row in results(inputs)],
    )
    if rows_table:
        counts = inputs.benchmark.get("counts", {})
        note = (
            f"{counts.get('conversations', '?')} conversations, {counts.get('turns', '?')} turns, "
            f"{settings.get('num_slots', '?')} side by side, up to {settings.get('max_new_tokens', '?')} new tokens. "
            "tau is pooled over all steps; mean tau is the unweighted mean of the answers' own. rep-4 is the share of "
            "repeated 4-grams: looping text flatters every drafter, prompt lookup most."
        )
        content += '<div class="charts" style="margin-top:12px">' + card("All measurements", rows_table, note=note)
        content += "</div>"
        content += _kinds(inputs)
    return content


def _predicted(row: dict[str, Any], step: dict[str, Any] | None) -> float | None:
    """The cost law at the benchmark's own acceptance length; steps were timed in greedy decoding."""
    tau = row["acceptance"]["acceptance_length"]
    if step is None or tau is None or row["temperature"] != 0 or not step.get("relative_step"):
        return None
    return tau / step["relative_step"]


def _position_card(rows: Sequence[dict[str, Any]], colors: dict[str, str], temperature: float) -> str:
    longest: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row["draft_length"] >= longest.get(row["system"], row)["draft_length"]:
            longest[row["system"]] = row
    lines, names = [], []
    for system, row in longest.items():
        joint = [(float(i), rate) for i, rate in enumerate(row["acceptance"]["joint"], start=1)]
        conditional = [
            (float(i), rate) for i, rate in enumerate(row["acceptance"]["conditional"], start=1) if rate is not None
        ]
        color = colors[system]
        lines.append(charts.Line(f"{system}, given all before", conditional, color, dashed=True, markers=True))
        lines.append(charts.Line(f"{system}, joint", joint, color, markers=True))
        names.append((row["label"], color, ""))
    names.append(("given that all before were accepted", GREY, "dashed"))
    chart = charts.line_chart(
        lines, title="Acceptance by draft position", x_label="draft position", y_range=(0.0, 1.0), integer_x=True
    )
    return card(f"Acceptance by position, T={temperature:g}", chart, legend=legend(names))


def _kinds(inputs: ReportInputs) -> str:
    best = best_row(inputs.benchmark)
    if not best or len(best["by_kind"]) < 2:
        return ""
    systems = [
        row
        for row in results(inputs)
        if row["draft_length"] == best["draft_length"] and row["temperature"] == best["temperature"]
    ]
    header = ["kind", "answers", "rep-4"]
    for row in systems:
        header += [f"tau {row['system']}", f"speed-up {row['system']}"]
    rows = []
    for kind, values in best["by_kind"].items():
        cells = [kind, str(values["num_answers"]), decimal(values["repeated_4gram_share"])]
        for row in systems:
            part = row["by_kind"].get(kind, {})
            cells.append(decimal((part.get("acceptance") or {}).get("acceptance_length")))
            cells.append(times((part.get("speed_up") or {}).get("value")))
        rows.append(cells)
    heading = f"By kind of prompt, L={best['draft_length']}, T={best['temperature']:g}"
    return '<div class="charts" style="margin-top:12px">' + card(heading, table(header, rows)) + "</div>"


def _table_row(row: dict[str, Any]) -> list[str]:
    acceptance, speed_up, equal = row["acceptance"], row.get("speed_up"), row.get("equals_plain")
    return [
        row["system"],
        str(row["draft_length"]),
        f"{row['temperature']:g}",
        decimal(acceptance["acceptance_length"]) + interval(acceptance.get("acceptance_length_interval")),
        decimal(acceptance["acceptance_length_mean_of_requests"]),
        decimal(row["tokens_per_second"]["value"], 1),
        (times(speed_up["value"]) + interval(speed_up)) if speed_up else "-",
        times(speed_up["with_prefill"]["value"]) if speed_up else "-",
        decimal(row["repeated_4gram_share"]),
        f"{equal['identical']}/{equal['compared']}" if equal else "-",
    ]


def best_row(benchmark: dict[str, Any]) -> dict[str, Any] | None:
    """The fastest row of a trained system, or of any when none was trained; None without rows."""
    rows = [row for row in benchmark.get("results", []) if (row.get("speed_up") or {}).get("value")]
    trained = [row for row in rows if row["system"] != "ngram"]
    return max(trained or rows, key=lambda row: row["speed_up"]["value"], default=None)


def system_colors(inputs: ReportInputs) -> dict[str, str]:
    """One colour a system, the same in all charts."""
    fixed = {"plain": GREY, "ngram": AMBER}
    names = [row["system"] for row in results(inputs)]
    others = [name for name in dict.fromkeys(names) if name not in fixed]
    return fixed | {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(others)}


def results(inputs: ReportInputs) -> list[dict[str, Any]]:
    """The rows of the benchmark, plain decoding among them."""
    return inputs.benchmark.get("results", [])
