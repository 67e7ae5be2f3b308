"""The command line of training: flags made from the fields of `TrainConfig`, and flags made from a config."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any

from absl import flags

from train.config import BUDGETS, TrainConfig
from train.flagfile import COMMAND_LINE, PACKAGED_FOLDER, Argument, expand_flagfiles, origin_of
from train.idle_settings import idle_settings

EMBEDDED_DEFAULT = PACKAGED_FOLDER / "smollm2.flags"

_DEFINE = {"str": flags.DEFINE_string, "int": flags.DEFINE_integer, "float": flags.DEFINE_float}


def define_flags(flag_values: flags.FlagValues) -> None:
    """Defines one flag for each field of `TrainConfig`.

    A flag's default is None, so that a given value can be told from the preset of `--budget`.
    """
    for field in dataclasses.fields(TrainConfig):
        kind = str(field.type).split(" ")[0]
        help_text = f"{field.metadata['help']} {_describe(field)}"
        if kind == "bool":
            flags.DEFINE_boolean(field.name, None, help_text, flag_values=flag_values, module_name="train.slimspec")
        else:
            _DEFINE[kind](field.name, None, help_text, flag_values=flag_values, module_name="train.slimspec")


def parse_command_line(arguments: Sequence[str]) -> TrainConfig:
    """Reads a command line; one that names no flagfile starts from the embedded SmolLM2 recipe.

    A flag that can have no effect is refused, with one exception: what a flagfile says may be made idle by
    the command line (`--flagfile=smollm2.flags --head=full`), and is then left out.

    Args:
        arguments: the arguments after the program's name.

    Returns:
        The checked settings.

    Raises:
        ValueError: one line that names the flag, the rule and the value, and the file and line if it was
            written in a flagfile.
        SystemExit: after `--help`.
    """
    expanded = expand_flagfiles(arguments)
    if not any(re.match(r"--?flagfile(=|$)", argument) for argument in arguments):
        expanded = [*expand_flagfiles([f"--flagfile={EMBEDDED_DEFAULT}"]), *expanded]
    given = _given(expanded)
    config = _create(given, expanded)
    idle = {name: reason for name, reason in idle_settings(config).items() if name in given}
    if not idle:
        return config
    from_files = [argument for argument in expanded if argument.origin != COMMAND_LINE]
    idle_in_files = _idle_in(from_files)
    for name, reason in idle.items():
        origin = origin_of(expanded, name)
        if origin == COMMAND_LINE or name in idle_in_files:
            raise ValueError(f"`--{name}` has no effect {reason}; got {given[name]!r}{_place(origin)}")
    return _create({name: value for name, value in given.items() if name not in idle}, expanded)


def _given(expanded: Sequence[Argument]) -> dict[str, Any]:
    """The flags that are written somewhere, with their values; stops after `--help`."""
    flag_values = flags.FlagValues()
    define_flags(flag_values)
    if any(re.fullmatch(r"--?help(full|short)?|-h|-\?", argument.text) for argument in expanded):
        print(_help(flag_values))
        raise SystemExit(0)
    stray = [argument for argument in expanded if not argument.text.startswith("-")]
    try:
        rest = flag_values(["train.slimspec", *(argument.text for argument in expanded)])[1:]
    except flags.UnrecognizedFlagError as error:
        close = difflib.get_close_matches(error.flagname, list(flag_values), n=1)
        hint = f"; did you mean `--{close[0]}`?" if close else ""
        place = _place(origin_of(expanded, error.flagname))
        raise ValueError(f"`--{error.flagname}` is not a flag of this command{hint}{place}") from None
    except flags.Error as error:
        raise ValueError(_explain(str(error), expanded)) from None
    if rest:
        place = next((argument.origin for argument in stray if argument.text == rest[0]), "")
        raise ValueError(f"arguments must be flags (--name=value); got {rest[0]!r}{_place(place)}")
    return {name: flag_values[name].value for name in flag_values if flag_values[name].present}


def _create(given: dict[str, Any], expanded: Sequence[Argument]) -> TrainConfig:
    try:
        return TrainConfig.create(**given)
    except ValueError as error:
        named = re.match(r"`--(\w+)", str(error))
        raise ValueError(f"{error}{_place(origin_of(expanded, named[1]) if named else '')}") from None


def _idle_in(arguments: Sequence[Argument]) -> dict[str, str]:
    """Settings that are idle among these arguments alone; none if they make no valid run without the others."""
    try:
        return idle_settings(TrainConfig.create(**_given(arguments)))
    except ValueError:
        return {}


def flags_text(config: TrainConfig) -> str:
    """The resolved settings as a flagfile that gives the same config again.

    Flags that have no effect beside the others are left out, since reading them back would be refused.
    """
    idle = idle_settings(config)
    lines = ["# The resolved settings of this run; use it with --flagfile."]
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in idle or value is None or (value == "" and field.default == ""):
            continue
        if isinstance(value, bool):
            lines.append(f"--{'' if value else 'no'}{field.name}")
        else:
            lines.append(f"--{field.name}={value}")
    return "\n".join(lines) + "\n"


def _describe(field: dataclasses.Field[Any]) -> str:
    choices = field.metadata["choices"]
    words = f"One of {', '.join(choices)}. " if choices else ""
    if field.name in BUDGETS["short"]:
        presets = ", ".join(f"{preset[field.name]} ({name})" for name, preset in BUDGETS.items())
        return f"{words}Default by budget: {presets}."
    return f"{words}Default: {field.default!r}."


def _help(flag_values: flags.FlagValues) -> str:
    head = "Trains a draft model with a slim LM head: python -m train.slimspec --flagfile=smollm2.flags\n"
    return head + flag_values.get_help()


def _place(origin: str) -> str:
    return f" ({origin})" if origin and origin != COMMAND_LINE else ""


def _explain(message: str, expanded: Sequence[Argument]) -> str:
    bad_value = re.match(r"flag --(\w+)=(.*?): ", message, re.DOTALL)
    if bad_value:
        name, value = bad_value.groups()
        field = next((f for f in dataclasses.fields(TrainConfig) if f.name == name), None)
        kind = str(field.type).split(" ")[0] if field else "value"
        words = {"int": "a whole number", "float": "a number", "bool": "true or false"}.get(kind, f"a {kind}")
        return f"`--{name}` must be {words}; got {value!r}{_place(origin_of(expanded, name))}"
    return " ".join(message.split())
