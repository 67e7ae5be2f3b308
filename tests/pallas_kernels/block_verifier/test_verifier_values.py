"""Every implementation that runs on CPU against float64, with ragged rows, bad rows, batches and draws."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verifier_examples import (
    Example,
    exact_log_normalisers,
    exact_residuals,
    exact_sums,
    example,
    pairs,
)

from pallas_kernels.block_verifier import Laws, Pairs, draw_residuals, reference, residual_sums, row_statistics
from pallas_kernels.block_verifier.chains import chain_residual_masses, chain_rows, chain_statistics
from pallas_kernels.block_verifier.draws import residual_log_ratio
from specjax.testing.chi_squared import assert_follows_law

RAGGED = 4999  # no multiple of a tile, a group or a lane
WIDTH = 512
# None is "xla" on CPU.
IMPLEMENTATIONS = (None, "interpret")
TOKENS = np.asarray([RAGGED - 1, 17, 2500, 0], np.int32)


@functools.cache
def _passes(implementation: str | None):
    """Both passes in one program."""

    def run(values: Example):
        rows = pairs()
        statistics = row_statistics(
            values.target_logits,
            values.draft_logits,
            jnp.asarray(TOKENS),
            rows.target_row,
            rows.draft_row,
            target_inverse_temperature=values.target_inverse_temperature,
            draft_inverse_temperature=values.draft_inverse_temperature,
            implementation=implementation,
        )
        blocks = residual_sums(statistics.target, statistics.draft, rows, width=WIDTH, implementation=implementation)
        whole = residual_sums(statistics.target, statistics.draft, rows, implementation=implementation)
        return statistics, blocks, whole

    return jax.jit(run)


@pytest.mark.parametrize(("implementation", "dtype"), [(None, "bfloat16"), (None, "float32"), ("interpret", "float32")])
def test_both_passes_equal_float64(implementation: str | None, dtype: str) -> None:
    values = example(RAGGED, dtype)
    statistics, blocks, whole = _passes(implementation)(values)
    for laws, log_probs, row in (
        (statistics.target, statistics.target_log_prob, pairs().target_row),
        (statistics.draft, statistics.draft_log_prob, pairs().draft_row),
    ):
        exact = exact_log_normalisers(laws.logits, laws.inverse_temperature)
        np.testing.assert_allclose(laws.log_normaliser, exact, rtol=0, atol=4e-6)
        logits = np.asarray(laws.logits, np.float64) * np.asarray(laws.inverse_temperature, np.float64)[:, None]
        np.testing.assert_allclose(log_probs, logits[row, TOKENS] - exact[row], rtol=1e-6, atol=4e-6)
    assert blocks.shape == (4, -(-RAGGED // WIDTH))
    np.testing.assert_allclose(blocks, exact_sums(values, WIDTH), rtol=0, atol=2e-6)
    np.testing.assert_allclose(whole[:, 0], exact_sums(values, RAGGED)[:, 0], rtol=0, atol=4e-6)


def test_the_reference_equals_float64() -> None:
    values = example(RAGGED, "float32")
    found = jax.jit(lambda values: reference.residual_sums(*values.laws, pairs(), WIDTH))(values)
    np.testing.assert_allclose(found, exact_sums(values, WIDTH), rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bad_rows_give_the_documented_values(implementation: str | None) -> None:
    values = example(RAGGED, "float32")
    target = values.target_logits.at[0].set(-jnp.inf).at[1, 77].set(jnp.nan)
    for bad in (values._replace(target_logits=target), values._replace(target_logits=target.at[1, 77].set(jnp.inf))):
        statistics, blocks, whole = _passes(implementation)(bad)
        normaliser = np.asarray(statistics.target.log_normaliser)
        assert normaliser[0] == -np.inf
        assert np.isnan(normaliser[1])
        assert np.isfinite(normaliser[2])
        # Pair 1 has the row without mass, pair 3 the broken one; pairs 0 and 2 are not touched.
        assert statistics.target_log_prob[1] == -np.inf
        assert np.isnan(statistics.target_log_prob[3])
        assert (np.asarray(blocks[1]) == 0).all()
        assert whole[1] == 0
        assert np.isnan(whole[3]).all()
        np.testing.assert_allclose(whole[::2, 0], exact_sums(values, RAGGED)[::2, 0], rtol=0, atol=4e-6)


def test_a_batch_of_requests_is_more_rows() -> None:
    implementation = "interpret"
    values = [example(1200, "float32", seed) for seed in range(3)]
    draft = values[0].draft_logits
    tokens = jnp.asarray(np.minimum(TOKENS, 1199))

    def run(target_logits: jax.Array, draft_logits: jax.Array, log_weight: jax.Array):
        rows = pairs()._replace(log_weight=log_weight)
        statistics = row_statistics(
            target_logits, draft_logits, tokens, rows.target_row, rows.draft_row, implementation=implementation
        )
        sums = residual_sums(statistics.target, statistics.draft, rows, width=WIDTH, implementation=implementation)
        return statistics.target.log_normaliser, statistics.draft.log_normaliser, sums

    weights = jnp.asarray(np.random.default_rng(0).uniform(-2, 0, (3, 4)), jnp.float32)
    targets = jnp.stack([value.target_logits for value in values])
    # The draft's rows are shared by all requests.
    batched = jax.jit(jax.vmap(run, in_axes=(0, None, 0)))(targets, draft, weights)
    one = jax.jit(run)
    alone = [one(target, draft, weight) for target, weight in zip(targets, weights, strict=True)]
    for place, found in enumerate(batched):
        expected = np.stack([result[place] for result in alone])
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_chains_are_rows() -> None:
    rng = np.random.default_rng(1)
    target = rng.normal(size=(2, 3, 3, 300)).astype(np.float32)
    draft = rng.normal(size=(2, 3, 2, 300)).astype(np.float32)
    tokens = rng.integers(300, size=(2, 3, 2)).astype(np.int32)
    inverse = np.asarray([0.5, 2.0], np.float32)
    log_weight = rng.uniform(-1, 0, (2, 3, 2)).astype(np.float32)

    @jax.jit
    def run(*arrays: jax.Array):
        statistics = chain_statistics(*arrays, inverse_temperature=jnp.asarray(inverse))
        masses = chain_residual_masses(statistics, jnp.asarray(log_weight))
        return statistics.target_log_prob, statistics.draft_log_prob, masses

    laws = [np.exp(logits * inverse[:, None, None, None]) for logits in (target[:, :, :2], draft)]
    q, p = (law / law.sum(axis=-1, keepdims=True) for law in laws)
    target_log_prob, draft_log_prob, masses = run(target, draft, tokens)
    for found, law in ((target_log_prob, q), (draft_log_prob, p)):
        expected = np.log(np.take_along_axis(law, tokens[..., None], axis=-1)).reshape(-1)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    expected = np.maximum(np.exp(log_weight)[..., None] * q - p, 0).sum(axis=-1)
    np.testing.assert_allclose(masses, expected, rtol=1e-5, atol=1e-6)
    assert chain_rows(2, 1, 2).target_row.tolist() == [0, 1, 3, 4]


def test_draws_follow_the_residual_with_its_ratio() -> None:
    # The key is literal so that the test repeats; a right draw fails with probability 1e-6.
    values = example(37, "float32", seed=3)
    width, num_draws = 8, 60_000
    pair_of_draw = np.zeros(num_draws, np.int32)

    @jax.jit
    def draw(rng_key: jax.Array):
        target, draft = values.laws
        block_key, entry_key = jax.random.split(rng_key)
        draws = draw_residuals(
            residual_sums(target, draft, pairs(), width=width),
            target,
            draft,
            pairs(),
            pair_of_draw=pair_of_draw,
            block_noise=jax.random.gumbel(block_key, (num_draws, 5), jnp.float32),
            entry_noise=jax.random.gumbel(entry_key, (num_draws, width), jnp.float32),
        )
        return draws, residual_log_ratio(target, draft, pairs(), draws, pair_of_draw)

    draws, ratio = draw(jax.random.key(211))
    residual = exact_residuals(values)[0]
    assert_follows_law(np.bincount(np.asarray(draws.token), minlength=37), residual / residual.sum())
    assert np.asarray(draws.has_mass).all()
    # Where w q > p with w = exp(-0.2).
    assert np.asarray(ratio).max() < -0.2


def test_the_row_at_the_stop_is_one_pair() -> None:
    values = example(1200, "float32")

    @jax.jit
    def both(stop: jax.Array) -> tuple[jax.Array, jax.Array]:
        target, draft = values.laws
        log_weight = jnp.full((1,), -0.2, jnp.float32)
        traced = Pairs(stop[None], jnp.minimum(stop, 1)[None], log_weight)
        static = Pairs(np.asarray([2]), np.asarray([1]), log_weight)
        return residual_sums(target, draft, traced, width=WIDTH), residual_sums(target, draft, static, width=WIDTH)

    traced, static = both(jnp.int32(2))
    np.testing.assert_allclose(traced, static, atol=1e-6)


def test_float64_rows_keep_their_precision() -> None:
    with jax.enable_x64(True):
        logits = np.random.default_rng(4).normal(size=(2, 300))
        law = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        rows = np.zeros(1, np.int32)
        sums = jax.jit(lambda q, p: residual_sums(Laws(q), Laws(p), Pairs(rows, rows)))(*np.log(law)[:, None])
        assert sums.dtype == jnp.float64
        np.testing.assert_allclose(sums[0, 0], np.maximum(law[0] - law[1], 0).sum(), rtol=1e-13)
