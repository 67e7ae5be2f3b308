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
