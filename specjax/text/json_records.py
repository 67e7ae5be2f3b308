"""JSON and JSONL files, record by record, each with its line; what is wrong with one does not lose the others."""

from __future__ import annotations

import codecs
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

MAX_LINE_BYTES = 64 * 2**20


@dataclasses.dataclass(frozen=True)
class JsonRecord:
    """One record of a file.

    Attributes:
        line: line on which it starts, from 1.
        value: the record, if it could be read.
        problem: why it could not, as "kind: detail", else None.
    """

    line: int
    value: Any = None
    problem: str | None = None


def read_json_records(path: str | os.PathLike[str], *, max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[JsonRecord]:
    """Reads a file of JSON records: one a line, or (in a file named .json) one array, or one object.

    A byte-order mark, blank lines, either kind of line end and a missing last line end are no problem. Invalid
    UTF-8, broken JSON, an object with a key twice and a line of more than `max_line_bytes` are problems of
    their line alone.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if an array is broken: where its next record would start cannot be told.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        if file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(0)
        if path.suffix.lower() == ".json":
            yield from _read_document(path, file, max_line_bytes)
        else:
            yield from _read_lines(file, max_line_bytes)


def _read_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[JsonRecord]:
    line = 0
    while raw := file.readline(max_line_bytes + 1):
        line += 1
        if len(raw) > max_line_bytes:
            while raw and not raw.endswith(b"\n"):
                raw = file.readline(max_line_bytes)
            yield JsonRecord(line, problem=f"line too long: more than {max_line_bytes} bytes")
            continue
        try:
            text = raw.decode("utf-8")
        except UnicodeDecodeError as error:
            yield JsonRecord(line, problem=f"invalid UTF-8: byte {error.start + 1} of the line")
            continue
        if text.strip():
            yield _parse(line, text)


def _read_document(path: Path, file: BinaryIO, max_line_bytes: int) -> Iterator[JsonRecord]:
    start = file.tell()
    first = file.read(1)
    while first.isspace():
        first = file.read(1)
    file.seek(start)
    if first == b"[":
        yield from _read_array(path, file)
        return
    if first == b"{":
        # One object over several lines is one record; lines of objects are one each.
        head = file.readline(max_line_bytes + 1)
        while not head.strip():
            head = file.readline(max_line_bytes + 1)
        file.seek(start)
        if _is_unfinished(head):
            yield _parse_whole(file)
            return
    yield from _read_lines(file, max_line_bytes)


def _is_unfinished(raw: bytes) -> bool:
    """Whether a line is the start of a JSON value that goes on in the next."""
    text = raw.decode("utf-8", "replace").rstrip()
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        return error.pos >= len(text) or error.msg.startswith("Unterminated")
    except (ValueError, RecursionError):
        pass
    return False


def _parse_whole(file: BinaryIO) -> JsonRecord:
    try:
        text = file.read().decode("utf-8")
    except UnicodeDecodeError as error:
        return JsonRecord(1, problem=f"invalid UTF-8: byte {error.start + 1} of the file")
    leading = text[: len(text) - len(text.lstrip())]
    return _parse(1 + leading.count("\n"), text)


def _read_array(path: Path, file: BinaryIO) -> Iterator[JsonRecord]:
    raw = file.read()
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = 1 + raw.count(b"\n", 0, error.start)
        raise ValueError(f"{path}:{line}: invalid UTF-8 inside an array of records") from None
    decoder = json.JSONDecoder(object_pairs_hook=_Object)
    position = _skip_space(text, text.index("[") + 1)
    line, counted = 1, 0
    separator = text[position : position + 1]
    while separator != "]":
        line, counted = line + text.count("\n", counted, position), position
        try:
            value, position = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{line}: {_message(error)} in an array of records") from None
        yield _checked(line, value)
        position = _skip_space(text, position)
        separator = text[position : position + 1]
        if separator not in ("]", ","):
            line += text.count("\n", counted, position)
            raise ValueError(f"{path}:{line}: ',' or ']' must follow a record of an array; got {separator!r}")
        if separator == ",":
            position = _skip_space(text, position + 1)
    rest = _skip_space(text, position + 1)
    if rest < len(text):
        line += text.count("\n", counted, rest)
        raise ValueError(f"{path}:{line}: nothing may follow the array of records; got {text[rest : rest + 20]!r}")


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


class _Object(dict[str, Any]):
    """A JSON object that remembers a key it was given twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.repeated: str | None = None
        if len(self) != len(pairs):
            seen: set[str] = set()
            self.repeated = next(key for key, _ in pairs if key in seen or seen.add(key))


def _parse(line: int, text: str) -> JsonRecord:
    try:
        value = json.loads(text, object_pairs_hook=_Object)
    except (ValueError, RecursionError) as error:
        return JsonRecord(line, problem=_message(error))
    return _checked(line, value)


def _message(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "invalid JSON: nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"invalid JSON: {error.msg} (column {error.colno})"
    return f"invalid JSON: {error}"


def _checked(line: int, value: Any) -> JsonRecord:
    stack = [value]
    while stack:
        part = stack.pop()
        if isinstance(part, _Object):
            if part.repeated is not None:
                return JsonRecord(line, problem=f"key appears twice in one object: {part.repeated!r}")
            stack.extend(part.values())
        elif isinstance(part, list):
            stack.extend(part)
    return JsonRecord(line, value=value)
