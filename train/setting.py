"""What a field of the settings is: a flag with a default, a help text and the rule that its values keep."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def setting(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] = (),
    at_least: int | float | None = None,
    at_most: int | float | None = None,
    above: int | float | None = None,
    identity: bool = True,
) -> Any:
    """A field that is also a flag.

    Args:
        default: the embedded default.
        help_text: what `--help` shows.
        choices: allowed words.
        at_least: smallest allowed value.
        at_most: largest allowed value.
        above: exclusive lower bound.
        identity: whether the value decides what the run computes; a run directory belongs to one set of these.

    Returns:
        A dataclass field.
    """
    rule = {"choices": choices, "at_least": at_least, "at_most": at_most, "above": above}
    return dataclasses.field(default=default, metadata={"help": help_text, "identity": identity, **rule})


def check_field(field: dataclasses.Field[Any], value: Any) -> None:
    """Checks one value against its field's type and rule.

    Raises:
        ValueError: naming the flag, the rule and the value.
    """
    rule, name = field.metadata, f"`--{field.name}`"
    optional = str(field.type).endswith("| None")
    if value is None:
        if not optional:
            raise ValueError(f"{name} must be given; got nothing")
        return
    kind = {"str": str, "int": int, "float": float, "bool": bool}[str(field.type).split(" ")[0]]
    accepted = (int, float) if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{name} must be of type {kind.__name__}; got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")
    if rule["choices"] and value not in rule["choices"]:
        raise ValueError(f"{name} must be one of {', '.join(rule['choices'])}; got {value!r}")
    if rule["at_least"] is not None and value < rule["at_least"]:
        raise ValueError(f"{name} must be at least {rule['at_least']}; got {value}")
    if rule["above"] is not None and value <= rule["above"]:
        raise ValueError(f"{name} must be above {rule['above']}; got {value}")
    if rule["at_most"] is not None and value > rule["at_most"]:
        raise ValueError(f"{name} must be at most {rule['at_most']}; got {value}")
    if optional and value == "":
        raise ValueError(f"{name} must not be empty; leave the flag out instead")
