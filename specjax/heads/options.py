"""Settings that belong to one kind of head: declared by the head, checked here, written as `name=value` by users."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class HeadOption:
    """One setting of a kind of head.

    Attributes:
        name: as users write it.
        default: bool, int, float or a tuple of ints; its type is the type of all values. An int of 0 may stand for
            "chosen by the head" where `help` says so.
        help: what it means.
        at_least: smallest allowed value (of every element of a tuple).
        at_most: largest allowed value.
    """

    name: str
    default: bool | int | float | tuple[int, ...]
    help: str
    at_least: int | float | None = None
    at_most: int | float | None = None


def check_option(kind: str, known: Mapping[str, HeadOption], name: str, value: Any) -> Any:
    """The value in the option's type.

    Raises:
        ValueError: if the head has no such option, or the value is of another type or out of range.
    """
    if name not in known:
        raise ValueError(f"an option of the {kind} head must be one of {sorted(known) or 'none'}; got {name!r}")
    option = known[name]
    wanted = type(option.default)
    if wanted is float and type(value) is int:
        value = float(value)
    if wanted is tuple and isinstance(value, list):
        value = tuple(value)
    parts = value if isinstance(value, tuple) else (value,)
    element = int if wanted is tuple else wanted
    if type(value) is not wanted or not all(type(part) is element for part in parts):
        words = "whole numbers" if wanted is tuple else wanted.__name__
        raise ValueError(f"`{name}` of the {kind} head must be of type {words}; got {value!r}")
    for part in parts:
        if option.at_least is not None and not part >= option.at_least:
            raise ValueError(f"`{name}` of the {kind} head must be at least {option.at_least:g}; got {part}")
        if option.at_most is not None and not part <= option.at_most:
            raise ValueError(f"`{name}` of the {kind} head must be at most {option.at_most:g}; got {part}")
    return value


def parse_options(text: str, options: tuple[HeadOption, ...]) -> dict[str, Any]:
    """Options written as "name=value,name=value"; a tuple of numbers is written with colons, as in "96:72:48".

    Args:
        text: what the user wrote.
        options: those that the head has; unknown names are kept as text, for `check_option` to refuse.

    Returns:
        Values by name.

    Raises:
        ValueError: if a part has no value, a name comes twice, or a value cannot be read.
    """
    known = {option.name: option for option in options}
    values: dict[str, Any] = {}
    for part in text.split(",") if text else ():
        name, equals, written = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not written:
            raise ValueError(f"options of a head must be written as name=value,name=value; got {text!r}")
        if name in values:
            raise ValueError(f"options of a head must be given once each; got `{name}` twice")
        values[name] = _parse(name, written, known[name].default) if name in known else written
    return values


def format_options(options: tuple[tuple[str, Any], ...]) -> str:
    """The text that `parse_options` reads as these."""

    def written(value: Any) -> str:
        if isinstance(value, tuple):
            return ":".join(map(str, value))
        return str(value).lower() if isinstance(value, bool) else str(value)

    return ",".join(f"{name}={written(value)}" for name, value in options)


def _parse(name: str, written: str, default: Any) -> Any:
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False, "1": True, "0": False}[written.lower()]
        if isinstance(default, tuple):
            return tuple(int(number) for number in written.split(":"))
        return type(default)(written)
    except (KeyError, ValueError):
        words = {bool: "true or false", int: "a whole number", float: "a number", tuple: "whole numbers with colons"}
        raise ValueError(f"`{name}` must be {words[type(default)]}; got {written!r}") from None
