"""error.txt: the whole story of a failure that the user of a command was told in one line."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

from eval.files import write_text

ERROR_FILE = "error.txt"
# What a user can cause; anything else is a fault of the program and shows itself.
REPORTED_ERRORS = (RuntimeError, ValueError, OSError, ImportError)


@contextlib.contextmanager
def error_file(folder: Path) -> Iterator[None]:
    """Writes `error.txt` if what runs inside fails, and removes an earlier one if it does not.

    Args:
        folder: a directory that belongs to this run. Enter this only once that is known: a failure to take a
            directory into use must leave no trace in it.
    """
    path = folder / ERROR_FILE
    try:
        yield
    except REPORTED_ERRORS:
        story = traceback.format_exc().encode("utf-8", "backslashreplace").decode("utf-8")
        # A disk that is full for the run is full for this file too, and the user must still learn why the run stopped.
        with contextlib.suppress(OSError):
            write_text(path, story)
        raise
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
