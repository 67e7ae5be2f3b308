"""The rules give the same verdicts whether a kernel or plain sums read their laws; and lower for GPU and TPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_verifier
from specjax.types import DraftTree, Proposal
from specjax.verification import get_verifier

BATCH = 16
VOCAB_SIZE = 1500


def _proposals(tree: DraftTree) -> tuple[Proposal, jax.Array]:
    """Peaked laws, disturbed for the draft; tokens from the draft."""
    rng = np.random.default_rng(5)
    logits = 3 * rng.normal(size=(BATCH, tree.num_nodes, VOCAB_SIZE))
    rows = [tree.internal.index(parent) for parent in tree.parent[1:]]
    disturbed = logits[:, list(tree.internal)] + rng.normal(size=(BATCH, len(tree.internal), VOCAB_SIZE))
    perturbed = disturbed[:, rows] + rng.gumbel(size=(BATCH, len(rows), VOCAB_SIZE))
    tokens = np.concatenate([np.zeros((BATCH, 1)), perturbed.argmax(axis=-1)], axis=1)
    log_laws = [values - np.log(np.exp(values).sum(axis=-1, keepdims=True)) for values in (disturbed, logits)]
    proposal = Proposal(
        tokens=jnp.asarray(tokens, jnp.int32),
        draft_log_laws=jnp.asarray(log_laws[0], jnp.float32),
        max_depth=jnp.full(BATCH, tree.max_depth, jnp.int32),
        tree=tree,
    )
    return proposal, jnp.asarray(log_laws[1], jnp.float32)


@pytest.mark.parametrize(
    ("name", "num_drafts"), [("block", 1), ("multi_draft_block", 2)], ids=["block", "multi_draft_block"]
)
def test_verdicts_do_not_depend_on_who_reads_the_laws(
    monkeypatch: pytest.MonkeyPatch, name: str, num_drafts: int
) -> None:
    tree = DraftTree.chains(num_drafts, 2)
    verifier = get_verifier(name)
    proposal, laws = _proposals(tree)
    keys = jax.random.split(jax.random.key(3), BATCH)

    def verdicts() -> list[np.ndarray]:
        verify = jax.jit(jax.vmap(lambda key, proposal, laws: verifier.verify(key, proposal, laws, ())))
        return [np.asarray(leaf) for leaf in jax.tree.leaves(verify(keys, proposal, laws))]

    plain = verdicts()
    by_kernel = functools.partial(block_verifier.residual_sums, implementation="interpret")
    monkeypatch.setattr(block_verifier, "residual_sums", by_kernel)
    for expected, found in zip(plain, verdicts(), strict=True):
        np.testing.assert_array_equal(found, expected)
    # Not all requests decide alike, so that the comparison says something.
    assert len(np.unique(plain[1])) > 1


@pytest.mark.parametrize("name", ["block", "multi_draft_block"])
def test_rules_lower_for_accelerators(name: str) -> None:
    tree = DraftTree.chains(1 if name == "block" else 2, 2)
    verifier = get_verifier(name)
    vocab_size, batch = 128256, 2

    def verify(rng_keys: jax.Array, tokens: jax.Array, draft: jax.Array, target: jax.Array):
        proposal = Proposal(tokens, draft, jnp.full(batch, tree.max_depth, jnp.int32), tree)
        return jax.vmap(lambda key, proposal, laws: verifier.verify(key, proposal, laws, ()))(
            rng_keys, proposal, target
        )

    traced = jax.jit(verify).trace(
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch)),
        jax.ShapeDtypeStruct((batch, tree.num_nodes), jnp.int32),
        jax.ShapeDtypeStruct((batch, len(tree.internal), vocab_size), jnp.float32),
        jax.ShapeDtypeStruct((batch, tree.num_nodes, vocab_size), jnp.float32),
    )
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()
    # Without a known chip a program for GPU takes plain sums, which every chip can run.
    for platform in ("cuda", "cpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert "mosaic_gpu" not in text
        assert "tpu_custom_call" not in text
