"""Laws against a sorting reference in float64, the documented order, ties, extremes and bad logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.laws import LawParams, finite_logits, sample_laws, to_log_laws


def law_params(*, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, batch=1) -> LawParams:
    return LawParams(
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.full(batch, top_k, jnp.int32),
        top_p=jnp.full(batch, top_p, jnp.float32),
        min_p=jnp.full(batch, min_p, jnp.float32),
    )


def law_of(logits, **settings) -> np.ndarray:
    """The law of one logit vector, as probabilities."""
    logits = jnp.asarray(logits, jnp.float32)[None]
    return np.exp(np.asarray(jax.jit(to_log_laws)(logits, law_params(**settings))))[0]


def reference_law(logits, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """The documented order, by sorting, in float64."""
    logits = np.asarray(logits, np.float64)
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    probabilities = np.exp((logits - logits.max()) / temperature)
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    if top_k:
        probabilities[order[top_k:]] = 0
        probabilities /= probabilities.sum()
    if top_p < 1:
        before = np.concatenate(([0], np.cumsum(probabilities[order])[:-1]))
        probabilities[order[before >= top_p]] = 0
        probabilities /= probabilities.sum()
    if min_p:
        probabilities[probabilities < min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 37},
    {"top_p": 0.1},
    {"top_p": 0.5},
    {"top_p": 0.99},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 0.7, "top_k": 10, "top_p": 0.8, "min_p": 0.1},
    {"temperature": 1.7, "top_k": 50, "top_p": 0.6, "min_p": 0.02},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("vocab_size", [7, 40, 517])
def test_law_equals_sorting_reference(settings, vocab_size):
    rows = np.random.default_rng(5).normal(size=(6, vocab_size)) * 2
    for logits in rows:
        expected = reference_law(np.float32(logits), **settings)
        actual = law_of(logits, **settings)
        np.testing.assert_array_equal(actual > 0, expected > 0)
        # Relative error of a float32 softmax: a few units of 2**-23 times the largest exponent (about 20 here).
        np.testing.assert_allclose(actual, expected, rtol=2e-5)


def test_rows_and_nodes_have_their_own_settings():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(len(SETTINGS), 3, 50)), jnp.float32)
    columns = {name: [s.get(name, default) for s in SETTINGS] for name, default in DEFAULTS.items()}
    params = LawParams(
        temperature=jnp.asarray(columns["temperature"], jnp.float32),
        top_k=jnp.asarray(columns["top_k"], jnp.int32),
        top_p=jnp.asarray(columns["top_p"], jnp.float32),
        min_p=jnp.asarray(columns["min_p"], jnp.float32),
    )
    together = np.exp(np.asarray(jax.jit(to_log_laws)(logits, params)))
    for row, settings in enumerate(SETTINGS):
        for node in range(3):
            np.testing.assert_allclose(together[row, node], law_of(logits[row, node], **settings), rtol=1e-6)


DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def test_no_nodes_axis_is_needed():
    logits = jnp.asarray([[1.0, 2.0, 3.0]], jnp.float32)
    np.testing.assert_allclose(np.exp(to_log_laws(logits, law_params())), np.asarray(jax.nn.softmax(logits)), rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "settings", "support"),
    [
        ([2.0, 2.0, 1.0], {"temperature": 0.0}, {0}),
        ([1.0, 2.0, 2.0], {"temperature": 0.0}, {1}),
        ([1.0, 2.0, 2.0], {"top_k": 1}, {1}),
        ([2.0, 2.0, 2.0, 2.0], {"top_k": 3}, {0, 1, 2}),
        ([2.0, 2.0, 2.0, 2.0], {"top_p": 0.5}, {0, 1}),
        ([2.0, 2.0, 2.0, 2.0], {"top_p": 0.51}, {0, 1, 2}),
        ([1.0, 3.0, 3.0, 3.0], {"top_k": 2, "top_p": 0.4}, {1}),
        ([0.0, -0.0, -1.0], {"top_k": 1}, {0}),
        ([5.0, -np.inf, 1.0], {"top_k": 3}, {0, 2}),
    ],
)
def test_case_l18_ties_keep_the_lower_index(logits, settings, support):
    assert set(np.flatnonzero(law_of(logits, **settings))) == support


@pytest.mark.parametrize("top_k", [0, 1, 7, 8, 10**6])
def test_case_s8_top_k_out_of_range_is_off_or_clamped(top_k):
    logits = np.random.default_rng(3).normal(size=7)
    expected = reference_law(logits) if top_k != 1 else reference_law(logits, temperature=0)
    np.testing.assert_allclose(law_of(logits, top_k=top_k), expected, rtol=1e-5)


def test_case_l1_truncation_applies_to_target_and_draft_alike():
    target, draft = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]
    np.testing.assert_allclose(law_of(np.log(target), top_k=2), [0.625, 0.375, 0, 0], rtol=1e-5)
    np.testing.assert_allclose(law_of(np.log(draft), top_k=2), [4 / 7, 3 / 7, 0, 0], rtol=1e-5)


def test_case_s6_min_p_keeps_what_is_large_enough():
    target, draft = [0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]
    np.testing.assert_allclose(law_of(np.log(target), min_p=0.3), [10 / 19, 6 / 19, 3 / 19, 0], rtol=1e-5)
    np.testing.assert_allclose(law_of(np.log(draft), min_p=0.3), [4 / 9, 3 / 9, 2 / 9, 0], rtol=1e-5)


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 1e-3, 1e6])
def test_extreme_temperatures_give_laws(temperature):
    law = law_of([10.0, 11.0, -500.0, 10.5], temperature=temperature, top_p=0.999)
    assert np.isfinite(law).all()
    assert law.sum() == pytest.approx(1, abs=1e-6)
    assert law.argmax() == 1


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_case_s10_unusable_logits_give_valid_ids_and_are_flagged(settings):
    nan, inf = np.nan, np.inf
    rows = np.float32(
        [
            [nan, nan, nan, nan],
            [-inf, -inf, -inf, -inf],
            [-inf, -inf, 1.0, -inf],
            [0.0, nan, 3.0, 1.0],
            [0.0, inf, 3.0, 1.0],
            [0.0, 1.0, 3.0, 1.0],
        ]
    )
    batch = len(rows)
    laws = jax.jit(to_log_laws)(jnp.asarray(rows), law_params(**settings, batch=batch))
    assert not np.isnan(np.asarray(laws)).any()
    np.testing.assert_allclose(np.exp(np.asarray(laws)).sum(axis=1), 1, rtol=1e-6)
    tokens = np.asarray(sample_laws(jax.random.split(jax.random.key(0), batch), laws))
    assert ((tokens >= 0) & (tokens < 4)).all()
    assert tokens[2] == 2
    np.testing.assert_array_equal(finite_logits(jnp.asarray(rows)), [False, False, True, False, False, True])


def test_bfloat16_logits_give_float32_laws():
    logits = jnp.asarray([[1.0, 2.0, 4.0]], jnp.bfloat16)
    laws = jax.eval_shape(to_log_laws, logits, law_params(top_p=0.9))
    assert laws.dtype == jnp.float32
