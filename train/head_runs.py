"""Trains or derives several heads on the same data: one run after the other, each in a folder of its own.

The target, its answers, features and rows are made once. A head without a training of its own is made from the
drafter with the full head of the same seed, all others start like that one and see the same batches in the same order.
`heads.json` says what is there and what it was made from; what is done is not repeated.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.compiled_programs import release_compiled_programs
from eval.files import write_json
from eval.heads_directory import HEADS_FILE, SCHEMA
from specjax.json_files import read_object
from train import pipeline
from train.artifacts import RunError, check_same_run, lock_directory, read_record
from train.config import TrainConfig
from train.error_file import error_file
from train.head_list import PlannedHead, options_text
from train.json_fields import field_problem
from train.run_identity import differing_flags, recorded_identity

SHARED_FOLDER = "shared"
# What heads of one run may differ in.
_OF_A_HEAD = ("head", "rank", "head_options", "base")


def run_heads(
    config: TrainConfig,
    planned: Sequence[PlannedHead],
    argv: Sequence[str],
    *,
    on_line: Callable[[str], None] = print,
) -> Path:
    """Makes every head that is not there yet.

    Args:
        config: settings that all heads share; `run_dir` is the directory of the whole run, `seed` that of the data.
        planned: the drafters, each after the one it is made from.
        argv: the command, for the records.
        on_line: gets one line about each drafter.

    Returns:
        The directory.

    Raises:
        RunError: if the directory belongs to other settings, or a run cannot go on.
        ValueError: as `pipeline.run`.
        FileNotFoundError: as `pipeline.run`.
    """
    folder = Path(config.run_dir)
    for head in planned:
        head_config(config, head)  # a setting that does not fit is said before anything is trained
    with lock_directory(folder):
        record = _open(config, folder)
        # A template that shows the date shows that of the first start to all heads, also after midnight.
        config = dataclasses.replace(config, template_date=config.template_date or record["started"])
        shared = pipeline.SharedInputs(_data_config(config))
        with error_file(folder):
            for index, head in enumerate(planned, start=1):
                place = f"[head {index}/{len(planned)}] {head.folder}"
                settings = head_config(config, head)
                if is_done(settings):
                    on_line(f"{place}: {_description(head)} before; {_result(folder / head.folder)}")
                else:
                    start = time.perf_counter()
                    pipeline.run(settings, argv, shared=shared)
                    release_compiled_programs()
                    seconds = time.perf_counter() - start
                    on_line(f"{place}: {_description(head)} in {seconds:.0f} s; {_result(folder / head.folder)}")
                _add(folder, record, head)
    return folder


def head_config(config: TrainConfig, head: PlannedHead) -> TrainConfig:
    """The settings of one drafter's run."""
    folder = Path(config.run_dir)
    changes: dict[str, Any] = {
        "run_dir": str(folder / head.folder),
        "data_dir": config.data_dir or str(folder / SHARED_FOLDER),
        "seed": head.seed,
        "head": head.config.kind,
        "rank": head.config.rank,
        "head_options": options_text(head.config),
        "base": None if head.base is None else str(folder / head.base),
        **dict(head.training),
    }
    try:
        return dataclasses.replace(config, **changes)
    except ValueError as error:
        raise ValueError(f"`--heads`, {head.name}: {error}") from None


def is_done(config: TrainConfig) -> bool:
    """Whether a run of these settings has everything that it was asked for.

    Raises:
        RunError: if its folder holds a run of other settings.
    """
    run_dir = Path(config.run_dir)
    if not (run_dir / "export" / "config.json").is_file():
        return False
    record = read_record(run_dir)
    known_base = record["config"].get("base")
    if config.base is not None and known_base is not None and Path(known_base).name == Path(config.base).name:
        # The whole directory may have been moved since.
        config = dataclasses.replace(config, base=known_base)
    check_same_run(config, record, run_dir)
    return not config.evaluate or (run_dir / "report.html").is_file()


def _data_config(config: TrainConfig) -> TrainConfig:
    folder = Path(config.run_dir)
    return dataclasses.replace(config, data_dir=config.data_dir or str(folder / SHARED_FOLDER))


def _open(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """The record as an earlier start left it, or a new one."""
    path = folder / HEADS_FILE
    own = (*_OF_A_HEAD, "template_date")
    common = {name: value for name, value in config.identity().items() if name not in own}
    if path.exists():
        record = _read_heads_file(path)
        recorded = recorded_identity(record["config"])
        differing = differing_flags(common, {name: value for name, value in recorded.items() if name not in own})
        if differing:
            raise RunError(
                f"`--run_dir` {folder} holds heads of another configuration: {', '.join(differing)}; give the same "
                "flags or another `--run_dir`"
            )
        return record
    if any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise RunError(f"`--run_dir` must be empty or hold an earlier run over heads; {folder} holds other files")
    record = {
        "schema": SCHEMA,
        "kind": "heads",
        "target": config.target,
        "target_dtype": config.target_dtype,
        "started": config.template_date or time.strftime("%Y-%m-%d"),
        "config": common,
        "heads": [],
    }
    write_json(path, record)
    return record


def _read_heads_file(path: Path) -> dict[str, Any]:
    record = read_object(path)
    problem = field_problem(record, {"config": dict, "started": str, "heads": list})
    if problem is None and not all(isinstance(h, dict) and isinstance(h.get("folder"), str) for h in record["heads"]):
        problem = "each of `heads` must be an object with a `folder`; got another"
    if problem is not None:
        raise RunError(f"{path}: {problem}: the file is damaged; restore it or give another `--run_dir`")
    return record


def _add(folder: Path, record: dict[str, Any], head: PlannedHead) -> None:
    """Records a finished drafter, once."""
    entry = _entry(folder, head)
    others = [known for known in record["heads"] if known["folder"] != head.folder]
    if entry not in record["heads"]:
        record["heads"] = [*others, entry]
        write_json(folder / HEADS_FILE, record)


def _entry(folder: Path, head: PlannedHead) -> Mapping[str, Any]:
    return {
        "name": head.name,
        "kind": head.config.kind,
        "rank": head.config.rank,
        "options": options_text(head.config),
        "training": dict(head.training),
        "seed": head.seed,
        "folder": head.folder,
        "made": "trained" if head.is_trained else "derived",
        "base": head.base,
        "config_digest": read_record(folder / head.folder)["config_digest"],
    }


def _description(head: PlannedHead) -> str:
    if head.base is None:
        return "trained"
    return f"{'trained' if head.is_trained else 'derived'} from {head.base}"


def _result(folder: Path) -> str:
    """What the last held-out test said, or the size of what was exported."""
    metrics = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text("utf-8").splitlines()] if metrics.exists() else []
    held_out = [row for row in rows if row["kind"] == "held_out"]
    if held_out:
        last = held_out[-1]
        return f"held-out loss {last['loss']:.3f}, acceptance length {last['acceptance_length']:.2f}"
    return f"exported to {folder / 'export'}"
