"""Reading a file that holds one JSON object."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not JSON, or not an object; the message names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object; got {type(value).__name__}")
    return value
