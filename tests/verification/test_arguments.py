"""Arguments that cannot be right are refused with the name of the argument, the rule and the value."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from specjax.testing.instances import Instance, random_instance
from specjax.types import DraftTree, Proposal
from specjax.verification import Verifier, get_verifier, register, verifier_names
from specjax.verification.bounds import cic_bound, optimal_one_step, optimum
from specjax.verification.enumerate import Enumerator
from specjax.verification.token import TokenRule


@pytest.fixture(autouse=True)
def as_users_run_it() -> Iterator[None]:
    """Without the type checks that only tests have."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


VOCAB = 5
TREE = DraftTree.chains(1, 2)


def request(tree: DraftTree = TREE) -> tuple[Proposal, jax.Array]:
    laws = jnp.log(jnp.full((tree.num_nodes, VOCAB), 1 / VOCAB, jnp.float32))
    tokens = jnp.zeros(tree.num_nodes, jnp.int32)
    return Proposal(tokens, laws[: len(tree.internal)], jnp.int32(tree.max_depth), tree), laws


def verify(name: str, proposal: Proposal, target: Any, carry: Any = ()) -> Any:
    return get_verifier(name).verify(jax.random.key(0), proposal, target, carry)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p, q: (p, q[:2]), r"`target_log_laws` must have shape \[3, V\]; got \(2, 5\)"),
        (lambda p, q: (p, q[:, :0]), r"`target_log_laws` must have shape \[3, V\]; got \(3, 0\)"),
        (lambda p, q: (p.replace(draft_log_laws=q), q), r"`draft_log_laws` must have shape \(2, 5\); got \(3, 5\)"),
        (lambda p, q: (p, q[:, :4]), r"`draft_log_laws` must have shape \(2, 4\)"),
        (lambda p, q: (p.replace(tokens=p.tokens[:2]), q), r"`tokens` must have shape \(3,\).*got \(2,\)"),
        (lambda p, q: (p.replace(max_depth=p.tokens), q), r"`max_depth` must have shape \(\).*got \(3,\)"),
        (lambda p, q: (p, q.astype(jnp.bfloat16)), "`draft_log_laws` must have the dtype of .*, bfloat16; got float32"),
    ],
)
def test_arrays_that_do_not_fit_the_tree_are_refused(change: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify("token", *change(*request()))


def test_dtypes_that_mean_something_else_are_refused() -> None:
    proposal, target = request()
    for wrong, message in (
        (proposal.replace(tokens=jnp.zeros(3)), "`tokens` must be integers; got dtype float32"),
        (proposal.replace(max_depth=jnp.float32(2)), "`max_depth` must be integers; got dtype float32"),
    ):
        with pytest.raises(ValueError, match=message):
            verify("token", wrong, target)
    whole = proposal.replace(draft_log_laws=jnp.zeros((2, VOCAB), jnp.int32))
    with pytest.raises(ValueError, match="`target_log_laws` must be log-probabilities; got dtype int32"):
        verify("token", whole, jnp.zeros((3, VOCAB), jnp.int32))


@pytest.mark.parametrize("name", verifier_names())
def test_a_carry_of_another_rule_or_tree_is_refused(name: str) -> None:
    rule = get_verifier(name)
    proposal, target = request()
    if rule.carries_state:
        wrong = [(), rule.init_carry(DraftTree.chains(1, 5), VOCAB)]
    else:
        wrong = [None, get_verifier("greedy_block").init_carry(TREE, VOCAB)]
    for carry in wrong:
        with pytest.raises(ValueError, match=f"`carry` must be what `init_carry` of '{name}' gives"):
            rule.verify(jax.random.key(0), proposal, target, carry)


def test_numbers_of_drafts_and_tokens_are_checked() -> None:
    instance = random_instance(2, 0)
    with pytest.raises(ValueError, match="`num_drafts` must be at least 1; got 0"):
        DraftTree.chains(0, 2)
    with pytest.raises(ValueError, match="`draft_length` must be at least 0; got -1"):
        DraftTree.chains(1, -1)
    with pytest.raises(ValueError, match="`num_drafts` must be at least 1; got 0"):
        cic_bound(instance, 2, 0)
    with pytest.raises(ValueError, match="`draft_length` must be at least 0; got -2"):
        cic_bound(instance, -2, 1)
    with pytest.raises(ValueError, match="`num_drafts` must be at least 1; got -1"):
        optimum(instance, 1, -1, with_carry=False)
    with pytest.raises(ValueError, match="`num_drafts` must be at least 1; got 0"):
        optimal_one_step(instance.draft(()), instance.target(()), 0)
    for depth in (-1, 3):
        with pytest.raises(ValueError, match=rf"`max_depth` must be in \[0, 2\]; got {depth}"):
            Enumerator(get_verifier("token"), TREE, instance, depth)
    assert cic_bound(instance, 0, 1) == 0


@pytest.mark.parametrize(
    ("law", "message"),
    [
        (np.array([0.5, 0.6]), "must give probabilities that add up to 1; got"),
        (np.array([1.5, -0.5]), "must give probabilities that add up to 1; got"),
        (np.array([np.nan, 1.0]), "must give probabilities that add up to 1; got"),
        (np.array([1.0]), r"must give 2 probabilities; got shape \(1,\)"),
    ],
)
def test_instances_without_probabilities_are_refused(law: np.ndarray, message: str) -> None:
    good = random_instance(2, 0)
    for which in ("target", "draft"):
        laws = {"target": good.target, "draft": good.draft} | {which: lambda _: law}
        instance = Instance("mine", 2, **laws)
        for name in ("token", "multi_draft_block", "spectr_gbv"):
            with pytest.raises(ValueError, match=f"`{which}` of instance 'mine' {message}"):
                Enumerator(get_verifier(name), TREE, instance).iteration()


def test_laws_of_a_single_step_are_checked() -> None:
    half, third = np.full(2, 1 / 2), np.full(3, 1 / 3)
    with pytest.raises(ValueError, match=r"must have one shape \[V\]; got \(2,\) and \(3,\)"):
        optimal_one_step(half, third, 2)
    for wrong in (np.array([0.5, 0.6]), np.array([np.nan, 0.5]), np.array([1.5, -0.5])):
        with pytest.raises(ValueError, match="`target` must hold probabilities"):
            optimal_one_step(half, wrong, 2)
        with pytest.raises(ValueError, match="`draft` must hold probabilities"):
            optimal_one_step(wrong, half, 2)


def test_unknown_rules_are_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match=r"`verifier` must be one of .*multi_draft_block.*'fastest'"):
        get_verifier("fastest")


def test_a_name_cannot_be_taken_twice() -> None:
    with pytest.raises(ValueError, match="`name` must be unique among verifiers; got 'block' twice"):
        register(Verifier("block", TokenRule(), "another rule under a known name"))
