"""metrics.jsonl: one JSON object a line, appended as training goes, cut back to a checkpoint on resume."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from eval.files import write_text
from train.artifacts import RunError


class MetricsLog:
    """Appends rows to a JSON-lines file.

    A run that goes on from a checkpoint first drops the rows of later steps, so that no step is written
    twice; the file is replaced in one move and is never absent.
    """

    def __init__(self, path: Path, *, last_step: int) -> None:
        """Opens the file and keeps its rows up to a step.

        Args:
            path: the file; made if absent.
            last_step: steps that the restored checkpoint has behind it; later rows are dropped.

        Raises:
            RunError: naming file and line, if a line is no row; the last one may be cut, as by a kill, and goes.
        """
        self._path = path
        text = _read(path) if path.exists() else ""
        lines = text.split("\n")
        rows = ((number, line) for number, line in enumerate(lines, start=1) if line)
        kept = "".join(
            line + "\n" for number, line in rows if _step_of(path, number, line, last=number == len(lines)) <= last_step
        )
        if kept != text or not path.exists():
            write_text(path, kept)
        self._file = path.open("a", encoding="utf-8")

    def append(self, row: dict[str, Any]) -> None:
        """Writes one row; numbers that are not finite become null, which strict JSON readers accept."""
        self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _read(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise RunError(
            f"{path}, line {line}: must be UTF-8; got byte {content[error.start]:#04x}; remove the line and the same "
            "command goes on"
        ) from None


def _step_of(path: Path, number: int, line: str, *, last: bool) -> float:
    try:
        return float(json.loads(line)["step"])
    except (KeyError, TypeError, ValueError):
        # Only a line without its end can have been cut by a kill: it belongs to no step.
        if last:
            return math.inf
        raise RunError(
            f"{path}, line {number}: must be a JSON object with a `step`; got {line[:40]!r}; remove the line and the "
            "same command goes on"
        ) from None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
