"""The training-time unroll equals what decoding computes, step by step."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import compute_logits
from specjax.models import ModelConfig, init_params
from specjax.testing.eagle3_numpy import Eagle3Reference
from specjax.types import DraftTree
from train import unroll as unroll_module
from train.unroll import Batch, all_windows, random_windows, supervised_pairs, unroll

TARGET = ModelConfig(
    vocab_size=24, hidden_size=8, intermediate_size=16, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=4
)
VOCAB, LENGTH, STEPS, WINDOW = 24, 12, 3, 4


@functools.cache
def make_drafter(**flags):
    config = Eagle3Config.for_target(TARGET, rank=3, **flags)
    target_params = init_params(jax.random.key(1), TARGET, scale=0.5)
    params = init_drafter(jax.random.key(2), config, target_params, TARGET, head_init="random", warm_start=False)
    if "fc_norm" in params:
        params["fc_norm"] = 1 + 0.5 * jax.random.normal(jax.random.key(3), params["fc_norm"].shape, jnp.float32)
    return config, {**params, "embed_tokens": target_params["embed_tokens"]}


def make_batch(batch_size=2, *, segments=False, seed=0):
    generator = np.random.default_rng(seed)
    segment_ids = np.where(np.arange(LENGTH) < 5, 1, 2) if segments else None
    return Batch(
        tokens=jnp.asarray(generator.integers(0, VOCAB, (batch_size, LENGTH)), jnp.int32),
        loss_mask=jnp.asarray(generator.random((batch_size, LENGTH)) < 0.7),
        features=jnp.asarray(generator.standard_normal((batch_size, LENGTH, 24)), jnp.float32),
        final_hidden=jnp.asarray(generator.standard_normal((batch_size, LENGTH, 8)), jnp.float32),
        segment_ids=None if segment_ids is None else jnp.broadcast_to(jnp.asarray(segment_ids), (batch_size, LENGTH)),
    )


def run(config, params, batch, windows, **arguments):
    function = jax.jit(unroll, static_argnums=1, static_argnames=("num_steps", "window", "rematerialise"))
    return function(params, config, batch, windows, num_steps=STEPS, window=WINDOW, **arguments)


def dense(config, params, batch, **arguments):
    """Outputs of all entries, [S, B, T, d]."""
    windows = all_windows(*batch.tokens.shape, WINDOW)
    outputs = run(config, params, batch, windows, **arguments)
    return np.asarray(outputs.reshape(STEPS, batch.tokens.shape[0], -1, config.hidden_size))


def reference(config, params, tokens, features, entry):
    """Outputs of all steps at one entry, by the plain NumPy EAGLE-3 that drafts a chain after `entry` commits."""
    model = Eagle3Reference(config, params)
    for position in range(entry + 1):
        state = model.combine(features[position])
        output = model.add(state, int(tokens[position + 1]), position, range(position))
    outputs = [output]
    for step in range(1, STEPS):
        token = int(tokens[entry + 1 + step])
        output = model.add(model.fed_back(output), token, entry + step, range(entry + step))
        outputs.append(output)
    return np.stack(outputs)


@pytest.mark.parametrize(
    "flags",
    [{}, {"norm_output": True, "fc_norm": True}, {"norm_before_residual": True, "norm_before_fc": True}],
    ids=str,
)
def test_unroll_equals_the_numpy_reference(flags):
    config, params = make_drafter(**flags)
    batch = make_batch()
    outputs = dense(config, params, batch)
    for row in range(2):
        for entry in (0, 3, LENGTH - 1 - STEPS):
            expected = reference(config, params, np.asarray(batch.tokens[row]), np.asarray(batch.features[row]), entry)
            np.testing.assert_allclose(outputs[:, row, entry], expected, rtol=1e-4, atol=1e-4)


def test_unroll_equals_decoding_a_chain_of_the_teacher_forced_tokens():
    """Step-i logits at every entry are the drafter's own when it drafts the text's tokens."""
    config, params = make_drafter()
    batch = make_batch(1)
    logits = compute_logits(params, config, jnp.asarray(dense(config, params, batch)))
    drafter = Eagle3Drafter(config)
    tree = DraftTree.chains(1, STEPS)
    # One row of the drafter for each entry: the first entry + 1 tokens are committed.
    entries = np.arange(LENGTH - STEPS)

    def decode():
        state = drafter.extend(
            params,
            drafter.init_state(len(entries), 24, tree),
            tokens=jnp.repeat(batch.tokens[:, 1:], len(entries), axis=0),
            features=jnp.repeat(batch.features[:, :-1], len(entries), axis=0),
            count=jnp.asarray(entries + 1, jnp.int32),
        )
        drafted = []

        def force(drafted_logits):
            forced = batch.tokens[0, entries + 2 + len(drafted)]
            drafted.append(drafted_logits[:, 0])
            return jnp.where(jnp.arange(VOCAB) == forced[:, None, None], jnp.float32(0), -jnp.inf)

        drafter.propose(
            jax.random.split(jax.random.key(0), len(entries)),
            params,
            state,
            last_token=batch.tokens[0, entries + 1],
            tree=tree,
            max_depth=jnp.full(len(entries), STEPS, jnp.int32),
            to_laws=force,
        )
        return drafted

    seen = jax.jit(decode)()
    assert len(seen) == STEPS
    for step in range(STEPS):
        np.testing.assert_allclose(logits[step, 0, entries], seen[step], rtol=1e-4, atol=1e-4)


def test_texts_of_one_row_see_nothing_of_one_another():
    config, params = make_drafter()
    batch = make_batch(segments=True)
    packed = dense(config, params, batch)
    alone = Batch(
        tokens=jnp.pad(batch.tokens[:, 5:], ((0, 0), (0, 5))),
        loss_mask=batch.loss_mask,
        features=jnp.pad(batch.features[:, 5:], ((0, 0), (0, 5), (0, 0))),
        final_hidden=batch.final_hidden,
    )
    # Rotations are relative, so a text's place in its row does not matter.
    np.testing.assert_allclose(packed[:, :, 5:9], dense(config, params, alone)[:, :, :4], rtol=1e-4, atol=1e-4)


def test_chosen_windows_equal_the_same_entries_of_all_windows():
    config, params = make_drafter()
    batch = make_batch()
    everything = dense(config, params, batch)
    windows = jnp.asarray([[4], [8]], jnp.int32)
    chosen = run(config, params, batch, windows)
    for row, start in enumerate((4, 8)):
        ours, theirs = chosen[:, row, 0], everything[:, row, start : start + WINDOW]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rematerialised_and_blockwise_attention_change_no_gradient(monkeypatch):
    config, params = make_drafter()
    batch = make_batch()
    windows = all_windows(2, LENGTH, WINDOW)

    def gradients(**arguments):
        def loss(params):
            outputs = unroll(params, config, batch, windows, num_steps=STEPS, window=WINDOW, **arguments)
            return jnp.sum(jnp.square(outputs))

        return jax.jit(jax.grad(loss))(params)

    plain = gradients()
    remat = gradients(rematerialise=True)
    monkeypatch.setattr(unroll_module, "_QUERIES_AT_ONCE", 4)
    blocks = gradients()
    for other in (remat, blocks):
        for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(plain), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * float(jnp.abs(theirs).max()))


def test_supervised_pairs_predict_the_token_two_and_a_step_ahead():
    mask = np.zeros((1, 8), bool)
    mask[0, 5] = True
    zeros = jnp.zeros((1, 8, 1), jnp.float32)
    batch = Batch(jnp.zeros((1, 8), jnp.int32), jnp.asarray(mask), zeros, zeros)
    pairs = np.asarray(supervised_pairs(batch, 4))
    assert [list(np.flatnonzero(pairs[step, 0])) for step in range(4)] == [[3], [2], [1], [0]]
    assert not supervised_pairs(batch, 9)[7:].any()


def test_pairs_across_texts_are_not_supervised():
    batch = make_batch(1, segments=True).replace(loss_mask=jnp.ones((1, LENGTH), bool))
    pairs = np.asarray(supervised_pairs(batch, 2))[:, 0]
    assert list(np.flatnonzero(pairs[0])) == [0, 1, 2, 5, 6, 7, 8, 9]
    assert list(np.flatnonzero(pairs[1])) == [0, 1, 5, 6, 7, 8]


def test_all_windows_cover_every_entry_that_can_be_supervised():
    assert all_windows(1, 12, 4).tolist() == [[0, 4, 8]]
    assert all_windows(2, 13, 4).tolist() == [[0, 4, 8]] * 2
    assert all_windows(1, 14, 4).tolist() == [[0, 4, 8, 12]]
    assert all_windows(1, 1, 4).tolist() == [[0]]


def test_random_windows_prefer_those_with_supervised_pairs():
    pairs = np.zeros((2, 3, 40), bool)
    pairs[0, 0, [3, 17]] = True
    pairs[1, 1, 39] = True
    seen = set()
    for seed in range(20):
        windows = np.asarray(random_windows(jax.random.key(seed), jnp.asarray(pairs), 4, 2))
        assert windows[0].tolist() == [0, 16]
        assert 36 in windows[1]
        assert np.all(np.diff(windows, axis=1) > 0)
        seen.add(tuple(windows[2]))
    assert len(seen) > 5


def test_too_many_windows_are_an_error():
    with pytest.raises(ValueError, match=r"`num_windows` must be in \[1, 3\] for rows of 12 tokens; got 4"):
        random_windows(jax.random.key(0), jnp.zeros((1, 2, 12), bool), 4, 4)
