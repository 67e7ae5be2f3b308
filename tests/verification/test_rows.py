"""Row functions: ends of the number line, draws in two levels, the curve of raw scores, block weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.testing.chi_squared import assert_follows_law
from specjax.testing.rules_numpy.latent_times import uncapped_time
from specjax.testing.rules_numpy.token_by_token import division_rate
from specjax.verification.block_weights import block_log_weights, last_success_log_law, residual_acceptance
from specjax.verification.delays import latest_start_delays
from specjax.verification.gap_draws import draw_gap_tokens
from specjax.verification.rows import (
    LARGEST_PLAIN_ROW,
    block_size,
    drafted_log_ratio,
    log_one_minus_exp,
    log_positive_part,
    normalise_log_masses,
    positive_part_mass,
    sample_log_law,
    sample_masses,
)
from specjax.verification.sorting import ascending_order
from specjax.verification.spectr import smallest_division
from specjax.verification.start_curve import start_curve

INF = jnp.inf


def test_log_one_minus_exp_is_exact_at_both_ends() -> None:
    values = np.asarray(log_one_minus_exp(jnp.asarray([-INF, 0.0, 1.0, -1e-7, -50.0], jnp.float32)))
    assert values[0] == 0
    assert values[1] == -np.inf
    assert values[2] == -np.inf
    np.testing.assert_allclose(values[3], np.log(1e-7), rtol=1e-6)
    np.testing.assert_allclose(values[4], -np.exp(-50), rtol=1e-5)


def test_drafted_log_ratio_is_never_nan() -> None:
    ratio = drafted_log_ratio(jnp.asarray([-INF, -1.0, -INF]), jnp.asarray([-1.0, -INF, -INF]))
    assert ratio.tolist() == [-np.inf, 99.0, -np.inf]


def test_positive_part_in_logs_equals_the_plain_difference() -> None:
    rng = np.random.default_rng(0)
    q, p = rng.dirichlet(np.ones(9), size=2)
    q[0] = p[1] = 0
    with np.errstate(divide="ignore"):
        found = log_positive_part(jnp.log(jnp.asarray(q, jnp.float32)), jnp.log(jnp.asarray(p, jnp.float32)))
    np.testing.assert_allclose(np.exp(found), np.maximum(q - p, 0), atol=1e-6)
    q_row, p_row = jnp.log(jnp.asarray(q, jnp.float32))[None], jnp.log(jnp.asarray(p, jnp.float32))[None]
    mass = positive_part_mass(jnp.log(jnp.float32(0.5)), q_row, p_row, np.asarray(0), np.asarray(0))
    assert float(mass) == pytest.approx(np.maximum(0.5 * q - p, 0).sum(), abs=1e-6)


def test_an_empty_row_falls_back() -> None:
    fallback = jnp.log(jnp.asarray([0.25, 0.75]))
    assert normalise_log_masses(jnp.full(2, -INF), fallback).tolist() == fallback.tolist()


def test_blocks_cover_every_size() -> None:
    for size in (1, 2, 3, 37, 1024, 49152, 50257, 131072, 151936):
        width = block_size(size)
        assert width >= np.sqrt(size)
        assert width < 2 * np.sqrt(size) + 1


def test_two_level_draws_follow_the_masses() -> None:
    # The key is literal so that the test repeats; a right draw fails with probability 1e-6. 37 is no multiple of 8.
    masses = np.random.default_rng(1).gamma(0.3, size=37)
    masses[[3, 16, 17, 36]] = 0
    keys = jax.random.split(jax.random.key(101), 50_000)
    drawn = jax.jit(jax.vmap(sample_masses, in_axes=(0, None)))(keys, jnp.asarray(masses, jnp.float32))
    assert_follows_law(np.bincount(np.asarray(drawn), minlength=37), masses / masses.sum())


def test_long_rows_are_drawn_in_two_levels_and_short_ones_plainly() -> None:
    # The key is literal so that the test repeats; a right draw fails with probability 1e-6.
    size = LARGEST_PLAIN_ROW + 3
    law = np.zeros(size)
    law[[0, 700, size - 1]] = [0.5, 0.2, 0.3]
    with np.errstate(divide="ignore"):
        log_law = jnp.log(jnp.asarray(law, jnp.float32))
    keys = jax.random.split(jax.random.key(102), 20_000)
    drawn = jax.jit(jax.vmap(sample_log_law, in_axes=(0, None)))(keys, log_law)
    assert_follows_law(np.bincount(np.asarray(drawn), minlength=size), law)


def test_gap_tokens_follow_the_residual_and_draws_are_independent() -> None:
    # The key is literal so that the test repeats; a right draw fails with probability 1e-6.
    rng = np.random.default_rng(2)
    target, draft = rng.dirichlet(np.ones(11), size=(2, 3))
    draft[2] = target[2]
    rows = np.asarray([0, 1, 0, 2], np.int32)
    uses_draft = np.asarray([True, False, True])
    draw = jax.jit(
        jax.vmap(
            lambda key: draw_gap_tokens(
                key,
                jnp.log(jnp.asarray(target, jnp.float32)),
                jnp.log(jnp.asarray(draft, jnp.float32)),
                target_row=np.arange(3),
                uses_draft=uses_draft,
                row_of_draw=rows,
            )
        )
    )
    tokens, has_mass = draw(jax.random.split(jax.random.key(103), 40_000))
    assert np.asarray(has_mass[0]).tolist() == [True, True, False]
    residual = np.maximum(target[0] - draft[0], 0)
    residual /= residual.sum()
    tokens = np.asarray(tokens)
    pairs = np.bincount(tokens[:, 0] * 11 + tokens[:, 2], minlength=121)
    assert_follows_law(pairs.reshape(11, 11), np.outer(residual, residual))
    assert_follows_law(np.bincount(tokens[:, 1], minlength=11), target[1])


@pytest.mark.parametrize("size", [5, 1024, 5003, 70_000])
def test_order_of_long_rows_is_that_of_a_stable_sort(size: int) -> None:
    rng = np.random.default_rng(size)
    wide = np.exp(rng.normal(0, 15, size)).astype(np.float32)
    wide[rng.integers(size, size=size // 4)] = 0
    wide[rng.integers(size, size=size // 4)] = np.inf
    # Many equal values, the bound among them.
    narrow = np.minimum(np.round(rng.exponential(0.5, size), 2), 1).astype(np.float32)
    for values, largest in ((wide, np.inf), (narrow, 1.0), (narrow, np.inf)):
        order = np.asarray(ascending_order(jnp.asarray(values), largest))
        assert (order == np.argsort(values, kind="stable")).all()


def test_scaling_of_acceptance_equals_bisection() -> None:
    rng = np.random.default_rng(5)
    for size, dtype, tolerance in ((4, np.float64, 1e-14), (37, np.float64, 1e-14), (20_000, np.float32, 1e-5)):
        with jax.enable_x64(dtype == np.float64):
            for count in (1, 2, 5):
                p, q = rng.dirichlet(np.full(size, 0.5), size=2)
                expected = division_rate(p, q, count)
                rho, miss = smallest_division(jnp.asarray(q, dtype), jnp.asarray(p, dtype), jnp.asarray(count, dtype))
                assert float(rho) == pytest.approx(expected, rel=tolerance)
                assert 1 - float(miss) == pytest.approx(np.minimum(p, q / expected).sum(), rel=tolerance)


def test_start_curve_equals_quadrature() -> None:
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        for count in (2, 3, 5):
            p, q = rng.dirichlet(np.full(6, 0.5), size=2)
            q[1] = p[2] = 0
            p, q = p / p.sum(), q / q.sum()
            with np.errstate(divide="ignore"):
                curve = start_curve(jnp.log(jnp.asarray(p)), jnp.log(jnp.asarray(q)), count)
            for score in (1e-6, 0.1, 0.4, 0.9):
                assert float(curve.integral(jnp.float64(score))) == pytest.approx(
                    uncapped_time(p, q, count, score), abs=1e-12
                )
            # What the selection accepts never exceeds the target.
            share = np.asarray(curve.share)
            assert (
                share >= 1 - (1 - np.minimum(np.divide(p, q, out=np.full(6, 9.0), where=q > 0), 1)) ** count - 1e-12
            ).all()


@pytest.mark.slow
def test_later_starts_only_raise_what_one_step_accepts() -> None:
    rng = np.random.default_rng(4)
    with jax.enable_x64(True):
        for _ in range(5):
            p, q = (jnp.log(jnp.asarray(law)) for law in rng.dirichlet(np.ones(8), size=2))
            plain = jnp.sum(jnp.exp(q) * start_curve(p, q, 3).share)
            delay, group = latest_start_delays(p, q, 3, jnp.float64(1))
            late = jnp.sum(jnp.exp(q) * start_curve(p, q, 3, delay, group).share)
            assert float(late) >= float(plain) - 1e-9
            assert float(jnp.min(delay)) >= 0


def test_block_weights_are_running_minima() -> None:
    ratio = jnp.log(jnp.asarray([0.5, 4.0, 0.25, 8.0], jnp.float32))
    weights = np.exp(block_log_weights(ratio, jnp.float32(0)))
    np.testing.assert_allclose(weights, [0.5, 1.0, 0.25, 1.0], rtol=1e-6)


def test_residual_acceptance_is_certain_when_nothing_is_missing() -> None:
    accept, reject = residual_acceptance(jnp.asarray([0.0, -1.0, -INF]), jnp.asarray([0.0, 0.0, 0.3]))
    assert accept[0] == 0
    assert reject[0] == -np.inf
    assert accept[1] == -np.inf
    np.testing.assert_allclose(np.exp(accept[2]), 0.3 / 1.3, rtol=1e-6)


def test_last_success_law_sums_to_one_and_skips_missing_trials() -> None:
    accept = jnp.log(jnp.asarray([0.3, 0.6, 0.9], jnp.float32))
    reject = jnp.log(jnp.asarray([0.7, 0.4, 0.1], jnp.float32))
    law = np.exp(last_success_log_law(accept, reject, jnp.asarray([True, True, False])))
    np.testing.assert_allclose(law, [0.7 * 0.4, 0.3 * 0.4, 0.6, 0.0], rtol=1e-6)
