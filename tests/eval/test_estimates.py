"""Ratios of sums, their intervals and repetition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.estimates import (
    bootstrap_rate_ratio,
    interval_json,
    mean_of_ratios,
    ratio_of_sums,
    repeated_ngram_share,
)


def test_case_e4_speed_is_a_ratio_of_sums_and_the_mean_of_rates_is_another_number() -> None:
    tokens, seconds = [100.0, 100.0], [1.0, 10.0]
    assert ratio_of_sums(tokens, seconds) == pytest.approx(18.18, abs=0.005)
    assert mean_of_ratios(tokens, seconds) == pytest.approx(55.0)


def test_case_e4_an_empty_answer_adds_nothing() -> None:
    assert ratio_of_sums([100.0, 0.0], [1.0, 0.0]) == pytest.approx(100.0)
    assert mean_of_ratios([100.0, 0.0], [1.0, 0.0]) == pytest.approx(100.0)
    assert math.isnan(ratio_of_sums([0.0], [0.0]))


def test_case_e4_speed_up_is_a_ratio_of_sums_too() -> None:
    # The plain system needs 1 s and 10 s for 100 tokens each, the other one 1 s for both.
    estimate = bootstrap_rate_ratio([100, 100], [1.0, 1.0], [100, 100], [1.0, 10.0])
    assert estimate.value == pytest.approx(11.0 / 2.0)
    assert estimate.low < estimate.value < estimate.high


def test_pairs_stay_together_in_the_bootstrap() -> None:
    # Prompts differ hundredfold in speed, yet each is exactly twice as fast: the interval must not see the spread.
    plain = [1.0, 10.0, 100.0, 3.0]
    estimate = bootstrap_rate_ratio([8] * 4, [seconds / 2 for seconds in plain], [8] * 4, plain)
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((2.0, 2.0, 2.0))


def test_interval_has_about_its_nominal_coverage() -> None:
    # 300 experiments of 40 prompts with true ratio 2; a percentile interval covers a little less than 95 %.
    # Below 265 hits means coverage under 0.88: with 0.93 the chance of that is about 4e-4 for a fresh seed;
    # this seed is fixed, so the test is deterministic.
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        seconds = rng.gamma(4.0, 0.25, 40)
        own = seconds / 2.0 * rng.lognormal(-0.02, 0.2, 40)
        tokens = [10] * 40
        estimate = bootstrap_rate_ratio(tokens, own.tolist(), tokens, seconds.tolist(), num_resamples=400)
        hits += estimate.low <= 2.0 <= estimate.high
    assert hits >= 265


def test_nothing_measured_gives_no_number_in_json() -> None:
    assert interval_json(bootstrap_rate_ratio([], [], [], [])) == {"value": None, "low": None, "high": None}
    assert interval_json(bootstrap_rate_ratio([0], [0.0], [0], [0.0]))["value"] is None


def test_faulty_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`level` must be in"):
        bootstrap_rate_ratio([1], [1.0], [1], [1.0], level=1.0)
    with pytest.raises(ValueError, match="one entry a unit"):
        bootstrap_rate_ratio([1], [1.0], [1, 2], [1.0, 2.0])


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([], 0.0), ([1, 2, 3], 0.0), ([1, 2, 3, 4], 0.0), ([1] * 8, 0.8), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)],
)
def test_repeated_4gram_share(tokens: list[int], share: float) -> None:
    assert repeated_ngram_share(tokens) == pytest.approx(share)
