"""One record of a data set as a conversation, or the reason why it is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SYSTEM = "system"
USER = "user"
ASSISTANT = "assistant"
TOOL = "tool"

# Names of roles in the data sets that people have.
_ROLES = {
    "system": SYSTEM,
    "developer": SYSTEM,
    "user": USER,
    "human": USER,
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "chatgpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "tool": TOOL,
    "function": TOOL,
    "observation": TOOL,
}


class RecordProblem(Exception):
    """Why a record is no conversation.

    Attributes:
        reason: short and of few kinds, for counting.
        detail: where in the record and what was found.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason} ({detail})" if detail else reason)
        self.reason = reason
        self.detail = detail


def conversation_of(record: Any) -> list[dict[str, str]]:
    """Messages of a record in one of three forms.

    `messages` (or `conversations`) with entries of `role` and `content` or of `from` and `value`, or `turns`, a
    list of what a user says turn by turn.

    The roles must make a conversation: at most one system message, at the start; then the user first; then
    never two messages of the user, nor two of the assistant, in a row. Messages of tools may stand between.
    Lists of `turns` have nothing but the user's.

    Raises:
        RecordProblem: if it is none.
    """
    if not isinstance(record, Mapping):
        raise RecordProblem("record is not an object", f"got {_kind(record)}")
    for key in ("messages", "conversations", "turns"):
        if record.get(key) is not None:
            entries = record[key]
            break
    else:
        raise RecordProblem("missing key", "none of `messages`, `conversations`, `turns`")
    if isinstance(entries, Mapping):
        entries = _rows(entries)
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise RecordProblem("conversation is not a list", f"`{key}` is {_kind(entries)}")
    if not entries:
        raise RecordProblem("conversation is empty", f"`{key}`")
    if key == "turns" and not isinstance(entries[0], Mapping):
        return [{"role": USER, "content": _text(turn, f"turn {index}", "turn")} for index, turn in enumerate(entries)]
    messages = [_message(entry, f"message {index}") for index, entry in enumerate(entries)]
    _check_roles([message["role"] for message in messages])
    return messages


def _rows(columns: Mapping[str, Any]) -> Any:
    """A list of messages that a table stores by column, or what was given if it is nothing of the kind."""
    lists = [column for column in columns.values() if isinstance(column, list)]
    if not lists or len(lists) != len(columns) or len({len(column) for column in lists}) != 1:
        return columns
    return [dict(zip(columns, row, strict=True)) for row in zip(*lists, strict=True)]


def _message(entry: Any, where: str) -> dict[str, str]:
    if not isinstance(entry, Mapping):
        raise RecordProblem("message is not an object", f"{where}: got {_kind(entry)}")
    # A table of both kinds has all four columns, with nulls.
    role_key, content_key = ("from", "value") if "from" in entry and entry.get("role") is None else ("role", "content")
    for key in (role_key, content_key):
        if key not in entry:
            raise RecordProblem("missing key", f"{where}: `{key}`")
    name = _text(entry[role_key], where, f"`{role_key}`")
    role = _ROLES.get(name.lower())
    if role is None:
        raise RecordProblem("unknown role", f"{where}: {name!r}")
    return {"role": role, "content": _text(entry[content_key], where, f"`{content_key}`")}


def _text(value: Any, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise RecordProblem(f"{what} is {_kind(value)} instead of text", where)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordProblem(f"{what} holds half a surrogate pair", f"{where}, character {error.start}") from error
    return value


def _check_roles(roles: list[str]) -> None:
    first = 1 if roles[0] == SYSTEM else 0
    if SYSTEM in roles[first:]:
        raise RecordProblem("system message after the start", f"message {roles.index(SYSTEM, first)}")
    if first < len(roles) and roles[first] != USER:
        raise RecordProblem("first turn is not the user's", f"message {first} is the {roles[first]}'s")
    if first == len(roles):
        raise RecordProblem("system message only")
    for index in range(first + 1, len(roles)):
        if roles[index] == roles[index - 1] != TOOL:
            raise RecordProblem("roles do not alternate", f"messages {index - 1} and {index} are both {roles[index]}")


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Mapping):
        return "an object"
    return "a list"
