"""The run directory: who owns it, what made it, and files that are whole or absent.

A run directory belongs to one configuration. `run.json` says which, with the command, versions, git state
and digests of what was trained on; `flags.txt` loads again as a flagfile.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval.files import write_json, write_text
from eval.provenance import describe_run
from specjax.json_files import read_object
from train.config import TrainConfig
from train.error_file import ERROR_FILE
from train.flags import flags_text
from train.json_fields import field_problem, shown
from train.run_identity import differing_flags, recorded_identity

_FOLDERS = ("data", "features", "checkpoints", "export")
_RESULTS = (*_FOLDERS, "metrics.jsonl")
_OURS = ("flags.txt", "run.json", ERROR_FILE)


class RunError(RuntimeError):
    """A run cannot go on, for a reason that one line explains to its user."""


@contextmanager
def lock_directory(folder: Path) -> Iterator[None]:
    """Holds a directory for this process alone; the system lets go of it even after a kill.

    Raises:
        RunError: if another process holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(f"another process is using {folder}; wait for it or choose another directory") from None
        yield


def open_run_directory(config: TrainConfig, argv: Sequence[str]) -> Path:
    """Takes `--run_dir` into use, new or as an earlier run of the same configuration left it.

    Args:
        config: the settings of this run.
        argv: the command, for `run.json`.

    Returns:
        The directory, with `flags.txt` and `run.json` written.

    Raises:
        RunError: if the directory belongs to another configuration, holds other files, or holds a run
            while `--noresume` is given; if a file of it is damaged or in the place of a folder.
        ValueError: if `run.json` is not an object in JSON.
    """
    run_dir = Path(config.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise RunError(f"`--run_dir` must be a directory; {run_dir} is a file")
    record_path = run_dir / "run.json"
    start = start_record(argv)
    # A run that stopped before it made anything (a wrong flag, say) does not hold the directory.
    if record_path.exists() and any((run_dir / name).exists() for name in _RESULTS):
        record = read_record(run_dir)
        check_same_run(config, record, run_dir)
        if not config.resume:
            raise RunError(f"`--noresume` needs an empty `--run_dir`; {run_dir} already holds this run")
        record["starts"].append(start)
    else:
        if run_dir.exists() and any(p.name not in _OURS and not p.name.startswith(".") for p in run_dir.iterdir()):
            raise RunError(f"`--run_dir` must be empty or hold an earlier run; {run_dir} holds other files")
        record = {
            **start,
            "seed": config.seed,
            "config": config.identity(),
            "config_digest": config.digest(),
            "starts": [start],
        }
    for name in _FOLDERS:
        # Found here, and not by the stage that needs the folder, hours later.
        if (run_dir / name).exists() and not (run_dir / name).is_dir():
            raise RunError(f"{run_dir / name} must be a directory; it is a file: move it away")
    write_text(run_dir / "flags.txt", flags_text(config))
    write_json(record_path, record)
    return run_dir


def read_record(run_dir: Path) -> dict[str, Any]:
    """What `run.json` says of a run.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if it is not an object in JSON.
        RunError: naming the field, if what every run records is missing.
    """
    path = run_dir / "run.json"
    record = read_object(path)
    problem = field_problem(record, {"config": dict, "config_digest": str, "starts": list})
    if problem is None and not record["config"]:
        problem = "`config` must hold the settings of the run; got {}"
    if problem is None and not (record["starts"] and _is_start(record["starts"][0])):
        problem = f"`starts` must begin with an object with a `time`; got {shown(record, 'starts')}"
    if problem is not None:
        raise RunError(f"{path}: {problem}: the file is damaged; restore it or give another `--run_dir`")
    return record


def _is_start(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("time"), str)


def check_same_run(config: TrainConfig, record: Mapping[str, Any], run_dir: Path) -> None:
    """Refuses a run directory of another configuration.

    Raises:
        RunError: naming every flag that differs, with both values.
    """
    differing = differing_flags(config.identity(), recorded_identity(record["config"]))
    if differing:
        raise RunError(
            f"`--run_dir` {run_dir} belongs to a run of another configuration: {', '.join(differing)}; "
            f"give the same flags or another `--run_dir` (`--data_dir={run_dir}` shares its answers and features)"
        )


def update_record(run_dir: Path, **entries: Any) -> None:
    """Adds entries to `run.json`."""
    record = read_record(run_dir)
    record.update(entries)
    write_json(run_dir / "run.json", record)


def start_record(argv: Sequence[str]) -> dict[str, Any]:
    """What one start of the command ran with: time, command, versions, machine and git state."""
    record = describe_run()
    record["command"] = list(argv)
    for package in ("optax", "orbax-checkpoint", "tokenizers", "datasets"):
        record["versions"][package] = importlib.metadata.version(package)
    record["git"] = git_state()
    return record


def git_state() -> dict[str, Any] | None:
    """Commit of the source tree and whether it has changes; None outside a repository."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None
