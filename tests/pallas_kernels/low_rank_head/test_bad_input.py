"""Mistakes and what cannot be served: the documented error, or the documented value, on every implementation."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import make_head, make_hidden, row_keys

from pallas_kernels import low_rank_head
from pallas_kernels.low_rank_head.weights import PreparedHead

IMPLEMENTATIONS = [None, "xla", "mosaic_gpu", "interpret"]


@pytest.fixture(scope="module")
def head() -> PreparedHead:
    return make_head()


def zeros(*shape: int, dtype=jnp.bfloat16) -> jax.Array:
    return jnp.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("params", "options", "message"),
    [
        ({"down": (8, 4), "up": (5, 9)}, {}, "`up` must have as many rows as `down` has columns, r=4; got 5"),
        ({"down": (8, 4)}, {}, "`params` must hold 'down' and 'up', or 'kernel'; got ['down']"),
        ({"kernel": (8, 0)}, {}, "`kernel` must be a matrix without empty sides; got shape [8, 0]"),
        ({"down": (8, 0), "up": (0, 9)}, {}, "`down` must be a matrix without empty sides"),
        (
            {"kernel": (8, 9)},
            {"vocab_size": 10},
            "`vocab_size` must be the number of columns of the last matrix, 9; got 10",
        ),
        ({"kernel": (8, 9)}, {"num_valid_tokens": 10}, "`num_valid_tokens` must be in [1, vocab_size=9]; got 10"),
        ({"kernel": (8, 9)}, {"num_valid_tokens": 0}, "`num_valid_tokens` must be in [1, vocab_size=9]; got 0"),
    ],
)
def test_weights_that_do_not_fit(params, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        low_rank_head.prepare_weights({name: zeros(*shape) for name, shape in params.items()}, **options)


def test_weights_of_other_dtypes():
    with pytest.raises(ValueError, match="`kernel` must be bfloat16 or float32; got float16"):
        low_rank_head.prepare_weights({"kernel": zeros(8, 9, dtype=jnp.float16)})
    mixed = {"down": zeros(8, 4), "up": zeros(4, 9, dtype=jnp.float32)}
    with pytest.raises(ValueError, match="`down` and `up` must have one dtype; got bfloat16 and float32"):
        low_rank_head.prepare_weights(mixed)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((0, 96), jnp.float32, "`hidden` must be [batch, d=96] with at least one row; got shape [0, 96]"),
        ((2, 95), jnp.float32, "`hidden` must be [batch, d=96]"),
        ((96,), jnp.float32, "`hidden` must be [batch, d=96]"),
        ((2, 96), jnp.float16, "`hidden` must be bfloat16 or float32; got float16"),
    ],
)
def test_states_that_do_not_fit(head, implementation, shape, dtype, message):
    hidden = zeros(*shape, dtype=dtype)
    for call in (
        lambda: low_rank_head.greedy(hidden, head, implementation=implementation),
        lambda: low_rank_head.logits(hidden, head, implementation=implementation),
        lambda: low_rank_head.top_candidates(hidden, head, 3, implementation=implementation),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_prepared_heads_made_by_hand_are_checked(head):
    hidden = make_hidden(head, 2)
    for changes, message in (
        (
            {"vocab_size": 1000},
            "`rows` must be [V_padded, r], V_padded a multiple of 128 and at least `vocab_size`=1000",
        ),
        ({"rows": head.rows[:, :40]}, "the width of `rows` must be a multiple of 16; got 40"),
        ({"rows": head.rows[:300]}, "`rows` must be [V_padded, r]"),
        ({"down": None}, "without `down`, `rows` must be as wide as the hidden state, 96; got 48"),
        ({"down": head.down[:, :32]}, "`down` must have shape [256, 48]; got [256, 32]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            low_rank_head.greedy(hidden, dataclasses.replace(head, **changes))


def test_sampling_arguments_that_do_not_fit(head):
    hidden = make_hidden(head, 2)
    for keys, temperature, message in (
        (row_keys(3), 1.0, "`rng_keys` must hold one key a row, [2]; got shape [3]"),
        (jnp.zeros(2, jnp.uint32), 1.0, "`rng_keys` must be keys made by jax.random.key; got dtype uint32"),
        (jax.random.split(jax.random.key(0, impl="rbg"), 2), 1.0, "`rng_keys` must be threefry2x32 keys; got rbg"),
        (row_keys(2), -1.0, "`temperature` must be finite and not negative; got -1.0"),
        (row_keys(2), float("nan"), "`temperature` must be finite and not negative; got nan"),
        (row_keys(2), jnp.ones(3, jnp.float32), "`temperature` must be a number or [2]; got shape [3]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            low_rank_head.sample(hidden, head, keys, temperature=temperature)
    with pytest.raises(ValueError, match=r"`temperature` of a law must be above 0; got 0"):
        low_rank_head.log_law(hidden, head, temperature=0.0)


@pytest.mark.parametrize("count", [0, 271])
def test_numbers_of_candidates_that_are_not_there(head, count):
    with pytest.raises(ValueError, match=rf"`count` must be in \[1, 270\], the number of valid tokens; got {count}"):
        low_rank_head.top_candidates(make_hidden(head, 2), head, count)


def test_unknown_implementations(head):
    with pytest.raises(ValueError, match=r"`implementation` must be None or one of .*; got 'triton'"):
        low_rank_head.greedy(make_hidden(head, 2), head, implementation="triton")


def test_what_mosaic_cannot_serve_says_why(head):
    with pytest.raises(NotImplementedError, match=r"low_rank_head.greedy: .*bfloat16 weights only.*got float32"):
        low_rank_head.greedy(make_hidden(head, 2), make_head(dtype=jnp.float32), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="it serves up to 64 rows; got 65"):
        low_rank_head.greedy(make_hidden(head, 65), head, implementation="mosaic_gpu")
    # By platform, both are served all the same.
    assert low_rank_head.greedy(make_hidden(head, 65), head).token.shape == (65,)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_states_that_are_not_finite_give_token_0_and_nan(head, implementation, value):
    hidden = make_hidden(head, 3).at[1].set(value)
    for draw in (
        low_rank_head.greedy(hidden, head, implementation=implementation),
        low_rank_head.sample(hidden, head, row_keys(3), implementation=implementation),
    ):
        assert int(draw.token[1]) == 0
        assert np.isnan(draw.log_prob[1])
        assert np.isnan(draw.logsumexp[1])
        assert np.all(np.isfinite(draw.log_prob[np.asarray([0, 2])]))
