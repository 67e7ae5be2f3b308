"""What a report can show: the files of a run directory, and a list of what is not there."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

from eval import files
from eval.run_directory import read_flags

_RESULTS = {
    "benchmark": ("eval/benchmark.json", "no measurement of acceptance and speed"),
    "head_cost": ("eval/head_cost.json", "no measurement of where a step's time goes"),
    "samples": ("eval/samples.json", "no sample text"),
}


@dataclasses.dataclass
class ReportInputs:
    """Contents of a run directory.

    Attributes:
        run_dir: the directory.
        flags: settings by name, from flags.txt.
        run: run.json: command, versions, seed, ...
        train: rows of metrics.jsonl of training steps, in order.
        held_out: rows of metrics.jsonl of held-out evaluations, in order.
        benchmark: eval/benchmark.json.
        head_cost: eval/head_cost.json.
        samples: eval/samples.json.
        missing: one line a part that is not there or not readable.
    """

    run_dir: pathlib.Path
    flags: dict[str, str] = dataclasses.field(default_factory=dict)
    run: dict[str, Any] = dataclasses.field(default_factory=dict)
    train: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    held_out: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    benchmark: dict[str, Any] = dataclasses.field(default_factory=dict)
    head_cost: dict[str, Any] = dataclasses.field(default_factory=dict)
    samples: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    missing: list[str] = dataclasses.field(default_factory=list)


def read_inputs(run_dir: str | pathlib.Path) -> ReportInputs:
    """Reads what is there. A part that is missing or damaged becomes a line of `missing`, not an error.

    Raises:
        FileNotFoundError: if there is no such directory.
    """
    run_dir = pathlib.Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"no run directory at {run_dir}")
    inputs = ReportInputs(run_dir)
    _read_flags(inputs)
    _read_metrics(inputs)
    run = _read(inputs, "run.json", "no record of command and versions")
    inputs.run = run if isinstance(run, dict) else {}
    for name, (path, consequence) in _RESULTS.items():
        value = _read(inputs, path, consequence)
        if isinstance(value, type(getattr(inputs, name))):
            setattr(inputs, name, value)
        elif value is not None:
            inputs.missing.append(f"{path} has an unknown form: {consequence}")
    return inputs


def _read(inputs: ReportInputs, path: str, consequence: str) -> Any:
    try:
        return files.read_json(inputs.run_dir / path)
    except FileNotFoundError:
        inputs.missing.append(f"{path} is missing: {consequence}")
    except (OSError, ValueError) as error:
        inputs.missing.append(f"{path} cannot be read ({error}): {consequence}")
    return None


def _read_flags(inputs: ReportInputs) -> None:
    try:
        inputs.flags = read_flags(inputs.run_dir / "flags.txt")
    except FileNotFoundError:
        inputs.missing.append("flags.txt is missing: no table of settings")
    except (OSError, ValueError) as error:
        inputs.missing.append(f"flags.txt cannot be read ({error}): no table of settings")


def _read_metrics(inputs: ReportInputs) -> None:
    path = inputs.run_dir / "metrics.jsonl"
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        inputs.missing.append("metrics.jsonl is missing: no loss and acceptance curves")
        return
    except (OSError, UnicodeDecodeError) as error:
        inputs.missing.append(f"metrics.jsonl cannot be read ({error}): no loss and acceptance curves")
        return
    damaged = 0
    for line in text.splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            # The last line of a run that was killed may be half a line.
            damaged += 1
            continue
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            damaged += 1
        elif row.get("kind") == "train":
            inputs.train.append(row)
        elif row.get("kind") == "held_out":
            inputs.held_out.append(row)
    if damaged:
        inputs.missing.append(f"metrics.jsonl has {damaged} damaged line{'s' if damaged > 1 else ''}, left out")
    # A resumed run may have written steps twice; the later row counts.
    inputs.train = list({row["step"]: row for row in inputs.train}.values())
    inputs.held_out = list({row["step"]: row for row in inputs.held_out}.values())
    inputs.train.sort(key=lambda row: row["step"])
    inputs.held_out.sort(key=lambda row: row["step"])
    if not inputs.train and not inputs.held_out:
        inputs.missing.append("metrics.jsonl has no rows: no loss and acceptance curves")
