"""Chi-squared tests of the jitted float32 rules, over several iterations and per position.

Every key is literal so that a test gives the same verdict each time; a right rule fails a test with probability 1e-6.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.testing.chi_squared import assert_follows_law
from specjax.testing.draft_trees import tree_of_widths
from specjax.testing.instances import edge_instances, random_instance
from specjax.testing.sampling import count_outcomes, count_sequences, sample_runs, sequence_law
from specjax.types import DRAW_DETERMINISTIC, DRAW_IID, DRAW_WITHOUT_REPLACEMENT, DraftTree, Proposal
from specjax.verification import get_verifier, verifier_names
from specjax.verification.base import sampled
from specjax.verification.enumerate import Enumerator

QUICK_RUNS = 20_000
SLOW_RUNS = 200_000


def check_draws(name: str, tree: DraftTree, num_runs: int, seed: int, vocab_size: int = 3) -> None:
    rule = get_verifier(name)
    instance = random_instance(vocab_size, 0)
    num_tokens = tree.max_depth + 2
    draws = sample_runs(rule, tree, instance, jax.random.key(seed), num_runs=num_runs, num_tokens=num_tokens)
    joint = sequence_law(instance, num_tokens)
    assert_follows_law(count_sequences(draws.tokens, vocab_size), joint)
    for position in range(num_tokens):
        marginal = joint.reshape((vocab_size,) * num_tokens)
        marginal = marginal.sum(axis=tuple(axis for axis in range(num_tokens) if axis != position))
        assert_follows_law(np.bincount(draws.tokens[:, position], minlength=vocab_size), marginal)
    law = Enumerator(rule, tree, instance).first_iteration_law()
    assert_follows_law(*count_outcomes(draws, law))


@pytest.mark.parametrize("name", [name for name in verifier_names() if not get_verifier(name).experimental])
def test_emitted_sequences_and_outcomes_follow_their_laws(name: str) -> None:
    check_draws(name, DraftTree.chains(2 if get_verifier(name).multi_draft else 1, 2), QUICK_RUNS, seed=201)


@pytest.mark.slow
@pytest.mark.parametrize("name", verifier_names())
def test_three_drafts_of_three_tokens_follow_their_laws(name: str) -> None:
    runs = SLOW_RUNS // 10 if get_verifier(name).experimental else SLOW_RUNS
    check_draws(name, DraftTree.chains(3 if get_verifier(name).multi_draft else 1, 3), runs, seed=202, vocab_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tree"),
    [
        ("multi_draft_block", tree_of_widths((2, 2))),
        ("multi_draft_block", tree_of_widths((2, 2), (DRAW_IID, DRAW_DETERMINISTIC))),
        ("multi_draft_block_uncapped", tree_of_widths((3, 2))),
        ("recursive_rejection", tree_of_widths((2, 2), (DRAW_WITHOUT_REPLACEMENT, DRAW_IID))),
        ("spectr", tree_of_widths((2, 2))),
    ],
)
def test_packed_trees_follow_their_laws(name: str, tree: DraftTree) -> None:
    check_draws(name, tree, SLOW_RUNS, seed=203)


def test_missing_nodes_keep_the_law() -> None:
    tree = DraftTree.chains(2, 2)
    instance = edge_instances(3)["zeros_in_target"]
    draws = sample_runs(
        get_verifier("multi_draft_block"), tree, instance, jax.random.key(204), num_runs=QUICK_RUNS, num_tokens=4,
        max_depth=1,
    )  # fmt: skip
    assert draws.first_accepted.max() <= 1
    assert_follows_law(count_sequences(draws.tokens, 3), sequence_law(instance, 4))


def test_case_l8_noise_shared_between_draft_and_residual_is_noticed() -> None:
    target, draft = np.array([0.45, 0.35, 0.2]), np.array([0.2, 0.3, 0.5])
    tree = DraftTree.chains(1, 1)
    log_target = jnp.log(jnp.asarray([target, target], jnp.float32))
    log_draft = jnp.log(jnp.asarray(draft[None], jnp.float32))
    rule = get_verifier("token").rule

    def emit(rng_key: jax.Array, shared: bool) -> jax.Array:
        noise_key, accept_key, residual_key = jax.random.split(rng_key, 3)
        noise = jax.random.gumbel(noise_key, (3,))
        token = jnp.argmax(log_draft[0] + noise).astype(jnp.int32)
        proposal = Proposal(jnp.stack([jnp.int32(0), token]), log_draft, jnp.int32(1), tree)
        outcome = rule.decide(sampled(accept_key), proposal, log_target, ())
        other = noise if shared else jax.random.gumbel(residual_key, (3,))
        recovered = jnp.argmax(outcome.next_log_law + other).astype(jnp.int32)
        return jnp.where(outcome.stop_node == 1, token, recovered)

    num_draws = 400_000
    keys = jax.random.split(jax.random.key(205), num_draws)
    sigma = np.sqrt(target * (1 - target) / num_draws)
    for shared in (False, True):
        tokens = jax.jit(jax.vmap(emit, in_axes=(0, None)), static_argnums=1)(keys, shared)
        distance = np.abs(np.bincount(np.asarray(tokens), minlength=3) / num_draws - target) / sigma
        assert (distance.max() > 5) == shared
    # What the shared noise gives; the standard error of each frequency is below 0.0008.
    np.testing.assert_allclose(
        np.bincount(np.asarray(tokens), minlength=3) / num_draws, [0.477, 0.322, 0.201], atol=4e-3
    )


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_case_l3_first_tokens_of_drawn_drafts_follow_the_target(num_drafts: int) -> None:
    target, draft = [0.3, 0.5, 0.2], [0.6, 0.3, 0.1]
    for name in ("token",) if num_drafts == 1 else ("multi_draft_block", "recursive_rejection"):
        counts = _first_tokens(name, DraftTree.chains(num_drafts, 1), 3, [0, 1, 2], target, draft, 100_000, 206)
        assert_follows_law(counts, np.asarray(target))


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("token", "multi_draft_block", "multi_draft_block_uncapped")
        else pytest.param(name, marks=pytest.mark.slow)
        for name in verifier_names()
    ],
)
def test_long_rows_follow_the_law(name: str) -> None:
    # Beyond 1024 tokens rows are sorted and drawn from in other ways than short ones. The possible tokens lie in
    # different blocks of the two-level draw; 1501 is no multiple of a block.
    places = [0, 3, 700, 1400, 1500]
    target, draft = [0.3, 0.25, 0.2, 0.15, 0.1], [0.1, 0.4, 0.05, 0.3, 0.15]
    tree = DraftTree.chains(2 if get_verifier(name).multi_draft else 1, 1)
    counts = _first_tokens(name, tree, 1501, places, target, draft, 8_000, 207)
    assert counts.sum() == counts[places].sum()
    assert_follows_law(counts[places], np.asarray(target))


def _first_tokens(
    name: str,
    tree: DraftTree,
    vocab_size: int,
    places: list[int],
    target: list[float],
    draft: list[float],
    num_draws: int,
    seed: int,
) -> np.ndarray:
    """Counts of the first emitted token; all other tokens than `places` have probability zero."""
    log_target, log_draft = np.full((2, vocab_size), -np.inf, np.float32)
    log_target[places], log_draft[places] = np.log(target), np.log(draft)
    laws = jnp.broadcast_to(jnp.asarray(log_target), (tree.num_nodes, vocab_size))
    rule = get_verifier(name)
    carry = rule.init_carry(tree, vocab_size)
    chosen = jnp.asarray(places, jnp.int32)

    def emit(rng_key: jax.Array) -> jax.Array:
        draft_key, verify_key = jax.random.split(rng_key)
        drawn = jax.random.categorical(draft_key, jnp.asarray(log_draft)[chosen], shape=(tree.num_nodes,))
        proposal = Proposal(chosen[drawn], jnp.asarray(log_draft)[None], jnp.int32(1), tree)
        verdict = rule.verify(verify_key, proposal, laws, carry)
        return jnp.where(verdict.num_accepted > 0, proposal.tokens[jnp.maximum(verdict.path[1], 0)], verdict.next_token)

    run = jax.jit(lambda keys: jax.lax.map(emit, keys, batch_size=500))
    return np.bincount(np.asarray(run(jax.random.split(jax.random.key(seed), num_draws))), minlength=vocab_size)
