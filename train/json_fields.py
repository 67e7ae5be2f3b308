"""Says what is wrong with the fields of a JSON object that an earlier start of the command wrote."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

_WORDS = {
    bool: "true or false",
    dict: "an object",
    int: "a whole number",
    list: "a list",
    str: "a string",
}


def field_problem(value: Mapping[str, Any], kinds: Mapping[str, type]) -> str | None:
    """The first field that is missing or of another kind, in words; None if all are as they must be.

    Args:
        value: the object.
        kinds: type of each field that must be there: bool, dict, int, list or str.
    """
    for name, kind in kinds.items():
        # To Python, `True` is an `int` too.
        if type(value.get(name)) is not kind:
            return f"`{name}` must be {_WORDS[kind]}; got {shown(value, name)}"
    return None


def shown(value: Mapping[str, Any], name: str) -> str:
    """A field for a message, short whatever it holds."""
    return reprlib.repr(value[name]) if name in value else "nothing"
