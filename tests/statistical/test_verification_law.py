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
