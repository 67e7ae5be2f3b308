"""Factors of a dense head: optimal, balanced, indifferent to what a softmax cannot see."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.heads import HeadSource, activation_aware_factors, svd_factors
from specjax.heads.factorise import frequency_weights, start_factors


@pytest.fixture
def weight():
    generator = np.random.default_rng(3)
    return generator.standard_normal((12, 200)) * np.geomspace(1.0, 0.05, 12)[:, None] + 0.3


@pytest.fixture
def hidden():
    generator = np.random.default_rng(4)
    return generator.standard_normal((500, 12)) @ (generator.standard_normal((12, 12)) * np.geomspace(3.0, 0.1, 12))


def _centred(logits):
    return logits - logits.mean(axis=-1, keepdims=True)


@pytest.mark.parametrize("rank", [1, 5, 12])
def test_svd_factors_are_the_best_of_their_rank(weight, rank):
    down, up = svd_factors(weight, rank, centre=False)
    singular = np.linalg.svd(weight, compute_uv=False)
    error = np.linalg.norm(weight - down.astype(np.float64) @ up)
    assert error == pytest.approx(np.sqrt(np.sum(singular[rank:] ** 2)), rel=1e-5, abs=1e-5)


def test_factors_carry_equal_scales(weight):
    down, up = svd_factors(weight, 6)
    np.testing.assert_allclose(np.linalg.norm(down, axis=0), np.linalg.norm(up, axis=1), rtol=1e-4)


@pytest.mark.parametrize("rank", [2, 6])
def test_activation_aware_factors_minimise_the_expected_logit_error(weight, hidden, rank):
    covariance = hidden.T @ hidden / len(hidden)
    down, up = activation_aware_factors(weight, covariance, rank, centre=False)
    error = np.linalg.norm(hidden @ weight - hidden @ down.astype(np.float64) @ up)
    # No matrix of that rank comes closer to the logits than their own truncated decomposition.
    singular = np.linalg.svd(hidden @ weight, compute_uv=False)
    assert error == pytest.approx(np.sqrt(np.sum(singular[rank:] ** 2)), rel=1e-3)
    plain_down, plain_up = svd_factors(weight, rank, centre=False)
    assert error < np.linalg.norm(hidden @ weight - hidden @ plain_down @ plain_up)


def test_centring_spends_no_rank_on_a_shift_of_all_logits(weight, hidden):
    covariance = hidden.T @ hidden / len(hidden)
    errors = {}
    for centre in (False, True):
        down, up = activation_aware_factors(weight, covariance, 3, centre=centre)
        errors[centre] = np.linalg.norm(_centred(hidden @ weight) - _centred(hidden @ down @ up))
    assert errors[True] < errors[False]


def test_full_rank_keeps_every_law(weight, hidden):
    covariance = hidden.T @ hidden / len(hidden)
    down, up = activation_aware_factors(weight, covariance, 12)
    np.testing.assert_allclose(_centred(hidden @ down @ up), _centred(hidden @ weight), atol=2e-4)


def test_token_weights_move_the_error_to_the_tokens_without_weight(weight, hidden):
    covariance = hidden.T @ hidden / len(hidden)
    importance = np.where(np.arange(200) < 20, 100.0, 1.0)
    errors = {}
    for name, weights in (("flat", None), ("weighted", importance)):
        down, up = activation_aware_factors(weight, covariance, 3, centre=False, token_weights=weights)
        errors[name] = np.linalg.norm((hidden @ weight - hidden @ down @ up)[:, :20])
    assert errors["weighted"] < errors["flat"]


def test_frequency_weighted_svd_serves_frequent_tokens_first(weight):
    counts = np.zeros(200, np.int64)
    counts[:20] = 1000
    np.testing.assert_allclose(frequency_weights(counts)[[0, 50]], [1000 / 100 + 10, 10])
    errors = {}
    for name, weights in (("flat", None), ("frequent", frequency_weights(counts, smoothing=0.1))):
        down, up = svd_factors(weight, 4, centre=False, token_weights=weights)
        errors[name] = np.linalg.norm((weight - down @ up)[:, :20])
    assert errors["frequent"] < errors["flat"]
    source = HeadSource(method="frequency_svd", answer_counts=counts)
    expected = svd_factors(weight, 4, token_weights=frequency_weights(counts))
    for ours, theirs in zip(start_factors(source, weight, 4), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    with pytest.raises(ValueError, match=r"`smoothing` must not be negative and `counts` not empty; got 10.0, 0"):
        frequency_weights(np.zeros(3, np.int64))


def test_a_head_of_lower_rank_and_unseen_directions_stay_finite(weight):
    low = weight[:, :3] @ weight[:3, :]
    covariance = np.diag([1.0] * 4 + [0.0] * 8)
    for factors in (svd_factors(low, 8), activation_aware_factors(low, covariance, 8), svd_factors(low * 0.0, 2)):
        assert all(np.all(np.isfinite(factor)) for factor in factors)


def test_bad_arguments_are_named(weight):
    with pytest.raises(ValueError, match=r"`rank` must be in \[1, 12\]; got 13"):
        svd_factors(weight, 13)
    with pytest.raises(ValueError, match=r"`covariance` must have shape \[12, 12\]; got \[3, 3\]"):
        activation_aware_factors(weight, np.eye(3), 2)
    with pytest.raises(ValueError, match="`covariance` must be finite"):
        activation_aware_factors(weight, np.full((12, 12), np.nan), 2)
    with pytest.raises(ValueError, match="`token_weights` must be 200 values"):
        activation_aware_factors(weight, np.eye(12), 2, token_weights=np.ones(3))
