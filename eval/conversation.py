"""Where a chat's questions come from: typed in a terminal, or one a line of a pipe or file."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from eval.terminal import Painter

_TYPED_HELP = "/new starts a new conversation, /exit or an empty line at the start ends"
_PIPED_HELP = "each line is a question; /new starts a new conversation, /exit ends"


def converse(chat: Any, painter: Painter, out: Any) -> None:
    """Asks what is typed in a terminal until the user ends; mistakes are told and do not end it.

    Args:
        chat: `eval.generate.Chat` or its like: `ask`, `describe` and `restart`.
        painter: colours the program's own remarks.
        out: where they go.
    """
    print(painter.dim(_TYPED_HELP), file=out)
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print(file=out)
            return
        if text in ("", "/exit"):
            return
        if text == "/new":
            chat.restart()
            continue
        try:
            print(painter.dim(chat.describe(chat.ask(text))), file=out)
        except KeyboardInterrupt:
            print(painter.dim("\n[stopped]"), file=out)
        except ValueError as error:
            print(f"error: {error}; /new starts a new conversation", file=sys.stderr)


def answer_lines(chat: Any, lines: Iterable[bytes], remarks: Any) -> int:
    """Asks each line of a pipe or file that is not blank, until its end; only answers go where the chat writes.

    Args:
        chat: as in `converse`.
        lines: of standard input, undecoded: what the locale takes for text does not matter then.
        remarks: where all but the answers goes.

    Returns:
        1 if a question could not be answered, else 0: the command's exit status.

    Raises:
        ValueError: if a line is not UTF-8 text.
    """
    print(_PIPED_HELP, file=remarks)
    status = 0
    for number, line in enumerate(lines, start=1):
        try:
            text = line.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(
                f"standard input, line {number}: must be UTF-8 text; got {error.reason} at byte {error.start}"
            ) from None
        if not text:
            continue
        if text == "/exit":
            break
        if text == "/new":
            chat.restart()
            continue
        # Nobody sees what a pipe brings, so the question stands beside the prompt.
        print(f"> {text}", file=remarks, flush=True)
        try:
            print(chat.describe(chat.ask(text)), file=remarks)
        except ValueError as error:
            status = 1
            print(
                f"error: standard input, line {number}: {error}; the line /new starts a new conversation", file=remarks
            )
    return status
