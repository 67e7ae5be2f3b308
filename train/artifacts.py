"""The run directory: who owns it, what made it, and files that are whole or absent.

A run directory belongs to one configuration. `run.json` says which, with the command, versions, git state
and digests of what was trained on; `flags.txt` loads again as a flagfile.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eval.files import read_json, write_json, write_text
from eval.provenance import describe_run
from train.config import TrainConfig, differing_flags
from train.flags import flags_text

_RESULTS = ("data", "features", "checkpoints", "export", "metrics.jsonl")
_OURS = ("flags.txt", "run.json", "error.txt")


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
            while `--noresume` is given.
    """
    run_dir = Path(config.run_dir)
    if run_dir.exists() and not run_dir.is_dir():
        raise RunError(f"`--run_dir` must be a directory; {run_dir} is a file")
    record_path = run_dir / "run.json"
    start = start_record(argv)
    # A run that stopped before it made anything (a wrong flag, say) does not hold the directory.
    if record_path.exists() and any((run_dir / name).exists() for name in _RESULTS):
        record = read_json(record_path)
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
    write_text(run_dir / "flags.txt", flags_text(config))
    write_json(record_path, record)
    return run_dir


def check_same_run(config: TrainConfig, record: Mapping[str, Any], run_dir: Path) -> None:
    """Refuses a run directory of another configuration.

    Raises:
        RunError: naming every flag that differs, with both values.
    """
    # A run of an earlier version may not know a flag: it did what the flag's default does.
    known = {field.name: field.default for field in dataclasses.fields(config) if field.metadata["identity"]}
    differing = differing_flags(config.identity(), {**known, **record.get("config", {})})
    if differing:
        raise RunError(
            f"`--run_dir` {run_dir} belongs to a run of another configuration: {', '.join(differing)}; "
            f"give the same flags or another `--run_dir` (`--data_dir={run_dir}` shares its answers and features)"
        )


def update_record(run_dir: Path, **entries: Any) -> None:
    """Adds entries to `run.json`."""
    record = read_json(run_dir / "run.json")
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
