"""Pearson's chi-squared test of counts against an exact law, with a stated false-alarm rate."""

from __future__ import annotations

import dataclasses

import numpy as np
from jax.scipy import special
from jaxtyping import Float, Int

SMALLEST_EXPECTED = 5.0


@dataclasses.dataclass(frozen=True)
class ChiSquaredResult:
    """Outcome of a test.

    Attributes:
        statistic: sum of (observed - expected)^2 / expected over the merged bins.
        degrees: degrees of freedom, merged bins - 1.
        p_value: probability of a statistic at least this large if the law is right.
        num_draws: sample size.
    """

    statistic: float
    degrees: int
    p_value: float
    num_draws: int


def chi_squared_test(
    counts: Int[np.ndarray, "*cells"], law: Float[np.ndarray, "*cells"], *, smallest_expected: float = SMALLEST_EXPECTED
) -> ChiSquaredResult:
    """Tests counts of independent draws against a law.

    Cells are merged in ascending order of probability until each bin expects at least `smallest_expected`
    draws: the law alone decides the bins, so the test keeps its level. A draw from a cell of probability
    zero makes the p-value 0.

    Args:
        counts: how often each cell was drawn.
        law: probability of each cell; sums to 1 up to rounding.
        smallest_expected: expected draws that a bin needs for the approximation to hold.

    Returns:
        The result. Without two bins nothing can be tested: the p-value is 1 (0 for an impossible draw).

    Raises:
        ValueError: if the shapes differ, a value is negative, or the law does not sum to 1.
    """
    counts, law = np.asarray(counts), np.asarray(law, np.float64)
    if counts.shape != law.shape:
        raise ValueError(f"`law` must have the shape of `counts`, {counts.shape}; got {law.shape}")
    if counts.min() < 0 or law.min() < 0:
        raise ValueError(f"`counts` and `law` must be at least 0; got {counts.min()} and {law.min()}")
    if abs(law.sum() - 1) > 1e-4:
        raise ValueError(f"`law` must sum to 1; got {law.sum()}")
    num_draws = int(counts.sum())
    possible = law.ravel() > 0
    if counts.ravel()[~possible].any():
        return ChiSquaredResult(float("inf"), 0, 0.0, num_draws)
    observed, expected = _merge(
        counts.ravel()[possible], law.ravel()[possible] / law.sum(), num_draws, smallest_expected
    )
    degrees = len(expected) - 1
    if degrees < 1:
        return ChiSquaredResult(0.0, 0, 1.0, num_draws)
    statistic = float(np.sum((observed - expected) ** 2 / expected))
    p_value = float(special.gammaincc(np.float32(degrees / 2), np.float32(statistic / 2)))
    return ChiSquaredResult(statistic, degrees, p_value, num_draws)


def two_sample_test(
    first: Int[np.ndarray, "*cells"], second: Int[np.ndarray, "*cells"], *, smallest_expected: float = SMALLEST_EXPECTED
) -> ChiSquaredResult:
    """Tests whether two sets of counts come from one law, whatever it is.

    Given how often each cell was drawn in both sets together, the split between them is known if the laws are equal.
    Cells are merged in ascending order of those sums until each bin expects at least `smallest_expected` draws from
    the smaller set.

    Args:
        first: how often each cell was drawn in one set.
        second: the same in the other set, independent of the first.
        smallest_expected: expected draws that a bin needs in each set.

    Returns:
        The result; `num_draws` is that of both sets. Without two bins the p-value is 1.

    Raises:
        ValueError: if the shapes differ, a count is negative or a set is empty.
    """
    first, second = np.asarray(first), np.asarray(second)
    if first.shape != second.shape:
        raise ValueError(f"`second` must have the shape of `first`, {first.shape}; got {second.shape}")
    if first.min() < 0 or second.min() < 0:
        raise ValueError(f"counts must be at least 0; got {min(first.min(), second.min())}")
    sizes = float(first.sum()), float(second.sum())
    if min(sizes) <= 0:
        raise ValueError(f"both sets must have at least one draw; got {sizes[0]:g} and {sizes[1]:g}")
    together = (first + second).ravel()
    seen = together > 0
    share = sizes[0] / sum(sizes)
    # What the smaller set must expect, in draws of the first one.
    smallest = smallest_expected * max(1.0, sizes[0] / sizes[1])
    observed, expected = _merge(first.ravel()[seen], together[seen] / together.sum(), int(sizes[0]), smallest)
    degrees = len(expected) - 1
    if degrees < 1:
        return ChiSquaredResult(0.0, 0, 1.0, int(sum(sizes)))
    # The second set deviates by as much the other way, so that both terms of a bin have one numerator.
    statistic = float(np.sum((observed - expected) ** 2 / expected) / (1 - share))
    p_value = float(special.gammaincc(np.float32(degrees / 2), np.float32(statistic / 2)))
    return ChiSquaredResult(statistic, degrees, p_value, int(sum(sizes)))


def assert_same_law(
    first: Int[np.ndarray, "*cells"], second: Int[np.ndarray, "*cells"], *, false_alarm: float = 1e-6
) -> None:
    """Fails a test if two sets of counts come from different laws.

    Args:
        first: how often each cell was drawn in one set.
        second: the same in the other set.
        false_alarm: probability that draws from one law fail.

    Raises:
        AssertionError: if the p-value is below `false_alarm`.
    """
    result = two_sample_test(first, second)
    if result.p_value < false_alarm:
        raise AssertionError(f"the draws come from different laws (false alarms: {false_alarm:g}): {result}")


def assert_follows_law(
    counts: Int[np.ndarray, "*cells"], law: Float[np.ndarray, "*cells"], *, false_alarm: float = 1e-6
) -> None:
    """Fails a test if counts contradict a law.

    Args:
        counts: how often each cell was drawn.
        law: probability of each cell.
        false_alarm: probability that right draws fail.

    Raises:
        AssertionError: if the p-value is below `false_alarm`.
    """
    result = chi_squared_test(counts, law)
    if result.p_value < false_alarm:
        raise AssertionError(f"the draws do not follow the law (false alarms: {false_alarm:g}): {result}")


def _merge(
    counts: np.ndarray, law: np.ndarray, num_draws: int, smallest_expected: float
) -> tuple[np.ndarray, np.ndarray]:
    observed: list[float] = []
    expected: list[float] = []
    open_observed = open_expected = 0.0
    for cell in np.argsort(law, kind="stable"):
        open_observed += float(counts[cell])
        open_expected += float(law[cell]) * num_draws
        if open_expected >= smallest_expected:
            observed.append(open_observed)
            expected.append(open_expected)
            open_observed = open_expected = 0.0
    if open_expected > 0:
        if not expected:
            return np.array([open_observed]), np.array([open_expected])
        observed[-1] += open_observed
        expected[-1] += open_expected
    return np.array(observed), np.array(expected)
