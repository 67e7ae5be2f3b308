"""Mistakes and what cannot be served: the documented error, or the documented value, on every implementation."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from head_cases import (
    check_extreme_temperatures,
    check_no_token,
    make_head,
    make_hidden,
    row_keys,
    states_of_no_token,
)

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
        (
            {"kernel": (8, 9)},
            {"num_valid_tokens": 10},
            "`num_valid_tokens` must be an integer in [1, vocab_size=9]",
        ),
        (
            {"kernel": (8, 9)},
            {"num_valid_tokens": 0},
            "`num_valid_tokens` must be an integer in [1, vocab_size=9]",
        ),
    ],
)
def test_weights_that_do_not_fit(params, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        low_rank_head.prepare_weights({name: zeros(*shape) for name, shape in params.items()}, **options)


def test_weights_that_are_no_arrays():
    with pytest.raises(ValueError, match="`kernel` must be an array; got list"):
        low_rank_head.prepare_weights({"kernel": [[1.0]]})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="`params` must hold 'down' and 'up', or 'kernel'"):
        low_rank_head.prepare_weights(None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"`num_valid_tokens` must be an integer in \[1, vocab_size=9\]; got 2.5"):
        low_rank_head.prepare_weights(
            {"kernel": zeros(8, 9)},
            num_valid_tokens=2.5,  # pyright: ignore[reportArgumentType]
        )


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
        ({"down": head.down[:, :32]}, "`down` must have shape [128, 48]; got [128, 32]"),
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
        (None, 1.0, "`rng_keys` must be keys made by jax.random.key; got NoneType"),
        (row_keys(2), float("nan"), "`temperature` must be finite and not negative; got nan"),
        (row_keys(2), np.float32(-1.0), "`temperature` must be finite and not negative; got -1.0"),
        (row_keys(2), np.asarray([1.0, np.inf]), "`temperature` must be finite and not negative; got [ 1. inf]"),
        (row_keys(2), "hot", "`temperature` must be a number or [2]; got 'hot'"),
        (row_keys(2), jnp.ones(3, jnp.float32), "`temperature` must be a number or [2]; got shape [3]"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            low_rank_head.sample(hidden, head, keys, temperature=temperature)
    for zero in (0.0, np.float32(0.0), np.asarray([1.0, 0.0])):
        with pytest.raises(ValueError, match=r"`temperature` of a law must be above 0; got 0"):
            low_rank_head.log_law(hidden, head, temperature=zero)


@pytest.mark.parametrize("count", [0, -1, 271, 2.0, True, "3"])
def test_numbers_of_candidates_that_are_not_there(head, count):
    message = f"`count` must be an integer in [1, 270], the number of valid tokens; got {count!r}"
    with pytest.raises(ValueError, match=re.escape(message)):
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


def test_states_that_are_no_arrays(head):
    with pytest.raises(ValueError, match="`hidden` must be an array; got list"):
        low_rank_head.greedy([[0.0] * 96], head)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_rows_without_a_token_have_the_documented_values(implementation):
    draws = low_rank_head.greedy(*states_of_no_token(), implementation=implementation)
    check_no_token(draws)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_temperatures_at_the_ends_of_their_range(implementation):
    head = make_head()
    hidden = make_hidden(head, 5)
    temperature = jnp.asarray([np.nan, -1.0, np.inf, 1e-30, 0.0], jnp.float32)
    draw = low_rank_head.sample(hidden, head, row_keys(5), temperature=temperature, implementation=implementation)
    check_extreme_temperatures(draw, hidden, head)


def test_laws_at_temperatures_that_only_the_device_knows(head):
    law = low_rank_head.log_law(make_hidden(head, 2), head, temperature=jnp.zeros(2, jnp.float32))
    assert not np.isnan(law).any()
    np.testing.assert_allclose(np.exp(law).sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_candidates_of_rows_with_nan_are_valid_tokens(head, implementation):
    # Signs of NaN differ between chips, and negative ones would be ranked below -inf.
    broken = dataclasses.replace(head, rows=head.rows.at[7].set(-jnp.nan))
    token, logit = low_rank_head.top_candidates(make_hidden(head, 2), broken, 3, implementation=implementation)
    assert (np.asarray(token[:, 0]) == 7).all()
    assert np.isnan(logit[:, 0]).all()
    assert np.isfinite(logit[:, 1:]).all()
