"""Flagfiles: one flag a line, comments, nesting; every fault is one error that names the file and the line.

The rules are those of absl (`#` and `//` comments, blank lines, `--flagfile=OTHER` inside a file, the last
value of a repeated flag wins), but faults that absl passes over in silence are refused: a file that
includes itself, a line that is not a flag (absl would drop the rest of the file), a comment behind a value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

PACKAGED_FOLDER = Path(__file__).resolve().parent
COMMAND_LINE = "the command line"
_DIRECTIVE = re.compile(r"--?flagfile(=(?P<path>.*))?$", re.DOTALL)
_TRAILING_COMMENT = re.compile(r"\s(#|//)")


@dataclasses.dataclass(frozen=True)
class Argument:
    """One command-line argument and where it was written.

    Attributes:
        text: the argument, such as `--rank=72`.
        origin: "the command line", or file and line.
    """

    text: str
    origin: str


def expand_flagfiles(arguments: Sequence[str]) -> list[Argument]:
    """Replaces every `--flagfile=PATH` by the lines of that file, in place.

    A path is looked up in the working directory, then beside the file that names it; a bare name that is
    in neither is looked up among the flagfiles that come with the package.

    Args:
        arguments: the command line without the name of the program.

    Returns:
        The arguments in order; later ones override earlier ones.

    Raises:
        ValueError: if a flagfile cannot be read, includes itself, or has a line that is not a flag.
    """
    expanded: list[Argument] = []
    rest = list(arguments)
    while rest:
        text = rest.pop(0)
        directive = _DIRECTIVE.match(text)
        if directive is None:
            expanded.append(Argument(text, COMMAND_LINE))
            continue
        path = directive["path"]
        if path is None:
            if not rest:
                raise ValueError("`--flagfile` must be followed by a path; got nothing (the command line)")
            path = rest.pop(0)
        expanded.extend(_read(path, origin=COMMAND_LINE, stack=()))
    return expanded


def origin_of(arguments: Sequence[Argument], name: str) -> str:
    """Where the flag `name` was last written, or an empty string."""
    pattern = re.compile(rf"--?(no)?{re.escape(name)}(=|$)")
    for argument in reversed(arguments):
        if pattern.match(argument.text):
            return argument.origin
    return ""


def _read(path: str, *, origin: str, stack: tuple[Path, ...]) -> list[Argument]:
    file = _find(path, origin=origin, stack=stack)
    if file in stack:
        chain = " -> ".join(str(p) for p in (*stack, file))
        raise ValueError(f"`--flagfile` must not include itself; got {chain}")
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"`--flagfile` must be UTF-8 text; {file} is not ({error.reason} at byte {error.start})"
        ) from None
    except OSError as error:
        raise ValueError(f"`--flagfile` must be readable; {file}: {error.strerror}") from None
    arguments: list[Argument] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if not line or line.startswith(("#", "//")):
            continue
        place = f"{file}, line {number}"
        if not line.startswith("-"):
            raise ValueError(
                f"a line of a flagfile must be a flag (--name=value), a comment or blank; got {line!r} ({place})"
            )
        if _TRAILING_COMMENT.search(line):
            raise ValueError(f"a comment in a flagfile must stand on a line of its own; got {line!r} ({place})")
        if re.match(r"--?\w+\s", line):
            raise ValueError(f"a flag in a flagfile must be written --name=value; got {line!r} ({place})")
        directive = _DIRECTIVE.match(line)
        if directive is None:
            arguments.append(Argument(line, place))
        else:
            arguments.extend(_read(directive["path"] or "", origin=place, stack=(*stack, file)))
    return arguments


def _find(path: str, *, origin: str, stack: tuple[Path, ...]) -> Path:
    if not path:
        raise ValueError(f"`--flagfile` must name a file; got an empty path ({origin})")
    asked = Path(path).expanduser()
    candidates = [asked]
    if not asked.is_absolute():
        candidates += [stack[-1].parent / asked] if stack else []
        candidates += [PACKAGED_FOLDER / asked] if asked.name == path else []
    for candidate in candidates:
        if candidate.is_file():
            return candidate.resolve()
    shipped = ", ".join(sorted(p.name for p in PACKAGED_FOLDER.glob("*.flags")))
    kind = "is a folder" if asked.is_dir() else "does not exist"
    raise ValueError(f"`--flagfile` must name a file; {path!r} {kind} ({origin}; shipped: {shipped})")
