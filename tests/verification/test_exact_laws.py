"""Every rule emits the target's law exactly, over L+2 tokens and more, carry-over active."""

from __future__ import annotations

import pytest

from specjax.testing.instances import Instance, edge_instances, padded_vocabulary, random_instance
from specjax.types import DraftTree
from specjax.verification import get_verifier, verifier_names
from specjax.verification.enumerate import Enumerator

LARGEST_ERROR = 1e-12
MULTI_DRAFT = [name for name in verifier_names() if get_verifier(name).multi_draft]
SINGLE_DRAFT = [name for name in verifier_names() if not get_verifier(name).multi_draft]
RULES_AND_DRAFTS = [(name, 1) for name in SINGLE_DRAFT] + [(name, drafts) for name in MULTI_DRAFT for drafts in (1, 2)]
# The experimental rule compiles for long; the slow tests run it on everything.
QUICK = [name for name in verifier_names() if not get_verifier(name).experimental]


def law_error(
    name: str, instance: Instance, num_drafts: int, draft_length: int, num_tokens: int | None = None
) -> float:
    enumerator = Enumerator(get_verifier(name), DraftTree.chains(num_drafts, draft_length), instance)
    assert sum(emission.probability for emission in enumerator.iteration()) == pytest.approx(1, abs=1e-12)
    return enumerator.law_error(draft_length + 2 if num_tokens is None else num_tokens)


@pytest.mark.parametrize(("name", "num_drafts"), RULES_AND_DRAFTS)
def test_emitted_law_equals_the_targets(name: str, num_drafts: int) -> None:
    assert law_error(name, padded_vocabulary(random_instance(2, 0), 3), num_drafts, 2) <= LARGEST_ERROR


@pytest.mark.parametrize("edge", sorted(edge_instances(3)))
def test_edge_instances_are_exact_for_every_rule(edge: str) -> None:
    for name in QUICK:
        num_drafts = 2 if get_verifier(name).multi_draft else 1
        for vocab_size, draft_length in ((2, 2), (3, 1)):
            # One vocabulary size, so that each rule is compiled once a shape.
            instance = padded_vocabulary(edge_instances(vocab_size)[edge], 3)
            error = law_error(name, instance, num_drafts, draft_length)
            assert error <= LARGEST_ERROR, (name, num_drafts, vocab_size)


@pytest.mark.parametrize("name", verifier_names())
def test_draft_length_zero_is_plain_decoding(name: str) -> None:
    assert law_error(name, random_instance(3, 1), 2, 0) <= LARGEST_ERROR


@pytest.mark.parametrize("name", QUICK)
def test_missing_nodes_leave_the_law_exact(name: str) -> None:
    rule = get_verifier(name)
    tree = DraftTree.chains(2 if rule.multi_draft else 1, 2)
    for max_depth in (0, 1):
        enumerator = Enumerator(rule, tree, random_instance(2, 2), max_depth)
        assert enumerator.law_error(4) <= LARGEST_ERROR
        assert enumerator.expected_accepted() <= max_depth
        shorter = Enumerator(rule, DraftTree.chains(2 if rule.multi_draft else 1, max_depth), random_instance(2, 2))
        # Nodes below `max_depth` might as well not be in the tree.
        assert enumerator.expected_accepted() == pytest.approx(shorter.expected_accepted(), abs=1e-12)


@pytest.mark.parametrize("name", ["greedy_block", "spectr_gbv"])
def test_nested_carry_over_stays_exact_over_many_iterations(name: str) -> None:
    num_drafts = 2 if get_verifier(name).multi_draft else 1
    assert law_error(name, random_instance(2, 3), num_drafts, 3, num_tokens=5) <= LARGEST_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("edge", sorted(edge_instances(3)))
@pytest.mark.parametrize("num_drafts", [1, 2])
def test_edge_instances_are_exact_with_the_carry_over_of_three_tokens(edge: str, num_drafts: int) -> None:
    for name in verifier_names():
        drafts = num_drafts if get_verifier(name).multi_draft else 1
        assert law_error(name, edge_instances(3)[edge], drafts, 2) <= LARGEST_ERROR, name


@pytest.mark.slow
@pytest.mark.parametrize("name", verifier_names())
def test_larger_shapes_are_exact(name: str) -> None:
    shapes = [(2, 3, 3), (3, 3, 2), (3, 2, 2), (4, 2, 2), (4, 1, 3), (4, 3, 1), (3, 1, 3)]
    for vocab_size, num_drafts, draft_length in shapes:
        drafts = num_drafts if get_verifier(name).multi_draft else 1
        assert law_error(name, random_instance(vocab_size, 4), drafts, draft_length) <= LARGEST_ERROR
