"""Bounds: values known by hand, agreement of the linear program with closed forms, errors."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.testing.instances import Instance, edge_instances, from_tables, random_instance
from specjax.types import DraftTree
from specjax.verification import get_verifier
from specjax.verification.bounds import cic_bound, optimal_one_step, optimum
from specjax.verification.enumerate import Enumerator

INSTANCES = [random_instance(2, 0), random_instance(3, 1), *edge_instances(2).values()]


@pytest.fixture
def context_free() -> Instance:
    return from_tables("thirds", 2, {(): np.array([1 / 3, 2 / 3])}, {(): np.array([2 / 3, 1 / 3])})


def test_one_draft_without_carry_is_block_verification(context_free: Instance) -> None:
    assert optimum(context_free, 2, 1, with_carry=False) == pytest.approx(11 / 9, abs=1e-9)


def test_one_draft_with_carry_is_greedy_block_verification(context_free: Instance) -> None:
    assert optimum(context_free, 2, 1, with_carry=True) == pytest.approx(4 / 3, abs=1e-9)
    assert cic_bound(context_free, 2, 1) == pytest.approx(4 / 3, abs=1e-12)


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_threshold_sets_give_the_one_step_optimum(num_drafts: int) -> None:
    for instance in INSTANCES:
        closed = optimal_one_step(instance.draft(()), instance.target(()), num_drafts)
        for with_carry in (False, True):
            program = optimum(instance, 1, num_drafts, with_carry=with_carry)
            assert closed == pytest.approx(program, abs=1e-9), instance.name


def test_corrected_spectr_gbv_attains_the_conditional_independence_bound() -> None:
    for instance in INSTANCES:
        found = Enumerator(get_verifier("spectr_gbv"), DraftTree.chains(2, 2), instance).expected_accepted()
        assert found == pytest.approx(cic_bound(instance, 2, 2), abs=1e-12), instance.name


def test_optima_are_ordered() -> None:
    for instance in INSTANCES:
        without, carrying = (optimum(instance, 2, 2, with_carry=carry) for carry in (False, True))
        assert without <= carrying + 1e-9
        assert cic_bound(instance, 2, 2) <= carrying + 1e-9


def test_too_many_antichains_are_refused() -> None:
    with pytest.raises(ValueError, match="too many antichains"):
        optimum(random_instance(4, 0), 3, 2, with_carry=False)
