"""The check of a file of exact values: it looks at every number, and says what is wrong with a file."""

from __future__ import annotations

import copy
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from eval.verify_golden import GoldenMismatchError, check_golden, describe
from specjax.testing.instances import Instance, all_prefixes, from_tables, random_instance
from specjax.testing.rules_numpy import closed_forms, single_draft
from specjax.testing.rules_numpy.outcomes import Outcomes, first_iteration_law
from specjax.verification.bounds import cic_bound, optimum

Place = tuple[str | int, ...]


def _law(instance: Instance, rule: str, num_drafts: int) -> Outcomes:
    if rule == "multi_draft_block":
        return closed_forms.multi_draft_block(instance, 1, num_drafts)
    return first_iteration_law(getattr(single_draft, rule), instance, 1, 1)


def _accepted(law: Outcomes) -> float:
    return float(sum(mass * len(prefix) for (prefix, _), mass in law.items()))


def _calls(accepted: float) -> float:
    """Expected target calls for 6 tokens where every call accepts one token with the same probability."""
    calls = [0.0]
    for missing in range(1, 7):
        calls.append(1 + (1 - accepted) * calls[missing - 1] + accepted * calls[max(missing - 2, 0)])
    return calls[6]


def _expectation(instance: Instance, num_drafts: int, rules: tuple[str, ...], calls: dict[str, float]) -> dict:
    return {
        "instance": instance.name,
        "draft_length": 1,
        "num_drafts": num_drafts,
        "expected_accepted": {rule: _accepted(_law(instance, rule, num_drafts)) for rule in rules},
        "cic_bound": float(cic_bound(instance, 1, num_drafts)),
        "lp_optimum_no_carry": optimum(instance, 1, num_drafts, with_carry=False),
        "lp_optimum_with_carry": optimum(instance, 1, num_drafts, with_carry=True),
        "expected_target_calls_for_6_tokens": calls,
    }


def _tables(instance: Instance, depth: int) -> dict:
    def table(law: Any, length: int) -> dict[str, list[float]]:
        return {",".join(map(str, prefix)): law(prefix).tolist() for prefix in all_prefixes(2, length)}

    return {
        "vocab_size": 2,
        "target": table(instance.target, depth),
        "draft": table(instance.draft, depth - 1),
    }


@pytest.fixture(scope="module")
def content() -> dict:
    """Values of the slow NumPy rules: one instance with constant laws, and one whose laws end after two tokens."""
    flat = from_tables("flat", 2, {(): np.array([1 / 3, 2 / 3])}, {(): np.array([2 / 3, 1 / 3])})
    deep = random_instance(2, 3)
    deep = Instance("deep", 2, deep.target, deep.draft)
    single, several = ("token", "block"), ("multi_draft_block",)
    calls = {rule: _calls(_accepted(_law(flat, rule, 1))) for rule in single}
    law = {}
    for (prefix, token), mass in _law(deep, "multi_draft_block", 2).items():
        law.setdefault(",".join(map(str, prefix)), [0.0, 0.0])[token] += float(mass)
    return {
        "instances": {"flat": _tables(flat, 1), "deep": _tables(deep, 2)},
        "expectations": [
            _expectation(flat, 1, single, calls),
            # These calls need laws after longer prefixes; the two rules have one law, so the values must be equal.
            _expectation(deep, 1, single, {"token": 3.5, "block": 3.5}),
            _expectation(deep, 2, several, {}),
        ],
        "first_iteration_laws": {"deep|L1|K2|multi_draft_block": law},
    }


@pytest.fixture
def write(tmp_path: pathlib.Path) -> Callable[[Any], pathlib.Path]:
    def to_file(value: Any) -> pathlib.Path:
        path = tmp_path / "values.json"
        path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return to_file


def numbers(value: Any, place: Place = ()) -> Iterator[Place]:
    """Where the numbers of a JSON value stand."""
    if isinstance(value, dict | list):
        for key, entry in value.items() if isinstance(value, dict) else enumerate(value):
            yield from numbers(entry, (*place, key))
    elif isinstance(value, int | float):
        yield place


def changed(content: Any, place: Place, change: Callable[[Any], Any]) -> Any:
    content = copy.deepcopy(content)
    owner = content
    for key in place[:-1]:
        owner = owner[key]
    owner[place[-1]] = change(owner[place[-1]])
    return content


def test_right_values_pass_and_every_number_is_accounted_for(content: dict, write: Any) -> None:
    report = check_golden(write(content))
    assert report.num_numbers == len(list(numbers(content)))
    assert report.skipped == 0
    assert report.largest_error < 1e-12
    assert len(report.undetermined) == 2
    text = "\n".join(describe(report))
    assert f"{report.num_numbers} numbers" in text
    assert "deep, L=1, K=1: token, block" in text


