"""A comparison of rules as one page: block efficiency and speed-up by rule, K, L and temperature; no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from eval.charts import Bar, bar_chart
from eval.matrix_plan import AUTOREGRESSIVE

# Distinct for readers with the usual colour deficiencies (Okabe and Ito).
_COLORS = ("#0072b2", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#d55e00", "#8c6bb1", "#7f7f7f", "#b3a100", "#444444")
_STYLE = """
:root { font: 15px/1.45 system-ui, sans-serif; color: #1d2430; }
body { max-width: 1380px; margin: 0 auto; padding: 16px; }
h2 { margin-top: 32px; border-bottom: 1px solid #c9ced6; }
h3 { font-size: 15px; margin: 12px 0 2px; }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 8px 28px; }
svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: 2px 10px; text-align: left; white-space: nowrap; border-bottom: 1px solid #eceff3; }
.contradicted { color: #b00020; font-weight: 600; }
"""


def matrix_page(result: Mapping[str, Any]) -> str:
    """The whole page."""
    rows = [row for row in result["configurations"] if row["verifier"] != AUTOREGRESSIVE]
    rules = list(dict.fromkeys(row["verifier"] for row in rows))
    colors = {rule: _COLORS[index % len(_COLORS)] for index, rule in enumerate(rules)}
    temperatures = list(dict.fromkeys(row["temperature"] for row in rows))
    title = f"Verification rules on {result['target']['name']}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1>",
        f"<p>{html.escape(_summary(result))}</p>",
        *(f"<p>Skipped: {html.escape(line)}.</p>" for line in result["skipped"]),
    ]
    for temperature in temperatures:
        here = [row for row in rows if row["temperature"] == temperature]
        parts.append(f"<h2>Temperature {temperature:g}</h2>")
        for name, heading, reference in (
            ("block_efficiency", "Block efficiency (tokens per target call)", 1.0),
            ("speed_up", "Speed-up over plain decoding", 1.0),
        ):
            parts.append(f"<h3>{heading}</h3><div class=grid>")
            for length in sorted({row["draft_length"] for row in here}):
                chosen = _by_rule([row for row in here if row["draft_length"] == length], rules)
                chart = bar_chart(
                    [_bar(row, name, colors) for row in chosen],
                    title=f"{heading}, temperature {temperature:g}, L = {length}",
                    reference=reference,
                )
                parts.append(f"<div><h3>L = {length}</h3>{chart}</div>")
            parts.append("</div>")
    return "\n".join([*parts, *_order(result), "</html>\n"])


def _by_rule(rows: Sequence[Mapping[str, Any]], rules: Sequence[str]) -> list[Mapping[str, Any]]:
    return sorted(rows, key=lambda row: (rules.index(row["verifier"]), row["num_drafts"]))


def _bar(row: Mapping[str, Any], name: str, colors: Mapping[str, str]) -> Bar:
    estimate = row[name]
    return Bar(
        label=f"{row['verifier']} K={row['num_drafts']}",
        value=estimate["value"] or 0.0,
        color=colors[row["verifier"]],
        low=estimate["low"],
        high=estimate["high"],
    )


def _summary(result: Mapping[str, Any]) -> str:
    settings, machine = result["settings"], result["machine"]
    return (
        f"Drafter {result['system']['name']}; {settings['num_questions']} questions, at most "
        f"{settings['max_new_tokens']} new tokens each, {settings['num_slots']} decoded side by side; weights in "
        f"{result['target']['dtype']}; {machine['num_cpus']} CPU cores, {machine['device_kind']}. Whiskers: 95 % "
        "intervals over questions (Student's t); those of the speed-up leave the clock's own noise out."
    )


def _order(result: Mapping[str, Any]) -> list[str]:
    order = result["order"]
    cells = []
    for row in result["comparisons"]:
        difference = row["difference"]
        ends = ("-" if value is None else f"{value:+.3f}" for value in (difference["low"], difference["high"]))
        value = "-" if difference["value"] is None else f"{difference['value']:+.3f}"
        columns = (
            "all" if row["temperature"] is None else f"{row['temperature']:g}",
            row["first"],
            row["relation"],
            row["second"],
            row["sample"],
            value,
            f"[{', '.join(ends)}]",
            row["verdict"],
        )
        mark = " class=contradicted" if row["verdict"] == "contradicted" else ""
        cells.append(f"<tr{mark}>{''.join(f'<td>{html.escape(column)}</td>' for column in columns)}</tr>")
    return [
        "<h2>Order</h2>",
        f"<p>{order['num_judged']} comparisons judged together at a false-alarm rate of "
        f"{100 * order['family_false_alarm']:g} %; {order['num_contradicted']} contradicted. Differences in tokens "
        "per target call, second minus first; a question mark stands where theory gives no order.</p>",
        "<details><summary>All comparisons</summary><table><tr><th>T<th>first<th><th>second<th>sample<th>difference"
        f"<th>interval<th>verdict</tr>{''.join(cells)}</table></details>",
    ]
