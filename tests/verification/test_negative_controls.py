"""What is not lossless must show: the enumeration would notice these faults in a rule or its use."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.testing.instances import Instance, Prefix, from_tables, random_instance
from specjax.testing.published_spectr_gbv import PUBLISHED_SPECTR_GBV
from specjax.testing.rules_numpy import closed_forms
from specjax.types import DraftTree
from specjax.verification import Verifier, get_verifier, register, verifier_names
from specjax.verification.carry import Carry
from specjax.verification.enumerate import Enumerator
from specjax.verification.greedy_block import GreedyBlockRule
from specjax.verification.spectr_gbv import SpectrGbvRule


class _WithoutCarry(GreedyBlockRule):
    """Forgets what it carries."""

    def advance_carry(self, *args: Any) -> Carry:
        return _fresh(super().advance_carry(*args))


class _OnlyTheNewestLevel(GreedyBlockRule):
    """Carries the newest level and forgets those below it."""

    def advance_carry(self, *args: Any) -> Carry:
        return _newest(super().advance_carry(*args))


class _GbvWithoutCarry(SpectrGbvRule):
    def next_carry(self, *args: Any) -> Carry:
        return _fresh(super().next_carry(*args))


class _GbvOnlyTheNewestLevel(SpectrGbvRule):
    def next_carry(self, *args: Any) -> Carry:
        return _newest(super().next_carry(*args))


def _fresh(carry: Carry) -> Carry:
    return Carry(jnp.zeros_like(carry.remaining), jnp.zeros_like(carry.log_z))


def _newest(carry: Carry) -> Carry:
    last = jnp.maximum(jnp.sum((carry.remaining > 0).astype(jnp.int32)) - 1, 0)
    first = jnp.arange(carry.remaining.shape[0], dtype=jnp.int32) == 0
    return Carry(jnp.where(first, carry.remaining[last], 0).astype(jnp.int32), jnp.where(first, carry.log_z[last], 0))


def law_error(rule: Any, num_drafts: int, num_tokens: int, draft_length: int = 3) -> float:
    verifier = Verifier(
        "control", rule, "a faulty rule", multi_draft=num_drafts > 1, carries_state=True, lossless=False
    )
    return Enumerator(verifier, DraftTree.chains(num_drafts, draft_length), random_instance(2, 3)).law_error(num_tokens)


@pytest.mark.parametrize(("rule", "num_drafts"), [(_WithoutCarry(), 1), (_GbvWithoutCarry(), 2)])
def test_greedy_rules_without_their_carry_are_biased(rule: Any, num_drafts: int) -> None:
    assert law_error(rule, num_drafts, num_tokens=2, draft_length=2) > 1e-3


@pytest.mark.parametrize(("rule", "num_drafts"), [(_OnlyTheNewestLevel(), 1), (_GbvOnlyTheNewestLevel(), 2)])
def test_carry_that_does_not_nest_is_biased(rule: Any, num_drafts: int) -> None:
    assert law_error(rule, num_drafts, num_tokens=4) > 1e-5


def _two_token_instance(target: tuple[float, float], draft: tuple[float, float]) -> Instance:
    return from_tables("pair", 2, {(): np.asarray(target)}, {(): np.asarray(draft)})


def test_published_rule_emits_the_wrong_law() -> None:
    instance = _two_token_instance((0.75, 0.25), (0.5, 0.5))
    law = Enumerator(PUBLISHED_SPECTR_GBV, DraftTree.chains(2, 1), instance).emitted_law(1)
    assert law[0,] == pytest.approx(83 / 108, abs=1e-12)


def test_published_rule_emits_the_wrong_law_even_from_the_target_itself() -> None:
    instance = _two_token_instance((0.7, 0.3), (0.7, 0.3))
    law = Enumerator(PUBLISHED_SPECTR_GBV, DraftTree.chains(2, 1), instance).emitted_law(1)
    assert law[0,] == pytest.approx(0.74884, abs=5e-6)


def test_published_rule_is_greedy_block_verification_for_one_draft() -> None:
    instance = random_instance(2, 0)
    law = Enumerator(PUBLISHED_SPECTR_GBV, DraftTree.chains(1, 2), instance).first_iteration_law()
    expected = closed_forms.spectr_gbv(instance, 2, 1)
    assert max(abs(law.get(key, 0) - expected.get(key, 0)) for key in {*law, *expected}) <= 1e-12


def test_published_rule_cannot_be_chosen_for_decoding() -> None:
    assert PUBLISHED_SPECTR_GBV.name not in verifier_names()
    with pytest.raises(ValueError, match="must be one of"):
        get_verifier(PUBLISHED_SPECTR_GBV.name)
    with pytest.raises(ValueError, match="must be lossless"):
        register(PUBLISHED_SPECTR_GBV)


def test_carry_over_needs_a_draft_law_of_the_context_alone() -> None:
    # A drafter whose law depends on where its block begins, as one that reads the target's features.
    base, other = random_instance(2, 0), random_instance(2, 9)

    def block_draft(committed: Prefix, drafted: Prefix) -> np.ndarray:
        return (base if len(drafted) == 0 else other).draft((*committed, *drafted))

    instance = dataclasses.replace(base, block_draft=block_draft)
    for name in verifier_names():
        rule = get_verifier(name)
        if rule.experimental:
            continue
        tree = DraftTree.chains(2 if rule.multi_draft else 1, 2)
        error = Enumerator(rule, tree, instance).law_error(4)
        if rule.needs_context_law:
            assert error > 1e-4, name
        else:
            assert error <= 1e-12, name


def test_draft_laws_that_were_not_sampled_from_are_noticed() -> None:
    # Drafts from one law, verified as if from another.
    instance = random_instance(3, 1)
    claimed = random_instance(3, 2)
    tree = DraftTree.chains(1, 1)

    class Claims(type(get_verifier("token").rule)):  # type: ignore[misc]
        def decide(self, choose: Any, proposal: Any, target_log_laws: Any, carry: Any) -> Any:
            wrong = proposal.replace(draft_log_laws=jnp.log(jnp.asarray(claimed.draft(())))[None])
            return super().decide(choose, wrong, target_log_laws, carry)

    verifier = Verifier("claims", Claims(), "verifies against another law", lossless=False)
    assert Enumerator(verifier, tree, instance).law_error(1) > 1e-2
