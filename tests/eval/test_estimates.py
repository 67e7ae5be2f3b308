"""Ratios of sums, their intervals and repetition."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.estimates import bootstrap_ratio, mean_of_ratios, ratio_of_sums, repeated_ngram_share


def test_case_e4_speed_is_a_ratio_of_sums_and_the_mean_of_rates_is_another_number() -> None:
    tokens, seconds = [100.0, 100.0], [1.0, 10.0]
    assert ratio_of_sums(tokens, seconds) == pytest.approx(18.18, abs=0.005)
    assert mean_of_ratios(tokens, seconds) == pytest.approx(55.0)


def test_case_e4_an_empty_answer_adds_nothing() -> None:
    assert ratio_of_sums([100.0, 0.0], [1.0, 0.0]) == pytest.approx(100.0)
    assert mean_of_ratios([100.0, 0.0], [1.0, 0.0]) == pytest.approx(100.0)
    assert math.isnan(ratio_of_sums([0.0], [0.0]))


def test_interval_covers_the_ratio_and_has_no_width_for_equal_units() -> None:
    estimate = bootstrap_ratio([2.0] * 5, [1.0] * 5)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)
    estimate = bootstrap_ratio([1.0, 2.0, 3.0, 4.0], [1.0] * 4)
    assert estimate.low < estimate.value == 2.5 < estimate.high


def test_pairs_stay_together_in_the_bootstrap_of_two_ratios() -> None:
    # Prompts differ hundredfold in speed, yet each is exactly twice as fast: the interval must not see the spread.
    plain = [1.0, 10.0, 100.0, 3.0]
    estimate = bootstrap_ratio(
        [8.0] * 4,
        [seconds / 2 for seconds in plain],
        other_numerators=[8.0] * 4,
        other_denominators=plain,
    )
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((2.0, 2.0, 2.0))


def test_interval_has_about_its_nominal_coverage() -> None:
    # 300 experiments of 40 prompts with true ratio 2; a percentile interval covers a little less than 95 %.
    # Below 265 hits means coverage under 0.88: with 0.93 the chance of that is about 4e-4 for a fresh seed;
    # this seed is fixed, so the test is deterministic.
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(300):
        seconds = rng.gamma(4.0, 0.25, 40)
        tokens = seconds * 2.0 * rng.lognormal(-0.02, 0.2, 40)
        estimate = bootstrap_ratio(tokens.tolist(), seconds.tolist(), num_samples=400)
        hits += estimate.low <= 2.0 <= estimate.high
    assert hits >= 265


def test_no_units_give_no_number_in_json() -> None:
    assert bootstrap_ratio([], []).to_json() == {"value": None, "low": None, "high": None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"confidence": 1.0}, "`confidence` must be in"),
        ({"other_numerators": [1.0]}, "given together"),
        ({"other_numerators": [1.0, 2.0], "other_denominators": [1.0, 2.0]}, "one entry a unit"),
    ],
)
def test_faulty_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_ratio([1.0], [1.0], **arguments)


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([], 0.0), ([1, 2, 3], 0.0), ([1, 2, 3, 4], 0.0), ([1] * 8, 0.8), ([1, 2, 3, 4, 1, 2, 3, 4], 0.2)],
)
def test_repeated_4gram_share(tokens: list[int], share: float) -> None:
    assert repeated_ngram_share(tokens) == pytest.approx(share)
