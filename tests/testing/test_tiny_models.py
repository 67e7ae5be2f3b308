"""The tiny target's exact law and the tabular drafter's declared laws."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.laws import LawParams, to_log_laws
from specjax.drafters.base import Drafter
from specjax.testing.tiny_models import TabularDrafter, exact_joint_law, tiny_target
from specjax.types import DraftTree

LAWS = LawParams(
    temperature=jnp.ones(1, jnp.float32),
    top_k=jnp.zeros(1, jnp.int32),
    top_p=jnp.ones(1, jnp.float32),
    min_p=jnp.zeros(1, jnp.float32),
)


def test_joint_law_is_a_law_whose_margin_is_the_shorter_one():
    target = tiny_target(jax.random.key(1), vocab_size=4)
    three = exact_joint_law(target, (1, 2), 3, LAWS)
    two = exact_joint_law(target, (1, 2), 2, LAWS)
    assert three.shape == (4, 4, 4)
    assert three.sum() == pytest.approx(1, abs=1e-6)
    np.testing.assert_allclose(three.sum(axis=-1), two, rtol=1e-5)
    # Context matters: the conditionals of the last token differ between prefixes.
    conditionals = three / three.sum(axis=-1, keepdims=True)
    assert np.abs(conditionals - conditionals[0, 0]).max() > 0.05


def test_joint_law_of_a_greedy_row_is_one_hot():
    law = exact_joint_law(tiny_target(jax.random.key(1), vocab_size=4), (1, 2), 2, LawParams.greedy(1))
    assert sorted(law.ravel())[-2:] == [0, 1]


def test_tied_targets_share_one_matrix_up_to_scale():
    params = tiny_target(jax.random.key(1), tie_word_embeddings=True).params
    ratio = params["embed_tokens"] / params["lm_head"].T
    np.testing.assert_allclose(ratio, ratio[0, 0], rtol=1e-5)


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_tabular_drafts_come_from_the_laws_that_they_declare(greedy, num_drafts):
    drafter = TabularDrafter(5, greedy=greedy)
    assert isinstance(drafter, Drafter)
    params = drafter.init_params(jax.random.key(0))
    tree = DraftTree.chains(num_drafts, 3)
    batch = 64
    laws = jax.tree.map(lambda field: jnp.broadcast_to(field, (batch,)), LAWS)

    def propose(rng_keys, params):
        return drafter.propose(
            rng_keys,
            params,
            drafter.init_state(batch, 8, tree),
            last_token=jnp.arange(batch, dtype=jnp.int32) % 5,
            tree=tree,
            max_depth=jnp.full(batch, 3, jnp.int32),
            to_laws=lambda logits: to_log_laws(logits, laws),
        )

    proposal, state = jax.jit(propose)(jax.random.split(jax.random.key(1), batch), params)
    assert state == ()
    table = np.asarray(jax.nn.log_softmax(params["logits"]))
    tokens, declared = np.asarray(proposal.tokens), np.asarray(proposal.draft_log_laws)
    for place, node in enumerate(tree.internal):
        rows = table[tokens[:, node]]
        if greedy:
            assert (declared[:, place].argmax(axis=1) == rows.argmax(axis=1)).all()
            for child in tree.children[node]:
                assert (tokens[:, child] == rows.argmax(axis=1)).all()
        else:
            np.testing.assert_allclose(declared[:, place], rows, atol=1e-5)
    if num_drafts > 1 and not greedy:
        first = tokens[:, list(tree.children[0])]
        assert (first[:, 0] != first[:, 1]).any()