def test_any_number_that_is_changed_is_noticed_and_named(content: dict, write: Any) -> None:
    places = list(numbers(content))
    assert len(places) >= 60
    for place in places:
        path = write(changed(content, place, lambda value: value + 1e-6))
        with pytest.raises(ValueError, match=r"the file says|must hold probabilities|must be an integer") as caught:
            check_golden(path)
        # The rule, the field or the entry that was changed.
        names = [str(key) for key in place if not isinstance(key, int) and key != "expectations"]
        named = names[-1].removesuffix("_for_6_tokens").replace("_", " ")
        assert named in str(caught.value).replace("_", " "), place


def test_masses_that_the_file_leaves_out_must_be_zero(content: dict, write: Any) -> None:
    def without(law: dict) -> dict:
        return {prefix: masses for prefix, masses in law.items() if prefix != "0"}

    place = ("first_iteration_laws", "deep|L1|K2|multi_draft_block")
    with pytest.raises(GoldenMismatchError, match=r"\['0'\]\[\d\]: the file says 0.0"):
        check_golden(write(changed(content, place, without)))


def test_calls_beyond_what_the_laws_allow_are_refused(content: dict, write: Any) -> None:
    place = ("expectations", 1, "expected_target_calls_for_6_tokens", "token")
    with pytest.raises(GoldenMismatchError, match=r"the file says 7.5, its laws allow \["):
        check_golden(write(changed(content, place, lambda _: 7.5)))


@pytest.mark.parametrize(
    ("place", "change", "message"),
    [
        (("instances",), lambda _: [], "`instances` must be an object"),
        (("expectations",), lambda _: {}, "`expectations` must be a list"),
        (("expectations", 0), lambda _: 3, r"expectations\[0\] must be an object; got 3"),
        (("expectations", 0, "instance"), lambda _: "other", r"expectations\[0\]: `instances` has no 'other'"),
        (("expectations", 0, "num_drafts"), lambda _: 0, "num_drafts must be an integer of at least 1; got 0"),
        (("expectations", 0, "draft_length"), lambda _: True, "draft_length must be an integer of at least 1"),
        (("expectations", 0, "cic_bound"), lambda _: "1", "cic_bound must be a number; got '1'"),
        (("expectations", 0, "cic_bound"), lambda _: float("nan"), "cic_bound must be a number; got nan"),
        (("expectations", 0, "expected_accepted"), lambda _: {"fast": 1.0}, "must be one of .*; got 'fast'"),
        (("expectations", 0), lambda entry: entry | {"alpha": 1}, "a field 'alpha' that cannot be checked"),
        (("expectations", 0), lambda entry: {"instance": entry["instance"]}, "lacks the field 'draft_length'"),
        (("instances", "flat", "target"), lambda _: {}, "must hold at least one law"),
        (("instances", "flat", "target", ""), lambda _: [1.0], r"target\[''\] must hold 2 numbers"),
        (("instances", "flat", "target", ""), lambda _: [2.0, -1.0], "probabilities that add up to 1"),
        (("instances", "flat", "target"), lambda _: {"x": [1.0, 0.0]}, "keys of tokens below 2"),
        (("instances", "flat", "target"), lambda _: {"5": [1.0, 0.0]}, "keys of tokens below 2"),
        (("first_iteration_laws",), lambda _: {"deep": {}}, "keys like 'name|L2|K1|rule'; got 'deep'"),
        (("first_iteration_laws",), lambda _: {"deep|L1|K0|token": {}}, "K must be at least 1"),
        (("first_iteration_laws",), lambda _: {"deep|L1|K1|fast": {}}, "got 'fast'"),
    ],
)
def test_what_is_not_understood_is_refused(
    content: dict, write: Any, place: Place, change: Callable[[Any], Any], message: str
) -> None:
    path = write(changed(content, place, change))
    with pytest.raises(ValueError, match=message) as caught:
        check_golden(path)
    assert str(path) in str(caught.value)


def test_files_that_are_no_json_are_refused(write: Any, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="line 2: not JSON"):
        check_golden(write('{"instances": {},\n ]'))
    with pytest.raises(ValueError, match="lacks the field 'instances'"):
        check_golden(write("{}"))
    path = tmp_path / "bytes.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bytes.json: not JSON \(byte 0"):
        check_golden(path)
    with pytest.raises(FileNotFoundError):
        check_golden(tmp_path / "none.json")
