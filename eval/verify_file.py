"""Reads a file of exact values for `eval.verify --golden`, and refuses what it does not understand.

The file is JSON with three fields:

    instances              name -> `vocab_size`, `target` and `draft`: prefix ("" or "0,1") -> law of the next token
    expectations           list; for an instance, L and K the expected accepted tokens of rules, bounds, target calls
    first_iteration_laws   "name|L2|K1|rule" -> prefix -> masses of accepting just that prefix and emitting each token
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.testing.instances import Instance, Prefix, from_tables
from specjax.verification import get_verifier

# Laws of a file are good to rounding; a digit that was changed shows in the sum.
LARGEST_LAW_DEFECT = 1e-9

CALL_TOKENS = 6
_CALLS = f"expected_target_calls_for_{CALL_TOKENS}_tokens"
_SIZES = ("draft_length", "num_drafts")
_BOUNDS = ("cic_bound", "lp_optimum_no_carry", "lp_optimum_with_carry")
_RULES = ("expected_accepted", _CALLS)


@dataclasses.dataclass(frozen=True)
class Expectation:
    """Exact values of one instance, L and K.

    Attributes:
        instance: its name.
        draft_length: L.
        num_drafts: K.
        bounds: value by field name.
        expected_accepted: value by rule.
        target_calls: expected target calls for 6 tokens, by rule.
    """

    instance: str
    draft_length: int
    num_drafts: int
    bounds: dict[str, float]
    expected_accepted: dict[str, float]
    target_calls: dict[str, float]

    @property
    def label(self) -> str:
        """For messages."""
        return f"{self.instance}, L={self.draft_length}, K={self.num_drafts}"


@dataclasses.dataclass(frozen=True)
class IterationLaw:
    """Joint law of accepted prefix and next token in a fresh request's first iteration."""

    key: str
    instance: str
    draft_length: int
    num_drafts: int
    verifier: str
    masses: dict[Prefix, np.ndarray]


@dataclasses.dataclass(frozen=True)
class GoldenFile:
    """A file of exact values.

    Attributes:
        instances: by name.
        expectations: in the file's order.
        laws: in the file's order.
        num_numbers: all numbers that the file holds.
        num_parameters: those that are sizes or probabilities of instances: given, not to be computed.
    """

    instances: dict[str, Instance]
    expectations: list[Expectation]
    laws: list[IterationLaw]
    num_numbers: int
    num_parameters: int


