"""The best few tokens: the set that `lax.top_k` finds, whatever ties and special values there are; their logits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from specjax.heads.candidates import best_ids, counted_ids, rescored

SPECIAL = np.array([-np.inf, np.inf, np.nan, np.copysign(np.nan, -1), 0.0, -0.0, 1e-45, -1e-45], np.float32)


@functools.cache
def compiled(count):
    return jax.jit(lambda scores: (counted_ids(scores, count), lax.top_k(scores, count)[1]))


def assert_same_set(scores, count):
    counted, expected = compiled(count)(jnp.asarray(scores, jnp.float32))
    np.testing.assert_array_equal(counted, np.sort(expected), err_msg=f"count={count} of {len(scores)}")


@pytest.mark.parametrize(("vocab_size", "count"), [(40, 7), (40, 40), (700, 33)])
def test_counting_finds_the_set_of_top_k(vocab_size, count):
    """Few levels give ties at the threshold, so that which of the equal ones are taken is seen as well."""
    generator = np.random.default_rng(vocab_size + count)
    for levels in (1, 2, 3, 10, 10**6):
        for _ in range(20):
            assert_same_set(generator.integers(0, levels, vocab_size) - levels / 2, count)
    for _ in range(60):
        # Special values make up any share of a row, down to none but one kind of them.
        scores = generator.standard_normal(vocab_size).astype(np.float32)
        kinds = generator.choice(SPECIAL, generator.integers(1, len(SPECIAL) + 1))
        share = generator.choice([0.05, 0.5, 1.0])
        scores = np.where(generator.random(vocab_size) < share, generator.choice(kinds, vocab_size), scores)
        assert_same_set(scores, count)


def test_the_count_of_equal_scores_of_a_large_vocabulary_does_not_overflow():
    """Past 130 560 places, 512 lanes of bytes would not hold the counts."""
    scores = np.zeros(150_000, np.float32)
    assert_same_set(scores, 2048)
    scores[149_000:] = 1
    assert_same_set(scores, 2048)
    np.testing.assert_array_equal(compiled(2048)(jnp.asarray(scores))[0][:1048], np.arange(1048))


def test_case_h1_scores_of_minus_infinity_are_taken_last():
    scores = np.full(60, -np.inf, np.float32)
    scores[[50, 20]] = -3e38, 0
    ids = np.asarray(compiled(5)(jnp.asarray(scores))[0])
    np.testing.assert_array_equal(ids, [0, 1, 2, 20, 50])


def test_leading_axes_and_vmap_give_each_row_its_own_set():
    scores = jnp.asarray(np.random.default_rng(3).integers(0, 50, (2, 3, 1500)), jnp.float32)
    expected = np.sort(lax.top_k(scores, 1100)[1], axis=-1)
    mapped = jax.vmap(jax.vmap(lambda x: best_ids(x, 1100)))
    together, one_by_one = jax.jit(lambda x: (best_ids(x, 1100), mapped(x)))(scores)
    assert together.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(together, axis=-1), expected)
    np.testing.assert_array_equal(np.sort(one_by_one, axis=-1), expected)
    few = best_ids(scores, 5)
    np.testing.assert_array_equal(np.sort(few, axis=-1), np.sort(lax.top_k(scores, 5)[1], axis=-1))


@pytest.mark.parametrize("count", [0, 41])
def test_impossible_counts_are_named(count):
    with pytest.raises(ValueError, match=rf"`count` must be in \[1, 40\]; got {count}"):
        best_ids(jnp.zeros(40), count)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_of_candidates_are_exact_whatever_blocks_they_are_made_in(dtype):
    """Enough candidates for several blocks, the last one not full; few enough that no product over all rows pays."""
    generator = np.random.default_rng(4)
    rows = jnp.asarray(generator.standard_normal((900, 6)), dtype)
    hidden = jnp.asarray(generator.standard_normal((3, 1, 6)), jnp.float32)
    scores = jnp.asarray(generator.standard_normal((3, 1, 900)), jnp.float32)
    logits = np.asarray(jax.jit(rescored, static_argnums=3)(rows, hidden, scores, 290))
    chosen = np.argsort(-np.asarray(scores), axis=-1)[..., :290]
    expected = np.full(logits.shape, -np.inf)
    exact = np.asarray(hidden, np.float64) @ np.asarray(rows, np.float64).T
    np.put_along_axis(expected, chosen, np.take_along_axis(exact, chosen, axis=-1), axis=-1)
    np.testing.assert_allclose(logits, expected, atol=1e-5)


def test_logits_of_candidates_have_gradients_but_their_choice_has_none():
    generator = np.random.default_rng(5)
    rows, hidden = (jnp.asarray(generator.standard_normal(shape), jnp.float32) for shape in ((1500, 4), (1, 4)))
    scores = hidden @ rows.T

    def total(hidden, scores):
        logits = rescored(rows, hidden, scores, 1100)
        return jnp.sum(jnp.where(logits > -jnp.inf, logits, 0))

    to_hidden, to_scores = jax.jit(jax.grad(total, argnums=(0, 1)))(hidden, scores)
    chosen = np.asarray(lax.top_k(scores[0], 1100)[1])
    np.testing.assert_allclose(to_hidden[0], np.asarray(rows)[chosen].sum(0), rtol=1e-5, atol=1e-3)
    np.testing.assert_array_equal(to_scores, 0)
