"""One self-contained page about a run: what was trained, what was measured, what the text looks like.

python -m eval.report --run=RUN_DIR
"""

from __future__ import annotations

import html
import pathlib

from absl import flags

from eval import files, report_decoding, report_sections, report_step_time
from eval.command_line import run_command
from eval.report_faults import FaultLog
from eval.report_inputs import ReportInputs, read_inputs
from eval.report_page import page


def write_report(run_dir: str | pathlib.Path) -> pathlib.Path:
    """Writes `report.html` from the files of a run directory.

    The page needs no network, no scripts and no other file. Parts whose files are missing, damaged or of another form
    than this page reads are left out and named.

    Args:
        run_dir: directory of a training run; read: flags.txt, run.json, metrics.jsonl, eval/benchmark.json,
            eval/head_cost.json, eval/samples.json.

    Returns:
        Path of the page.

    Raises:
        FileNotFoundError: if there is no such directory.
    """
    inputs = read_inputs(run_dir)
    return files.write_text(inputs.run_dir / "report.html", render(inputs))


def render(inputs: ReportInputs) -> str:
    """The page as text."""
    log = FaultLog()
    title = log.build("the title", _title, inputs)
    subtitle = log.build("the line below the title", _subtitle, inputs)
    headline = log.build("the headline", report_sections.headline, inputs)
    sections = [
        log.build(name, builder, inputs)
        for name, builder in (
            ("Decoding", report_decoding.speed),
            ("Where a step's time goes", report_step_time.step_time),
            ("Training", report_sections.training),
            ("Sample answers", report_sections.sample_text),
            ("Settings", report_sections.settings),
        )
    ]

    def missing(part: ReportInputs) -> str:
        return report_sections.missing(part, log.lines)

    # Twice: the warnings may be faulty as well, and the list must name that fault too.
    log.build("the warnings", missing, inputs)
    to_know = log.build("the warnings", missing, inputs)
    heading = [f"<h1>{html.escape(title)}</h1>", f'<p class="soft">{html.escape(subtitle)}</p>']
    return page(title, [*heading, headline, to_know, *sections])


def _title(inputs: ReportInputs) -> str:
    target = (inputs.benchmark.get("target") or inputs.head_cost.get("target") or {}).get("name")
    return f"A draft model for {target}" if target else f"Run {inputs.run_dir.resolve().name}"


def _subtitle(inputs: ReportInputs) -> str:
    parts = []
    if inputs.flags.get("head"):
        rank = inputs.flags.get("rank")
        parts.append(f"{inputs.flags['head'].replace('_', '-')} head" + (f" of rank {rank}" if rank else ""))
    if inputs.train:
        parts.append(f"{inputs.train[-1]['step']} training steps")
    machine = (inputs.benchmark or inputs.head_cost).get("machine") or {}
    if machine:
        parts.append(f"measured on {machine['num_cpus']} cpus ({machine['device_kind']})")
    return ", ".join(parts) or "Nothing was recorded yet."


def main() -> None:
    """The command."""
    print(write_report(flags.FLAGS.run))


if __name__ == "__main__":
    flags.DEFINE_string("run", None, "Run directory to report on.", required=True)
    run_command(main)
