"""Coloured text on a terminal: one colour a token origin, nothing of the model's own control characters."""

from __future__ import annotations

import os
import re
from typing import Any

_RESET = "\x1b[0m"
_CODES = {"accepted": "\x1b[32m", "recovered": "\x1b[33m", "bonus": "\x1b[36m", "target": ""}
_DIM = "\x1b[2m"
# What a reader is told about each source of tokens, see `specjax.decoding.Completion.token_sources`.
SOURCE_NAMES = {
    "accepted": "accepted draft",
    "recovered": "recovered after a rejection",
    "bonus": "bonus after full acceptance",
    # The last token that `max_new_tokens` allows is always of this kind: there is no room for a draft before it.
    "target": "the target's own, nothing was drafted",
}
# Everything that could move the cursor or recolour the screen; newline and tab are text.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")

COLOR_CHOICES = ("auto", "always", "never")


def use_color(choice: str, stream: Any) -> bool:
    """Whether to colour what goes to a stream.

    Args:
        choice: "always", "never", or "auto": on a terminal, unless NO_COLOR is set or the terminal is dumb.
        stream: where the text goes.

    Raises:
        ValueError: if the choice is none of these.
    """
    if choice not in COLOR_CHOICES:
        raise ValueError(f"`--color` must be one of {', '.join(COLOR_CHOICES)}; got {choice!r}")
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


class Painter:
    """Writes text with the colour of its origin.

    Attributes:
        color: whether colours are written at all.
    """

    def __init__(self, color: bool) -> None:
        self.color = color

    def paint(self, text: str, source: str) -> str:
        """A piece of a model's text; control characters become the replacement character."""
        text = _CONTROL.sub("\ufffd", text)
        code = _CODES.get(source, "") if self.color else ""
        return f"{code}{text}{_RESET}" if code and text else text

    def dim(self, text: str) -> str:
        """A remark of the program."""
        return f"{_DIM}{text}{_RESET}" if self.color else text

    def key(self) -> str:
        """One line that says which colour is what; nothing without colours."""
        if not self.color:
            return ""
        return "  ".join(self.paint(text, source) for source, text in SOURCE_NAMES.items())
