"""The jitted float32 rules at vocabulary sizes of real models: finite, possible tokens, reproducible."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.types import DraftTree, Proposal, Verdict
from specjax.verification import Verifier, get_verifier, verifier_names

EVERYDAY = [name for name in verifier_names() if not get_verifier(name).experimental]


def truncated_laws(rng_key: jax.Array, shape: tuple[int, ...], vocab_size: int) -> jax.Array:
    """Peaked laws in which most tokens are excluded, as after top-p."""
    logits = 4 * jax.random.normal(rng_key, (*shape, vocab_size))
    kept = logits >= jnp.quantile(logits, 0.9, axis=-1, keepdims=True)
    return jax.nn.log_softmax(jnp.where(kept, logits, -jnp.inf))


def random_request(rng_key: jax.Array, tree: DraftTree, vocab_size: int) -> tuple[Proposal, jax.Array]:
    """Related laws of draft and target; tokens drawn from the draft."""
    target_key, mix_key, token_key = jax.random.split(rng_key, 3)
    target = truncated_laws(target_key, (tree.num_nodes,), vocab_size)
    inner = np.asarray(tree.internal)
    other = truncated_laws(mix_key, (len(inner),), vocab_size)
    draft = jnp.logaddexp(target[inner] + jnp.log(0.8), other + jnp.log(0.2))
    row_of = {node: row for row, node in enumerate(tree.internal)}
    rows = draft[np.asarray([row_of[parent] for parent in tree.parent[1:]])]
    tokens = jax.random.categorical(token_key, rows).astype(jnp.int32)
    tokens = jnp.concatenate([jnp.zeros((1,), jnp.int32), tokens])
    return Proposal(tokens, draft, jnp.int32(tree.max_depth), tree), target


def check_possible(rule: Verifier, proposal: Proposal, target: jax.Array, verdict: Verdict) -> None:
    """Every emitted token has a positive target probability, every number is finite."""
    accepted = int(verdict.num_accepted)
    path = np.asarray(verdict.path)
    assert path[0] == 0
    assert (path[accepted + 1 :] == -1).all()
    for parent, node in itertools.pairwise(path[: accepted + 1]):
        assert proposal.tree.parent[node] == parent
        assert float(target[parent, proposal.tokens[node]]) > -np.inf
    assert float(target[path[accepted], verdict.next_token]) > -np.inf
    for leaf in jax.tree.leaves(verdict.carry):
        assert np.isfinite(np.asarray(leaf)).all()


@pytest.mark.parametrize("name", EVERYDAY)
def test_large_vocabularies_give_finite_and_possible_results(name: str) -> None:
    # 5003 is prime: the blocks of the two-level draw do not divide it.
    _run_requests(name, vocab_size=5003, num_drafts=3, draft_length=4, requests=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", verifier_names())
def test_largest_sizes_give_finite_and_possible_results(name: str) -> None:
    _run_requests(name, vocab_size=131072, num_drafts=8, draft_length=24, requests=1)


def _run_requests(name: str, *, vocab_size: int, num_drafts: int, draft_length: int, requests: int) -> None:
    rule = get_verifier(name)
    tree = DraftTree.chains(num_drafts if rule.multi_draft else 1, draft_length)
    verify = jax.jit(rule.verify)
    carry = rule.init_carry(tree, vocab_size)
    for seed in range(requests):
        proposal, target = random_request(jax.random.key(seed), tree, vocab_size)
        with jax.debug_nans(True):
            verdict = verify(jax.random.fold_in(jax.random.key(99), seed), proposal, target, carry)
        check_possible(rule, proposal, target, verdict)
        # The carry lives on from request step to step.
        carry = verdict.carry


@pytest.mark.parametrize("name", ["token", "multi_draft_block", "spectr_gbv"])
def test_neighbours_in_the_batch_do_not_matter(name: str) -> None:
    rule = get_verifier(name)
    tree = DraftTree.chains(2 if rule.multi_draft else 1, 3)
    carry = rule.init_carry(tree, 64)
    requests = [random_request(jax.random.key(seed), tree, 64) for seed in range(6)]
    stacked, targets = jax.tree.map(lambda *leaves: jnp.stack(leaves), *requests)
    keys = jax.random.split(jax.random.key(5), 6)
    together = jax.jit(jax.vmap(lambda key, proposal, target: rule.verify(key, proposal, target, carry)))
    batch = together(keys, stacked, targets)
    alone = jax.jit(rule.verify)
    for row, (proposal, target) in enumerate(requests):
        single = alone(keys[row], proposal, target, carry)
        assert (np.asarray(single.path) == np.asarray(batch.path[row])).all()
        assert int(single.next_token) == int(batch.next_token[row])
