"""What a run over heads leaves behind: `heads.json` and a folder for every drafter."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from eval import files
from eval.run_directory import RunDirectory

HEADS_FILE = "heads.json"
SCHEMA = 1


@dataclasses.dataclass(frozen=True)
class TrainedHead:
    """One drafter of a run over heads.

    Attributes:
        name: of the head, the same for all seeds.
        kind: of the head.
        seed: of its training.
        made: "trained" or "derived".
        base: folder of the drafter it was made from, or None.
        directory: its run directory.
    """

    name: str
    kind: str
    seed: int
    made: str
    base: str | None
    directory: RunDirectory


@dataclasses.dataclass(frozen=True)
class HeadsDirectory:
    """A directory of `python -m train.heads`.

    Attributes:
        path: the directory.
        target: source of the target.
        target_dtype: dtype of its weights.
        started: day of the first start, YYYY-MM-DD, that templates with a date show.
        heads: finished drafters, in the order they were made.
    """

    path: pathlib.Path
    target: str
    target_dtype: str
    started: str
    heads: tuple[TrainedHead, ...]

    @classmethod
    def open(cls, path: str | pathlib.Path) -> HeadsDirectory:
        """Reads a directory.

        Raises:
            FileNotFoundError: if there is no such directory, it is of another kind, or a drafter's folder is gone.
            ValueError: if its record is broken or of another version.
        """
        path = pathlib.Path(path)
        if not path.is_dir():
            raise FileNotFoundError(f"no run directory at {path}")
        record_path = path / HEADS_FILE
        if not record_path.is_file():
            raise FileNotFoundError(f"{path} holds no {HEADS_FILE}: it is no directory of `python -m train.heads`")
        record = files.read_json(record_path)
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            found = record.get("schema") if isinstance(record, dict) else None
            raise ValueError(f"{record_path}: `schema` must be {SCHEMA}; got {found!r}")
        heads = tuple(_head(path, entry) for entry in record["heads"])
        return cls(path, record["target"], record["target_dtype"], record["started"], heads)

    @property
    def results(self) -> pathlib.Path:
        """Folder of measured results."""
        return self.path / "eval"


def _head(path: pathlib.Path, entry: dict[str, Any]) -> TrainedHead:
    directory = RunDirectory.open(path / entry["folder"])
    return TrainedHead(entry["name"], entry["kind"], entry["seed"], entry["made"], entry["base"], directory)
