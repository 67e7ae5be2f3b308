"""XLA and the portable kernel against the reference; the noise; the choice of candidates."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import (
    check_greedy,
    check_logits,
    check_sample,
    make_head,
    make_hidden,
    row_keys,
    temperatures,
)

from pallas_kernels import low_rank_head
from pallas_kernels.low_rank_head import noise, portable, reference, shapes
from pallas_kernels.low_rank_head.candidates import top_of_blocks
from pallas_kernels.low_rank_head.weights import depth_parts

CASES = {
    "low rank": dict(rank=40, dtype=jnp.bfloat16, batch=5),
    "full, one row": dict(rank=None, dtype=jnp.bfloat16, batch=1),
    "low rank, float32": dict(rank=64, dtype=jnp.float32, batch=3),
    "all tokens valid": dict(rank=16, dtype=jnp.bfloat16, batch=64, vocab_size=256, num_valid=256),
}


@pytest.fixture(params=CASES)
def case(request):
    options = dict(CASES[request.param])
    batch = options.pop("batch")
    head = make_head(**options)
    return head, make_hidden(head, batch)


@pytest.mark.parametrize("implementation", [None, "xla", "interpret"])
def test_every_operation_gives_the_reference_values(case, implementation, monkeypatch):
    # Several tiles, the last of them cut off.
    monkeypatch.setattr(portable, "_TILE_BYTES", 1)
    head, hidden = case
    batch = hidden.shape[0]
    named = {"implementation": implementation}
    check_greedy(low_rank_head.greedy(hidden, head, **named), hidden, head)
    draw = low_rank_head.sample(hidden, head, row_keys(batch), temperature=temperatures(batch), **named)
    check_sample(draw, hidden, head)
    check_logits(low_rank_head.logits(hidden, head, **named), hidden, head)
    token, value = low_rank_head.top_candidates(hidden, head, 6, **named)
    expected_token, expected_value = reference.top_candidates(hidden, head, 6)
    np.testing.assert_allclose(value, expected_value, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(token, expected_token)


def test_the_law_is_normalised_and_tempered():
    head = make_head()
    hidden = make_hidden(head, 2)
    law = low_rank_head.log_law(hidden, head, temperature=jnp.asarray([0.5, 2.0], jnp.float32))
    expected = jax.nn.log_softmax(reference.logits(hidden, head) / jnp.asarray([[0.5], [2.0]], jnp.float32))
    np.testing.assert_allclose(law, expected, rtol=0, atol=1e-5)
    assert bool(jnp.all(law[:, head.num_valid_tokens :] == -jnp.inf))


def test_a_draw_depends_on_its_own_row_only():
    head = make_head()
    hidden, keys = make_hidden(head, 6), row_keys(6)
    together = low_rank_head.sample(hidden, head, keys)
    alone = low_rank_head.sample(hidden[4:5], head, keys[4:5])
    assert int(together.token[4]) == int(alone.token[0])


def test_noise_is_that_of_jax_random():
    key = jax.random.key(3)
    words = jax.random.key_data(key)
    token = jnp.arange(4096, dtype=jnp.int32)
    ours = noise.gumbel(jnp.broadcast_to(words[0], token.shape), jnp.broadcast_to(words[1], token.shape), token)
    np.testing.assert_allclose(ours, jax.random.gumbel(key, (4096,), jnp.float32), rtol=1e-6, atol=1e-6)


def test_noise_bears_fast_logarithms(monkeypatch):
    """Hardware logarithms err by 2^-22 near 1, where the largest noise comes from: the noise must not."""
    uniform = np.float32(1.0) - np.exp2(-np.arange(1, 24, dtype=np.float32))
    exact = -np.log(uniform.astype(np.float64))

    def worst() -> float:
        # The same perturbation for both signs of the error.
        return max(np.max(np.abs(np.asarray(fast(sign), np.float64) / exact - 1.0)) for sign in (1.0, -1.0))

    def fast(sign: float) -> jax.Array:
        log = jnp.log
        with monkeypatch.context() as patch:
            patch.setattr(noise.jnp, "log", lambda x: log(x) + jnp.float32(sign * 2.0**-22))
            return noise._minus_log(jnp.asarray(uniform))

    assert worst() < 3e-6
    monkeypatch.setattr(noise, "_SERIES_BELOW", np.float32(0.0))
    assert worst() > 0.5


def test_candidates_of_blocks_keep_the_order_of_equal_logits():
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.integers(0, 9, (3, 2000)), jnp.float32)
    token, value = top_of_blocks(logits, 7)
    expected = jnp.argsort(-logits, axis=-1, stable=True)[:, :7]
    np.testing.assert_array_equal(token, expected)
    np.testing.assert_array_equal(value, jnp.take_along_axis(logits, expected, axis=-1))


def test_prepared_weights_are_whole_tiles_of_zeros_and_tokens():
    up = jnp.ones((40, 300), jnp.float32)
    head = low_rank_head.prepare_weights({"down": jnp.ones((96, 40), jnp.float32), "up": up})
    assert head.rows.shape == (384, 48)
    assert head.down is not None
    assert head.down.shape == (128, 48)
    assert float(head.rows.sum()) == 40 * 300
    assert (head.hidden_size, head.vocab_size, head.num_valid_tokens) == (96, 300, 300)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_states_are_rounded_between_the_products(implementation):
    # Integers: everything but the rounding is exact, in any order. XLA may leave out a rounding that is written as a
    # conversion there and back.
    rng = np.random.default_rng(5)
    hidden, down, up = (rng.integers(-4, 5, shape) for shape in ((3, 1100), (1100, 512), (512, 200)))
    head = low_rank_head.prepare_weights({"down": jnp.asarray(down, jnp.bfloat16), "up": jnp.asarray(up, jnp.bfloat16)})
    logits = low_rank_head.logits(jnp.asarray(hidden, jnp.bfloat16), head, implementation=implementation)
    states = np.asarray(jnp.asarray(hidden @ down, jnp.bfloat16), np.float64)
    assert (states != hidden @ down).any()
    np.testing.assert_array_equal(logits, states @ up)


@pytest.mark.parametrize(
    ("hidden_size", "parts"), [(2880, (15, 192)), (4096, (16, 256)), (96, (2, 64)), (1100, (9, 128)), (5376, (14, 384))]
)
def test_the_depth_is_cut_into_equal_parts(hidden_size, parts):
    assert depth_parts(hidden_size) == parts


def test_named_shapes_weigh_what_the_paper_says():
    assert shapes.LLAMA_8B.weight_bytes() == 2 * 512 * (4096 + 128256)
    assert round(shapes.LLAMA_8B.weight_bytes() / shapes.LLAMA_8B.full.weight_bytes(), 3) == 0.129


@pytest.mark.slow
def test_a_whole_vocabulary_gives_the_reference_values():
    head = make_head(vocab_size=128256, hidden_size=512, rank=64, num_valid=128000)
    hidden = make_hidden(head, 2)
    check_greedy(low_rank_head.greedy(hidden, head, implementation="interpret"), hidden, head)
    draw = low_rank_head.sample(hidden, head, row_keys(2), temperature=temperatures(2), implementation="interpret")
    check_sample(draw, hidden, head)
