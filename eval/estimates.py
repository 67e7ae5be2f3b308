"""Ratios of sums with bootstrap intervals, and other small statistics of measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

Numbers = Sequence[int | float]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its percentile bootstrap interval.

    Attributes:
        value: the estimate from all units; NaN when nothing was measured.
        low: lower end of the interval.
        high: upper end of the interval.
    """

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float | None]:
        """Plain dict, with null where there is no number (JSON has no NaN)."""
        return {name: _finite_or_none(getattr(self, name)) for name in ("value", "low", "high")}


def _finite_or_none(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def ratio_of_sums(numerators: Numbers, denominators: Numbers) -> float:
    """sum(numerators) / sum(denominators); NaN when the denominators sum to 0.

    A mean of ratios would weigh a ten-token answer like a thousand-token one, and pays for an empty one.
    """
    bottom = float(np.sum(np.asarray(denominators, np.float64)))
    return float(np.sum(np.asarray(numerators, np.float64))) / bottom if bottom > 0.0 else float("nan")


def mean_of_ratios(numerators: Numbers, denominators: Numbers) -> float:
    """Unweighted mean of the units' own ratios; units with denominator 0 have none and are left out."""
    top = np.asarray(numerators, np.float64)
    bottom = np.asarray(denominators, np.float64)
    kept = bottom > 0.0
    return float(np.mean(top[kept] / bottom[kept])) if kept.any() else float("nan")


def bootstrap_ratio(
    numerators: Numbers,
    denominators: Numbers,
    *,
    other_numerators: Numbers | None = None,
    other_denominators: Numbers | None = None,
    confidence: float = 0.95,
    num_samples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Ratio of sums, or ratio of two such ratios, with a percentile bootstrap interval over units.

    A unit (a prompt with all its turns) is drawn with *all* its sums, so that systems measured on the same prompt
    stay paired and the turns of one conversation stay together.

    Args:
        numerators: one sum a unit, [N].
        denominators: one sum a unit, [N].
        other_numerators: of the ratio to divide by, [N]; None divides by nothing.
        other_denominators: of the ratio to divide by, [N].
        confidence: coverage of the interval, in (0, 1).
        num_samples: resamples.
        seed: of the resampling.

    Raises:
        ValueError: if lengths differ, only one half of the other ratio is given, or `confidence` is out of range.
    """
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"`confidence` must be in (0, 1); got {confidence!r}")
    if (other_numerators is None) != (other_denominators is None):
        raise ValueError("`other_numerators` and `other_denominators` must be given together")
    columns = [np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)]
    if other_numerators is not None and other_denominators is not None:
        columns += [np.asarray(other_numerators, np.float64), np.asarray(other_denominators, np.float64)]
    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
        raise ValueError(f"all sums must have one entry a unit; got shapes {[column.shape for column in columns]}")
    units = np.stack(columns, axis=-1)
    if not len(units):
        return Estimate(float("nan"), float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(units), size=(num_samples, len(units)))
    samples = _ratio(units[chosen].sum(axis=1))
    samples = samples[np.isfinite(samples)]
    value = float(_ratio(units.sum(axis=0, keepdims=True))[0])
    if not len(samples):
        return Estimate(value, float("nan"), float("nan"))
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return Estimate(value, float(low), float(high))


def _ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = sums[..., 0] / sums[..., 1]
        return ratio if sums.shape[-1] == 2 else ratio / (sums[..., 2] / sums[..., 3])


def repeated_ngram_share(token_ids: Sequence[int], n: int = 4) -> float:
    """Share of n-grams that occurred before in the same text; 0 for texts with fewer than n tokens.

    Looping text flatters every drafter and prompt lookup most, so that tau is only comparable beside this number.
    """
    if n < 1:
        raise ValueError(f"`n` must be at least 1; got {n}")
    total = len(token_ids) - n + 1
    if total < 1:
        return 0.0
    distinct = {tuple(token_ids[start : start + n]) for start in range(total)}
    return 1.0 - len(distinct) / total
