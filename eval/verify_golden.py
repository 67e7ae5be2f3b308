"""Checks every number of a file of exact values against the rules, for `eval.verify --golden`."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

from eval.verify_file import CALL_TOKENS, Expectation, IterationLaw, read_golden
from specjax.testing.instances import Instance, UnknownPrefixError, padded_vocabulary
from specjax.types import DraftTree
from specjax.verification import get_verifier
from specjax.verification.bounds import cic_bound, optimum
from specjax.verification.enumerate import Enumerator

TOLERANCE = 1e-9

# Rules with one law, by (draft length, number of drafts): None stands for any.
_SAME_LAW = (
    (None, 1, ("token", "recursive_rejection", "spectr")),
    (None, 1, ("block", "traversal", "multi_draft_block")),
    (None, 1, ("greedy_block", "spectr_gbv")),
    (1, 1, ("token", "block", "greedy_block")),
    (1, None, ("recursive_rejection", "traversal")),
    (1, None, ("multi_draft_block", "spectr_gbv")),
)


class GoldenMismatchError(ValueError):
    """A number of the file is not what the rules give."""


@dataclasses.dataclass
class GoldenReport:
    """What was checked.

    Attributes:
        num_numbers: how many numbers the file holds.
        parameters: how many of them are sizes and laws of instances; checked to be such.
        checked: how many were compared with what the rules and bounds give.
        largest_error: largest difference.
        undetermined: names of numbers that the file's laws do not determine (they need prefixes that it leaves out);
            they were held against the limits that the laws set, and against each other where two rules have one law.
    """

    num_numbers: int
    parameters: int
    checked: int = 0
    largest_error: float = 0.0
    undetermined: list[str] = dataclasses.field(default_factory=list)

    @property
    def skipped(self) -> int:
        """Numbers of the file that nothing looked at; 0 unless there is a mistake in this module."""
        return self.num_numbers - self.parameters - self.checked - len(self.undetermined)

    def compare(self, name: str, found: float, expected: float) -> None:
        """Compares a number of the file.

        Raises:
            GoldenMismatchError: if the values differ by more than 1e-9.
        """
        error = _difference(name, found, expected)
        self.checked += 1
        self.largest_error = max(self.largest_error, error)


def _difference(name: str, found: float, expected: float) -> float:
    error = abs(found - expected)
    if not error <= TOLERANCE:
        raise GoldenMismatchError(f"{name}: the file says {expected!r}, the rule gives {float(found)!r}")
    return error


def check_golden(path: str | pathlib.Path) -> GoldenReport:
    """Checks every number of a file.

    Args:
        path: JSON file, see `eval.verify_file`.

    Returns:
        The report.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is not understood, or names an unknown rule or instance.
        GoldenMismatchError: at the first number that differs by more than 1e-9.
    """
    content = read_golden(path)
    # One vocabulary size for all, so that each rule is compiled once a shape.
    largest = max((instance.vocab_size for instance in content.instances.values()), default=0)
    instances = {name: padded_vocabulary(instance, largest) for name, instance in content.instances.items()}
    report = GoldenReport(content.num_numbers, content.num_parameters)
    for entry in content.expectations:
        _check_expectation(instances[entry.instance], entry, report)
    for law in content.laws:
        _check_law(instances[law.instance], law, report)
    if report.skipped:
        raise ValueError(f"{path}: {report.skipped} numbers were not checked")
    return report


def _check_law(instance: Instance, law: IterationLaw, report: GoldenReport) -> None:
    found = _enumerator(instance, law.verifier, law.draft_length, law.num_drafts).first_iteration_law()
    left = dict(found)
    for prefix, masses in law.masses.items():
        where = f"first_iteration_laws[{law.key!r}][{','.join(map(str, prefix))!r}]"
        for token, mass in enumerate(masses.tolist()):
            report.compare(f"{where}[{token}]", left.pop((prefix, token), 0.0), mass)
    for (prefix, token), mass in left.items():
        # What the file leaves out has to be zero.
        _difference(f"first_iteration_laws[{law.key!r}][{','.join(map(str, prefix))!r}][{token}]", mass, 0.0)


def _check_expectation(instance: Instance, entry: Expectation, report: GoldenReport) -> None:
    length, drafts = entry.draft_length, entry.num_drafts
    found = {
        "cic_bound": cic_bound(instance, length, drafts),
        "lp_optimum_no_carry": optimum(instance, length, drafts, with_carry=False),
        "lp_optimum_with_carry": optimum(instance, length, drafts, with_carry=True),
    }
    for field, value in entry.bounds.items():
        report.compare(f"{entry.label}: {field}", found[field], value)
    for verifier, value in entry.expected_accepted.items():
        accepted = _enumerator(instance, verifier, length, drafts).expected_accepted()
        report.compare(f"{entry.label}: expected_accepted of {verifier}", accepted, value)
    undetermined: dict[str, float] = {}
    for verifier, value in entry.target_calls.items():
        try:
            calls = _enumerator(instance, verifier, length, drafts).expected_target_calls(CALL_TOKENS)
        except UnknownPrefixError:
            undetermined[verifier] = value
            continue
        report.compare(f"{entry.label}: expected target calls of {verifier}", calls, value)
    for verifier, value in undetermined.items():
        fewest, most = call_limits(_enumerator(instance, verifier, length, drafts), CALL_TOKENS)
        text = f"{entry.label}: expected target calls of {verifier}"
        if not fewest - TOLERANCE <= value <= most + TOLERANCE:
            raise GoldenMismatchError(f"{text}: the file says {value!r}, its laws allow [{fewest:.6f}, {most:.6f}]")
        report.undetermined.append(text)
    _compare_each_other(entry, undetermined)


def _compare_each_other(entry: Expectation, values: dict[str, float]) -> None:
    """Values that the file does not determine: rules with one law must agree."""
    for length, drafts, names in _SAME_LAW:
        if length not in (None, entry.draft_length) or drafts not in (None, entry.num_drafts):
            continue
        known = [name for name in names if name in values]
        for name in known[1:]:
            text = f"{entry.label}: expected target calls of {name} (the same law as {known[0]})"
            _difference(text, values[known[0]], values[name])


def call_limits(enumerator: Enumerator, num_tokens: int) -> tuple[float, float]:
    """What the known laws leave possible for the expected target calls: as few and as many as there can be."""
    longest = enumerator.tree.max_depth + 1

    def follow(context: tuple[int, ...], carry: Any) -> tuple[float, float]:
        missing = num_tokens - len(context)
        if missing <= 0:
            return 0.0, 0.0
        try:
            emissions = enumerator.iteration(context, carry)
        except UnknownPrefixError:
            # From here on every call may emit a whole block, or a single token.
            return float(-(-missing // longest)), float(missing)
        fewest = most = 1.0
        for emission in emissions:
            low, high = follow((*context, *emission.tokens), emission.carry)
            fewest += emission.probability * low
            most += emission.probability * high
        return fewest, most

    return follow((), None)


@functools.cache
def _known_enumerator(verifier: str, tree: DraftTree, instance: Instance) -> Enumerator:
    return Enumerator(get_verifier(verifier), tree, instance)


def _enumerator(instance: Instance, verifier: str, length: int, drafts: int) -> Enumerator:
    """A rule for one draft uses the first of several."""
    num_drafts = drafts if get_verifier(verifier).multi_draft else 1
    return _known_enumerator(verifier, DraftTree.chains(num_drafts, length), instance)


def describe(report: GoldenReport) -> Iterator[str]:
    """The report in lines."""
    yield (
        f"{report.num_numbers} numbers: {report.parameters} sizes and laws of instances, {report.checked} values that "
        f"agree to {TOLERANCE:g} (largest difference {report.largest_error:.1e})"
    )
    if report.undetermined:
        yield (
            f"and {len(report.undetermined)} expected target calls that the file does not determine: its laws end "
            "before the prefixes they need."
        )
        yield "These lie within the limits that its laws set, and agree where two rules have one law:"
        rows: dict[str, list[str]] = {}
        for name in report.undetermined:
            label, rule = name.split(": expected target calls of ")
            rows.setdefault(label, []).append(rule)
        for label, rules in rows.items():
            yield f"  {label}: {', '.join(rules)}"