class _Reader:
    """Reads parts of one file; every complaint starts with its path and says where."""

    def __init__(self, path: str | pathlib.Path) -> None:
        self.path = path
        self.num_parameters = 0

    def error(self, message: str) -> ValueError:
        return ValueError(f"{self.path}: {message}")

    def fields(self, where: str, value: Any, names: tuple[str, ...]) -> dict[str, Any]:
        """An object with exactly these fields."""
        entry = self.table(where, value)
        for name in names:
            if name not in entry:
                raise self.error(f"{where} lacks the field {name!r}")
        for name in entry:
            if name not in names:
                raise self.error(f"{where} has a field {name!r} that cannot be checked")
        return entry

    def table(self, where: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.error(f"{where} must be an object; got {_short(value)}")
        return value

    def number(self, where: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.error(f"{where} must be a number; got {_short(value)}")
        return float(value)

    def size(self, where: str, value: Any, minimum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"{where} must be an integer of at least {minimum}; got {_short(value)}")
        self.num_parameters += 1
        return value

    def masses(self, where: str, value: Any, vocab_size: int) -> dict[Prefix, np.ndarray]:
        """Rows of V numbers by prefix."""
        rows: dict[Prefix, np.ndarray] = {}
        for key, row in self.table(where, value).items():
            prefix = self.prefix(where, key, vocab_size)
            place = f"{where}[{key!r}]"
            if not isinstance(row, list) or len(row) != vocab_size:
                raise self.error(f"{place} must hold {vocab_size} numbers; got {_short(row)}")
            rows[prefix] = np.asarray([self.number(place, entry) for entry in row])
        return rows

    def laws(self, where: str, value: Any, vocab_size: int) -> dict[Prefix, np.ndarray]:
        """Rows that are probability distributions."""
        rows = self.masses(where, value, vocab_size)
        for prefix, row in rows.items():
            if row.min() < 0 or abs(row.sum() - 1) > LARGEST_LAW_DEFECT:
                place = f"{where}[{','.join(map(str, prefix))!r}]"
                raise self.error(f"{place} must hold probabilities that add up to 1; got {row.tolist()}")
            self.num_parameters += len(row)
        if not rows:
            raise self.error(f"{where} must hold at least one law")
        return rows

    def prefix(self, where: str, key: str, vocab_size: int) -> Prefix:
        try:
            prefix = tuple(map(int, key.split(","))) if key else ()
        except ValueError:
            prefix = (-1,)
        if not all(0 <= token < vocab_size for token in prefix):
            raise self.error(f"{where} needs keys of tokens below {vocab_size} with commas between; got {key!r}")
        return prefix

    def verifier(self, where: str, name: str) -> str:
        try:
            return get_verifier(name).name
        except ValueError as error:
            raise self.error(f"{where}: {error}") from None

    def instance(self, where: str, instances: Mapping[str, Instance], name: Any) -> Instance:
        if not isinstance(name, str) or name not in instances:
            raise self.error(f"{where}: `instances` has no {_short(name)}")
        return instances[name]


def read_golden(path: str | pathlib.Path) -> GoldenFile:
    """Reads a file of exact values.

    Args:
        path: the JSON file.

    Returns:
        Its content.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not JSON, lacks a field, has one more than is understood, or names an unknown rule or
            instance; the message names the file and the place.
    """
    reader = _Reader(path)
    try:
        content = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise reader.error(f"line {error.lineno}: not JSON ({error.msg})") from error
    except UnicodeDecodeError as error:
        raise reader.error(f"not JSON (byte {error.start} is not UTF-8)") from error
    content = reader.fields("the file", content, ("instances", "expectations", "first_iteration_laws"))
    instances = {
        name: _read_instance(reader, name, entry)
        for name, entry in reader.table("`instances`", content["instances"]).items()
    }
    if not isinstance(content["expectations"], list):
        raise reader.error(f"`expectations` must be a list; got {_short(content['expectations'])}")
    expectations = [
        _read_expectation(reader, f"expectations[{index}]", entry, instances)
        for index, entry in enumerate(content["expectations"])
    ]
    laws = [
        _read_law(reader, key, entry, instances)
        for key, entry in reader.table("`first_iteration_laws`", content["first_iteration_laws"]).items()
    ]
    return GoldenFile(instances, expectations, laws, _count_numbers(content), reader.num_parameters)


def _read_instance(reader: _Reader, name: str, value: Any) -> Instance:
    where = f"instances[{name!r}]"
    entry = reader.fields(where, value, ("vocab_size", "target", "draft"))
    vocab_size = reader.size(f"{where}: vocab_size", entry["vocab_size"], 2)
    target, draft = (reader.laws(f"{where}: {field}", entry[field], vocab_size) for field in ("target", "draft"))
    return from_tables(name, vocab_size, target, draft)


def _read_expectation(reader: _Reader, where: str, value: Any, instances: Mapping[str, Instance]) -> Expectation:
    entry = reader.fields(where, value, ("instance", *_SIZES, *_BOUNDS, *_RULES))
    reader.instance(where, instances, entry["instance"])
    length, drafts = (reader.size(f"{where}: {field}", entry[field], 1) for field in _SIZES)
    accepted, calls = (
        {
            reader.verifier(f"{where}: {field}", name): reader.number(f"{where}: {field} of {name}", number)
            for name, number in reader.table(f"{where}: {field}", entry[field]).items()
        }
        for field in _RULES
    )
    bounds = {field: reader.number(f"{where}: {field}", entry[field]) for field in _BOUNDS}
    return Expectation(entry["instance"], length, drafts, bounds, accepted, calls)


def _read_law(reader: _Reader, key: str, value: Any, instances: Mapping[str, Instance]) -> IterationLaw:
    where = f"first_iteration_laws[{key!r}]"
    try:
        name, length, drafts, verifier = key.split("|")
        sizes = int(length.removeprefix("L")), int(drafts.removeprefix("K"))
    except ValueError:
        raise reader.error(f"`first_iteration_laws` needs keys like 'name|L2|K1|rule'; got {key!r}") from None
    if min(sizes) < 1:
        raise reader.error(f"{where}: L and K must be at least 1")
    vocab_size = reader.instance(where, instances, name).vocab_size
    masses = reader.masses(where, value, vocab_size)
    return IterationLaw(key, name, *sizes, reader.verifier(where, verifier), masses)


def _count_numbers(value: Any) -> int:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return sum(map(_count_numbers, value))
    return int(isinstance(value, int | float) and not isinstance(value, bool))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
