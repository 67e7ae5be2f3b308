"""Checks every number of a file of exact values against the rules, for `eval.verify --golden`."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Iterator
from typing import Any

from specjax.testing.instances import Instance, Prefix, UnknownPrefixError, padded_vocabulary, read_golden
from specjax.types import DraftTree
from specjax.verification import get_verifier
from specjax.verification.bounds import cic_bound, optimum
from specjax.verification.enumerate import Enumerator

TOLERANCE = 1e-9
_CALL_TOKENS = 6

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
        checked: how many numbers were compared.
        largest_error: largest difference.
        compared_only: numbers that the file's laws do not determine (they need prefixes that it leaves out); they were
            held against the limits that the laws set, and against each other where two rules have one law.
    """

    checked: int = 0
    largest_error: float = 0.0
    compared_only: list[str] = dataclasses.field(default_factory=list)

    def compare(self, name: str, value: float, expected: float) -> None:
        """Counts a comparison.

        Raises:
            GoldenMismatchError: if the values differ by more than 1e-9.
        """
        error = abs(value - expected)
        if not error <= TOLERANCE:
            raise GoldenMismatchError(f"{name}: the file says {expected!r}, the rule gives {value!r}")
        self.checked += 1
        self.largest_error = max(self.largest_error, error)


def check_golden(path: str | pathlib.Path) -> GoldenReport:
    """Checks every number of a file.

    Args:
        path: JSON file, see `specjax.testing.instances.read_golden`.

    Returns:
        The report.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file cannot be read, or names an unknown rule or instance.
        GoldenMismatchError: at the first number that differs by more than 1e-9.
    """
    instances, expectations, laws = read_golden(path)
    # One vocabulary size for all, so that each rule is compiled once a shape.
    largest = max(instance.vocab_size for instance in instances.values())
    instances = {name: padded_vocabulary(instance, largest) for name, instance in instances.items()}
    report = GoldenReport()
    for entry in expectations:
        _check_expectation(path, instances, entry, report)
    for key, law in laws.items():
        name, length, drafts, verifier = _split_key(path, key)
        found = _enumerator(_instance(path, instances, name), verifier, length, drafts).first_iteration_law()
        named = {(prefix, token): float(mass) for prefix, masses in law.items() for token, mass in enumerate(masses)}
        for prefix, token in sorted({*named, *found}):
            label = f"first_iteration_laws[{key!r}][{','.join(map(str, prefix))!r}][{token}]"
            report.compare(label, found.get((prefix, token), 0.0), named.get((prefix, token), 0.0))
    return report


def _check_expectation(
    path: str | pathlib.Path, instances: dict[str, Instance], entry: dict, report: GoldenReport
) -> None:
    try:
        name, length, drafts = entry["instance"], int(entry["draft_length"]), int(entry["num_drafts"])
        instance = _instance(path, instances, name)
        label = f"{name}, L={length}, K={drafts}"
        accepted, calls = entry["expected_accepted"], entry["expected_target_calls_for_6_tokens"]
        report.compare(f"{label}: cic_bound", cic_bound(instance, length, drafts), entry["cic_bound"])
        for field, carry in (("lp_optimum_no_carry", False), ("lp_optimum_with_carry", True)):
            report.compare(f"{label}: {field}", optimum(instance, length, drafts, with_carry=carry), entry[field])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: an expectation lacks {error} or holds a wrong type") from error
    for verifier, value in accepted.items():
        found = _enumerator(instance, verifier, length, drafts).expected_accepted()
        report.compare(f"{label}: expected_accepted of {verifier}", found, value)
    undetermined: dict[str, float] = {}
    for verifier, value in calls.items():
        try:
            found = _enumerator(instance, verifier, length, drafts).expected_target_calls(_CALL_TOKENS)
        except UnknownPrefixError:
            undetermined[verifier] = float(value)
            continue
        report.compare(f"{label}: expected target calls of {verifier}", found, value)
    for verifier, value in undetermined.items():
        fewest, most = call_limits(_enumerator(instance, verifier, length, drafts), _CALL_TOKENS)
        text = f"{label}: expected target calls of {verifier}"
        if not fewest - TOLERANCE <= value <= most + TOLERANCE:
            raise GoldenMismatchError(f"{text}: the file says {value!r}, its laws allow [{fewest:.6f}, {most:.6f}]")
        report.compared_only.append(text)
    _compare_each_other(label, length, drafts, undetermined, report)


def _compare_each_other(label: str, length: int, drafts: int, values: dict[str, float], report: GoldenReport) -> None:
    """Values that the file does not determine: rules with one law must agree."""
    for same_length, same_drafts, names in _SAME_LAW:
        if same_length not in (None, length) or same_drafts not in (None, drafts):
            continue
        known = [name for name in names if name in values]
        for name in known[1:]:
            text = f"{label}: expected target calls of {name} (the same law as {known[0]})"
            report.compare(text, values[known[0]], values[name])


def call_limits(enumerator: Enumerator, num_tokens: int) -> tuple[float, float]:
    """What the known laws leave possible for the expected target calls: as few and as many as there can be."""
    longest = enumerator.tree.max_depth + 1

    def follow(context: Prefix, carry: Any) -> tuple[float, float]:
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


def _instance(path: str | pathlib.Path, instances: dict[str, Instance], name: str) -> Instance:
    if name not in instances:
        raise ValueError(f"{path}: `instances` has no {name!r}")
    return instances[name]


def _split_key(path: str | pathlib.Path, key: str) -> tuple[str, int, int, str]:
    try:
        name, length, drafts, verifier = key.split("|")
        return name, int(length.removeprefix("L")), int(drafts.removeprefix("K")), verifier
    except ValueError:
        raise ValueError(f"{path}: `first_iteration_laws` needs keys like 'name|L2|K1|rule'; got {key!r}") from None


@functools.cache
def _known_enumerator(verifier: str, tree: DraftTree, instance: Instance) -> Enumerator:
    return Enumerator(get_verifier(verifier), tree, instance)


def _enumerator(instance: Instance, verifier: str, length: int, drafts: int) -> Enumerator:
    """A rule for one draft uses the first of several."""
    num_drafts = drafts if get_verifier(verifier).multi_draft else 1
    return _known_enumerator(verifier, DraftTree.chains(num_drafts, length), instance)


def describe(report: GoldenReport) -> Iterator[str]:
    """The report in lines."""
    yield f"{report.checked} numbers agree to {TOLERANCE:g}; largest difference {report.largest_error:.2e}"
    if report.compared_only:
        yield (
            f"{len(report.compared_only)} expected target calls are not determined by the file: its laws end before "
            "the prefixes they need."
        )
        yield "They lie within the limits that its laws set, and agree where two rules have one law:"
        rows: dict[str, list[str]] = {}
        for name in report.compared_only:
            label, rule = name.split(": expected target calls of ")
            rows.setdefault(label, []).append(rule)
        for label, rules in rows.items():
            yield f"  {label}: {', '.join(rules)}"
