"""Intervals of ratios: what they are for known samples, and how often they miss."""

from __future__ import annotations

import math

import numpy as np
import pytest

from eval.ratio_intervals import difference_interval, ratio_interval


def test_with_equal_denominators_it_is_the_students_interval_of_a_mean() -> None:
    values = [1.0, 2.0, 4.0, 5.0]
    interval = ratio_interval(values, [1] * 4)
    # Two-sided 95 % at 3 degrees of freedom: t = 3.182446.
    reach = 3.182446 * np.std(values, ddof=1) / 2
    assert interval.value == 3.0
    assert interval.high - 3.0 == pytest.approx(reach, rel=1e-6)
    assert 3.0 - interval.low == pytest.approx(reach, rel=1e-6)


def test_the_value_is_a_ratio_of_sums_and_not_a_mean_of_ratios() -> None:
    assert ratio_interval([100, 10], [30, 10]).value == pytest.approx(110 / 40)


def test_what_a_question_brings_to_both_systems_cancels() -> None:
    first = ([10, 40, 20, 30, 50], [10] * 5)
    second = ([12, 42, 22, 32, 52], [10] * 5)
    paired = difference_interval(first, second)
    assert paired.value == pytest.approx(0.2)
    assert paired.high - paired.low < 1e-6
    assert ratio_interval(*first).high - ratio_interval(*first).low > 2


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Ten units with unequal sizes; 90 % intervals of 2,000 samples. Literal seed: 88 % is 3 sigma below."""
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(2000):
        calls = rng.integers(5, 15, 10)
        tokens = calls * 2.5 + rng.normal(size=10) * np.sqrt(calls)
        interval = ratio_interval(tokens.tolist(), calls.tolist(), level=0.9)
        covered += interval.low <= 2.5 <= interval.high
    assert 0.88 < covered / 2000 < 0.93


def test_few_units_say_little() -> None:
    one = ratio_interval([3], [2])
    assert (one.value, one.low, one.high) == (1.5, -math.inf, math.inf)
    assert math.isnan(ratio_interval([], []).value)


def test_faulty_sums_are_refused() -> None:
    with pytest.raises(ValueError, match="`denominators` must have the shape of `numerators`"):
        ratio_interval([1, 2], [1])
    with pytest.raises(ValueError, match="`denominators` must be positive; got 0"):
        ratio_interval([1, 2], [1, 0])
    with pytest.raises(ValueError, match=r"`level` must be in \(0, 1\); got 1.0"):
        ratio_interval([1, 2], [1, 1], level=1.0)
    with pytest.raises(ValueError, match="must have the same units; got 2 and 1"):
        difference_interval(([1, 2], [1, 1]), ([1], [1]))
