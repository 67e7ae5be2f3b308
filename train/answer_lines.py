"""Reads answers.jsonl. Only what a kill left of the last line is dropped; any other bad line is named, not lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from train.artifacts import RunError
from train.json_fields import field_problem, shown

Line = dict[str, Any]

_KINDS: dict[str, type] = {
    "id": str,
    "turn": int,
    "user": str,
    "answer": str,
    "finish_reason": str,
    "prompt_ids": list,
    "token_ids": list,
}


def read_answer_lines(path: Path) -> tuple[list[Line], int]:
    """The finished turns in a file.

    Args:
        path: the file; it need not exist.

    Returns:
        The lines, and how many bytes they take up; what follows is a line that a kill cut in two.

    Raises:
        RunError: naming file and line, if another line than the last one is damaged or a line is no finished turn.
    """
    if not path.exists():
        return [], 0
    lines: list[Line] = []
    size = path.stat().st_size
    kept = 0
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            is_last = kept + len(raw) == size
            if is_last and not raw.endswith(b"\n"):
                break
            try:
                line = json.loads(raw.decode("utf-8"))
            except ValueError:
                if is_last:
                    break
                raise _bad_line(path, number, "not JSON") from None
            problem = _problem(line)
            if problem is not None:
                raise _bad_line(path, number, problem)
            lines.append(line)
            kept += len(raw)
    return lines, kept


def _problem(line: Any) -> str | None:
    """What keeps a JSON value from being a finished turn."""
    if not isinstance(line, dict):
        return f"must be an object; got {type(line).__name__}"
    problem = field_problem(line, _KINDS)
    if problem is not None:
        return problem
    if line["turn"] < 0:
        return f"`turn` must be at least 0; got {line['turn']}"
    for name in ("prompt_ids", "token_ids"):
        if not all(type(token) is int and 0 <= token < 2**31 for token in line[name]):
            return f"`{name}` must be a list of token ids; got {shown(line, name)}"
    return None


def _bad_line(path: Path, number: int, problem: str) -> RunError:
    return RunError(
        f"{path}, line {number}: {problem}; remove the line and the same command generates its answer again"
    )
