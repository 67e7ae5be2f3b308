"""Files of another form than the report reads: the section that meets one does without it, and the page says so."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from eval.command_line import one_line
from eval.report_inputs import ReportInputs

Builder = Callable[[ReportInputs], str]

# What reading a value of another form than expected can raise.
_FORM_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
# A report without a file is one with these values.
_WITHOUT: Mapping[str, Mapping[str, Any]] = {
    "eval/benchmark.json": {"benchmark": {}},
    "eval/head_cost.json": {"head_cost": {}},
    "eval/samples.json": {"samples": []},
    "metrics.jsonl": {"train": [], "held_out": []},
    "run.json": {"run": {}},
    "flags.txt": {"flags": {}},
}


class FaultLog:
    """Builds sections and collects what is wrong with the files they read."""

    def __init__(self) -> None:
        self._sections: dict[tuple[str, str], list[str]] = {}

    def build(self, section: str, builder: Builder, inputs: ReportInputs) -> str:
        """What a builder makes of the inputs, or of what is left without the files whose form it does not know.

        Args:
            section: name of what is built, for the reader.
            builder: makes HTML or text; its errors are those of reading values of an unknown form.
            inputs: what was read.

        Returns:
            What the builder made; nothing if it fails without any single file and without all of them.
        """
        removed: list[str] = []
        while True:
            try:
                return builder(_without(inputs, removed))
            except _FORM_ERRORS as error:
                name = _cause(builder, inputs, removed, error)
                self._sections.setdefault((name or "a file of the run", _describe(error)), []).append(section)
                if name is None:
                    return ""
                removed.append(name)

    @property
    def lines(self) -> list[str]:
        """One line a fault: file, what is wrong, and what does without the file."""
        return [
            f"{name} has an unknown form ({problem}): left out of {', '.join(dict.fromkeys(sections))}"
            for (name, problem), sections in self._sections.items()
        ]


def _cause(builder: Builder, inputs: ReportInputs, removed: list[str], error: Exception) -> str | None:
    """The file without which the builder does not fail, or fails of something else; None if there is none."""
    changed = None
    for name in _WITHOUT:
        if name in removed:
            continue
        try:
            builder(_without(inputs, [*removed, name]))
        except _FORM_ERRORS as other:
            # Several files may be faulty at once: then the error changes with the one that caused it.
            if changed is None and (type(other), str(other)) != (type(error), str(error)):
                changed = name
        else:
            return name
    return changed


def _without(inputs: ReportInputs, names: list[str]) -> ReportInputs:
    # A copy of the object and not a new one: the other fields may be of any form here, and none is checked again.
    part = copy.copy(inputs)
    for name in names:
        for field, value in _WITHOUT[name].items():
            setattr(part, field, value)
    return part


def _describe(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"a record lacks `{error.args[0]}`"
    return f"a value is of the wrong kind: {one_line(error)}"
