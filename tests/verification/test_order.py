"""The order of the rules on laws that hypothesis makes up, in float64: no rule may overtake a better one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specjax.testing.instances import Instance, Law, Prefix, random_instance
from specjax.testing.rules_numpy import closed_forms
from specjax.types import DraftTree
from specjax.verification import get_verifier
from specjax.verification.bounds import cic_bound, optimal_one_step
from specjax.verification.enumerate import Enumerator

SLACK = 1e-10


def masses(enumerator: Enumerator) -> dict[Prefix, float]:
    """P(prefix accepted) for every prefix but the empty one."""
    found: dict[Prefix, float] = {}
    for emission in enumerator.iteration():
        for length in range(1, len(emission.accepted) + 1):
            prefix = emission.accepted[:length]
            found[prefix] = found.get(prefix, 0.0) + emission.probability
    return found


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Two tokens, laws after prefixes of at most two tokens; zeros and certainties included."""
    probability = st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1e-9]), st.floats(1e-12, 1))
    prefixes: list[Prefix] = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    laws = []
    for _ in range(2):
        first = {prefix: draw(probability) for prefix in prefixes}
        laws.append({prefix: np.array([p, 1 - p]) for prefix, p in first.items()})
    return Instance("generated", 2, laws[0].__getitem__, laws[1].__getitem__)


def enumerator(name: str, instance: Instance, num_drafts: int) -> Enumerator:
    return Enumerator(get_verifier(name), DraftTree.chains(num_drafts, 2), instance)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(instances())
def test_rules_keep_their_order_at_every_prefix(instance: Instance) -> None:
    names = ("token", "block", "greedy_block")
    token, block, greedy = (masses(enumerator(name, instance, 1)) for name in names)
    several = masses(enumerator("multi_draft_block", instance, 2))
    uncapped = masses(enumerator("multi_draft_block_uncapped", instance, 2))
    gbv = masses(enumerator("spectr_gbv", instance, 2))
    for prefix in ((0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)):
        chain = [rule.get(prefix, 0.0) for rule in (token, block, greedy, gbv)]
        assert chain == sorted(chain) or np.diff(chain).min() >= -SLACK
        assert block.get(prefix, 0.0) <= several.get(prefix, 0.0) + SLACK
        assert several.get(prefix, 0.0) <= gbv.get(prefix, 0.0) + SLACK
        assert several.get(prefix, 0.0) <= uncapped.get(prefix, 0.0) + SLACK
        draft, target = (_joint(law, prefix) for law in (instance.draft, instance.target))
        bound = target * (1 - (1 - min(draft / target, 1.0)) ** 2) if target > 0 else 0.0
        assert gbv.get(prefix, 0.0) <= bound + SLACK
    assert sum(gbv.values()) <= cic_bound(instance, 2, 2) + SLACK


def _joint(law: Law, prefix: Prefix) -> float:
    return float(np.prod([law(prefix[:depth])[token] for depth, token in enumerate(prefix)]))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(instances())
def test_more_drafts_never_accept_less_at_any_prefix(instance: Instance) -> None:
    for name in ("multi_draft_block", "spectr_gbv"):
        one, two, three = (masses(enumerator(name, instance, num_drafts)) for num_drafts in (1, 2, 3))
        for prefix in {*one, *two, *three}:
            chain = [found.get(prefix, 0.0) for found in (one, two, three)]
            assert np.diff(chain).min() >= -SLACK, (name, prefix)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(instances())
def test_generated_laws_are_emitted_exactly(instance: Instance) -> None:
    for name in ("block", "multi_draft_block", "spectr", "traversal", "recursive_rejection"):
        num_drafts = 2 if get_verifier(name).multi_draft else 1
        found = enumerator(name, instance, num_drafts)
        first = {}
        for emission in found.iteration():
            first[emission.tokens[0]] = first.get(emission.tokens[0], 0.0) + emission.probability
        for token, mass in enumerate(instance.target(())):
            assert first.get(token, 0.0) == pytest.approx(float(mass), abs=1e-12), name


@pytest.mark.parametrize("name", ["multi_draft_block", "spectr_gbv", "spectr", "recursive_rejection"])
def test_more_drafts_never_accept_less(name: str) -> None:
    instance = random_instance(2, 6)
    accepted = [enumerator(name, instance, num_drafts).expected_accepted() for num_drafts in (1, 2, 3)]
    assert np.diff(accepted).min() > 0
    assert accepted[-1] < 2


def test_many_drafts_accept_everything_that_the_draft_can_draw() -> None:
    instance = random_instance(2, 6)
    for law in (closed_forms.multi_draft_block, closed_forms.spectr_gbv):
        accepted = [
            sum(mass * len(prefix) for (prefix, _), mass in law(instance, 2, num_drafts).items())
            for num_drafts in (1, 4, 16, 256, 4096)
        ]
        assert np.diff(accepted).min() >= -SLACK
        assert accepted[-1] == pytest.approx(2, abs=1e-6)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(instances())
def test_one_step_acceptance_stays_below_the_optimum(instance: Instance) -> None:
    best = optimal_one_step(instance.draft(()), instance.target(()), 2)
    for name in ("multi_draft_block_uncapped", "spectr", "recursive_rejection", "traversal"):
        found = Enumerator(get_verifier(name), DraftTree.chains(2, 1), instance).expected_accepted()
        assert found <= best + SLACK, name
