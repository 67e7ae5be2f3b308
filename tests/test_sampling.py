"""The tie rule of the argmax and the law of draws, for vocabularies that blocks divide and do not divide."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import lowest_argmax, sample_law, sample_laws
from specjax.testing.chi_squared import assert_follows_law


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 16, 60, 101, 500, 1024])
def test_lowest_argmax_equals_numpy(vocab_size):
    # Few distinct values: nearly every row has ties.
    values = np.random.default_rng(0).integers(0, 3, (2, 50, vocab_size)).astype(np.float32)
    values[0, 0] = -np.inf
    np.testing.assert_array_equal(jax.jit(lowest_argmax)(values), values.argmax(axis=-1))


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 16, 100])
def test_draws_follow_the_law(vocab_size):
    # Literal key: a statistical test must not change its verdict from run to run. 40,000 draws see a wrong
    # probability of 0.1 by 0.01 with more than 6 sigma; false alarms 1e-6.
    rng_key = jax.random.key(7)
    weights = np.random.default_rng(vocab_size).exponential(size=vocab_size) ** 2
    weights[1::3] = 0
    law = weights / weights.sum()
    with np.errstate(divide="ignore"):
        log_law = jnp.asarray(np.log(law), jnp.float32)
    draws = jax.jit(jax.vmap(sample_law, in_axes=(0, None)))(jax.random.split(rng_key, 40_000), log_law)
    assert_follows_law(np.bincount(np.asarray(draws), minlength=vocab_size), law)


def test_draws_of_a_batch_are_those_of_its_rows():
    laws = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (5, 30)))
    keys = jax.random.split(jax.random.key(1), 5)
    draw = jax.jit(sample_law)
    alone = [draw(key, law) for key, law in zip(keys, laws, strict=True)]
    np.testing.assert_array_equal(jax.jit(sample_laws)(keys, laws), np.asarray(alone))


def test_nearly_impossible_tokens_are_drawn_as_seldom_as_they_should():
    """A rare block must not get the noise of a common one: 2e-4 of 200,000 draws is 40, 0.2 to 4 times that is sure."""
    law = np.full(64, 1e-4 / 31)
    law[:32] = (1 - 2e-4) / 32
    law[63] = 1e-4
    law /= law.sum()
    keys = jax.random.split(jax.random.key(3), 200_000)
    draws = jax.jit(jax.vmap(sample_law, in_axes=(0, None)))(keys, jnp.asarray(np.log(law), jnp.float32))
    rare = int((np.asarray(draws) >= 32).sum())
    assert 8 < rare < 160
