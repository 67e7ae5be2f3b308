"""Result files: written under a temporary name and renamed, so that a killed command leaves no half a file."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable
from typing import Any


def write_text(path: pathlib.Path, text: str) -> pathlib.Path:
    """Writes UTF-8 text atomically and makes the folder if needed; returns the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
    return path


def write_json(path: pathlib.Path, value: Any) -> pathlib.Path:
    """Writes one JSON document; NaN and infinities are refused (they are not JSON)."""
    return write_text(path, json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_jsonl(path: pathlib.Path, rows: Iterable[Any]) -> pathlib.Path:
    """Writes one JSON document a line."""
    return write_text(path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows))


def read_json(path: pathlib.Path) -> Any:
    """Reads one JSON document.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not JSON; the message names the file and the line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}:{error.lineno}: not JSON: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
