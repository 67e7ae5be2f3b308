"""The sections of a report: each takes what was read and gives HTML, or nothing when its part is missing."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from eval import charts
from eval.report_decoding import best_row, results
from eval.report_format import compact, decimal, interval, short, times
from eval.report_inputs import ReportInputs
from eval.report_page import (
    PALETTE,
    card,
    figure,
    legend,
    names_table,
    section,
)
from eval.terminal import SOURCE_NAMES

_MAX_POINTS = 240


def headline(inputs: ReportInputs) -> str:
    """The figures that a reader wants first."""
    figures = []
    best = best_row(inputs.benchmark)
    if best:
        speed, acceptance = best["speed_up"], best["acceptance"]
        setting = f"{best['system']}, L={best['draft_length']}, T={best['temperature']:g}"
        figures.append(figure(times(speed["value"]), f"the speed of plain decoding{interval(speed)}, at {setting}"))
        longest = max(
            (row for row in inputs.benchmark["results"] if row["system"] == best["system"]),
            key=lambda row: (-row["temperature"], row["draft_length"]),
        )
        acceptance = longest["acceptance"]
        figures.append(
            figure(
                decimal(acceptance["acceptance_length"]),
                f"acceptance length tau at L={longest['draft_length']}, bonus token included"
                f"{interval(acceptance.get('acceptance_length_interval'))}",
            )
        )
        figures.append(figure(decimal(best["tokens_per_second"]["value"], 1), f"tokens a second, at {setting}"))
    greedy = [row["equals_plain"] for row in results(inputs) if row.get("equals_plain")]
    if greedy:
        same, compared = sum(e["identical"] for e in greedy), sum(e["compared"] for e in greedy)
        figures.append(figure(f"{same} of {compared}", "greedy answers equal plain decoding token for token"))
    heads = [head for head in inputs.head_cost.get("heads", []) if head.get("kind") != "full"]
    if heads:
        head = heads[0]
        figures.append(
            figure(
                decimal(head["nu"]),
                f"cost of the {head['name']} head over the full one (nu; bytes {head['byte_ratio']:.2f})",
            )
        )
    return f'<div class="figures">{"".join(figures)}</div>' if figures else ""


def training(inputs: ReportInputs) -> str:
    """Loss and acceptance over the steps, training faint and held-out strong."""
    loss = charts.line_chart(
        [
            charts.Line("training", _series(inputs.train, "loss"), PALETTE[0], faint=len(inputs.train) > 40),
            charts.Line("held out", _series(inputs.held_out, "loss"), PALETTE[1], markers=True),
        ],
        title="Loss by training step",
        x_label="training step",
    )
    positions = max((len(row.get("acceptance_per_step") or []) for row in inputs.train + inputs.held_out), default=0)
    lines, names = [], []
    for position in range(positions):
        color = PALETTE[position % len(PALETTE)]
        lines.append(charts.Line("training", _series(inputs.train, "acceptance_per_step", position), color, faint=True))
        lines.append(
            charts.Line(
                f"draft {position + 1}", _series(inputs.held_out, "acceptance_per_step", position), color, markers=True
            )
        )
        names.append((f"draft {position + 1}", color, ""))
    top = max((y for line in lines for _, y in line.points), default=1.0)
    acceptance = charts.line_chart(
        lines, title="Acceptance by training step", x_label="training step", y_range=(0.0, max(top, 0.0))
    )
    cards = [
        card(
            "Loss",
            loss,
            legend=legend([("training", PALETTE[0], ""), ("held out", PALETTE[1], "")]),
            note="Forward KL to the target's law over the whole vocabulary, weighted over the unrolled drafts.",
        ),
        card(
            "Acceptance while training",
            acceptance,
            legend=legend(names),
            note="Mean of sum min(target, draft) with the true tokens before it; pale lines are training batches.",
        ),
    ]
    return section("Training", cards)


def sample_text(inputs: ReportInputs) -> str:
    """Answers with the origin of each token as colour."""
    if not inputs.samples:
        return ""
    key = "".join(f'<span class="key {name}">{html.escape(text)}</span> ' for name, text in SOURCE_NAMES.items())
    cards = []
    for sample in inputs.samples:
        spans = "".join(
            f'<span class="{html.escape(piece["source"], quote=True)}">{html.escape(piece["text"])}</span>'
            for piece in sample["pieces"]
        )
        tau = decimal(sample.get("acceptance_length"))
        heading = f"{sample['category']}: {sample['system']}, L={sample['draft_length']}, tau {tau}"
        prompt = html.escape(sample["prompt"])
        cards.append(
            f'<div class="card"><h3>{html.escape(heading)}</h3><div class="prompt">{prompt}</div>'
            f'<div class="sample">{spans}</div></div>'
        )
    return f'<h2>Sample answers</h2><p class="small">{key}</p><div class="charts">{"".join(cards)}</div>'


def settings(inputs: ReportInputs) -> str:
    """What ran: target, drafter, versions, machine, flags."""
    pairs: list[tuple[str, str]] = []
    target = inputs.benchmark.get("target") or inputs.head_cost.get("target") or {}
    if target:
        pairs.append(("target", f"{target['name']} ({target['source']})"))
        weights = f"{charts.number(target['num_params'])} numbers, sha256 {short(target['digest'])}"
        pairs.append(("target weights", weights))
        pairs.append(("chat template", f"sha256 {short(target['template_digest'])}"))
    for name, system in inputs.benchmark.get("systems", {}).items():
        digest = f", sha256 {short(system['digest'])}" if system["digest"] else ""
        size = f"{charts.number(system['num_params'])} numbers" if system["num_params"] else "no parameters"
        pairs.append((f"drafter {name}", size + digest))
    source = inputs.benchmark or inputs.head_cost or inputs.run
    for name, version in (source.get("versions") or {}).items():
        pairs.append((name, str(version)))
    machine = source.get("machine") or {}
    if machine:
        pairs.append(
            (
                "machine",
                f"{machine['num_devices']} x {machine['device_kind']}, {machine['num_cpus']} cpus, {machine['system']}",
            )
        )
    if source.get("time"):
        pairs.append(("measured", source["time"]))
    flags = names_table(sorted(inputs.flags.items()))
    run = names_table(
        (name, value if isinstance(value, str) else compact(value))
        for name, value in inputs.run.items()
        if not isinstance(value, dict) or len(compact(value)) < 400
    )
    parts = [
        card("What was measured", names_table(pairs)),
        f'<div class="card"><details><summary>All settings ({len(inputs.flags)})</summary>{flags}</details></div>'
        if flags
        else "",
        f'<div class="card"><details><summary>The run</summary>{run}</details></div>' if run else "",
    ]
    return section("Settings", parts)


def missing(inputs: ReportInputs, faults: Sequence[str] = ()) -> str:
    """What is not there or not of a known form (`faults`), and warnings of the measurements."""
    warnings = list(inputs.benchmark.get("warnings", [])) + list(inputs.head_cost.get("warnings", []))
    for row in results(inputs):
        for divergence in (row.get("equals_plain") or {}).get("divergences", []):
            warnings.append(
                f"{row['label']}: the answer to {divergence['question_id']} parts from plain decoding at token "
                f"{divergence['position']}, where the target's two top logits differ by {divergence['gap']:.2g}"
            )
    lines = [*warnings, *inputs.missing, *faults]
    if not lines:
        return ""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f'<div class="missing"><b>To know</b><ul>{items}</ul></div>'


def _series(rows: Sequence[dict[str, Any]], field: str, position: int | None = None) -> list[tuple[float, float]]:
    points = []
    for row in rows:
        value = row.get(field)
        if position is not None:
            value = value[position] if isinstance(value, list) and position < len(value) else None
        if isinstance(value, int | float) and math.isfinite(value):
            points.append((float(row["step"]), float(value)))
    return thin(points, _MAX_POINTS)


def thin(points: Sequence[tuple[float, float]], limit: int) -> list[tuple[float, float]]:
    """At most `limit` points: means of equal runs of neighbours, so that no spike is dropped by chance."""
    if len(points) <= limit:
        return list(points)
    size = -(-len(points) // limit)
    runs = [points[start : start + size] for start in range(0, len(points), size)]
    return [(sum(x for x, _ in run) / len(run), sum(y for _, y in run) / len(run)) for run in runs]
