"""Student-t intervals of ratios of sums, and of differences of two such ratios, with questions as units.

A ratio sum(t) / sum(n) is linear in its units up to second order: unit i contributes (t_i - r n_i) / mean(n). The
standard error of the mean of these terms, with a t quantile of N - 1 degrees, is what a dozen questions support; a
percentile bootstrap of so few units is too narrow, and cannot reach the small levels that many comparisons need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit  # SciPy comes with JAX

from specjax.metrics import Interval

Numbers = Sequence[int | float]


def ratio_interval(numerators: Numbers, denominators: Numbers, *, level: float = 0.95) -> Interval:
    """sum(numerators) / sum(denominators) with a two-sided interval; unbounded for a single unit.

    Args:
        numerators: one a unit, [N].
        denominators: one a unit, [N]; positive.
        level: coverage, in (0, 1).

    Returns:
        The interval; NaN without units.

    Raises:
        ValueError: if the lengths differ, a denominator is not positive or `level` is out of range.
    """
    ratio, terms = _linear_terms(numerators, denominators)
    return _interval(ratio, terms, level)


def difference_interval(
    first: tuple[Numbers, Numbers], second: tuple[Numbers, Numbers], *, level: float = 0.95
) -> Interval:
    """The second ratio minus the first, measured on the same units.

    Args:
        first: numerators and denominators of one system, [N] each.
        second: those of the other, [N] each, the units in the same order.
        level: coverage, in (0, 1).

    Returns:
        The interval, with each unit's two contributions subtracted, so that easy and hard questions cancel.

    Raises:
        ValueError: as `ratio_interval`.
    """
    if len(first[0]) != len(second[0]):
        raise ValueError(f"both systems must have the same units; got {len(first[0])} and {len(second[0])}")
    first_ratio, first_terms = _linear_terms(*first)
    second_ratio, second_terms = _linear_terms(*second)
    return _interval(second_ratio - first_ratio, second_terms - first_terms, level)


def _linear_terms(numerators: Numbers, denominators: Numbers) -> tuple[float, np.ndarray]:
    top, bottom = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if top.shape != bottom.shape:
        raise ValueError(f"`denominators` must have the shape of `numerators`, {top.shape}; got {bottom.shape}")
    if not np.all(bottom > 0):
        raise ValueError(f"`denominators` must be positive; got {bottom.min()}")
    if not len(top):
        return float("nan"), top
    ratio = float(top.sum() / bottom.sum())
    return ratio, (top - ratio * bottom) / bottom.mean()


def _interval(value: float, terms: np.ndarray, level: float) -> Interval:
    if not 0 < level < 1:
        raise ValueError(f"`level` must be in (0, 1); got {level}")
    num_units = len(terms)
    if not num_units:
        return Interval(value, value, value, level)
    if num_units == 1:
        return Interval(value, -math.inf, math.inf, level)
    error = float(np.std(terms, ddof=1)) / math.sqrt(num_units)
    reach = float(stdtrit(num_units - 1, (1 + level) / 2)) * error
    return Interval(value, value - reach, value + reach, level)
