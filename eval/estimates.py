"""Ratios of measured sums with intervals, and repetition. Intervals of one ratio are in `specjax.metrics`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.metrics import Interval

Numbers = Sequence[int | float]


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


def bootstrap_rate_ratio(
    amounts: Numbers,
    seconds: Numbers,
    other_amounts: Numbers,
    other_seconds: Numbers,
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Ratio of two rates, each a ratio of sums over units, with a percentile bootstrap interval over units.

    A unit (a prompt with all its turns) is drawn with *all* its sums, so that two systems measured on the same prompt
    stay paired and the turns of one conversation stay together.

    Args:
        amounts: what the first system did in each unit, [N].
        seconds: how long it took, [N].
        other_amounts: the same of the second system, [N].
        other_seconds: the same of the second system, [N].
        level: coverage of the interval, in (0, 1).
        num_resamples: resamples.
        seed: of the resampling.

    Returns:
        (amounts / seconds) / (other_amounts / other_seconds), NaN where something is not positive.

    Raises:
        ValueError: if lengths differ or `level` is out of range.
    """
    if not 0.0 < level < 1.0:
        raise ValueError(f"`level` must be in (0, 1); got {level!r}")
    columns = [np.asarray(column, np.float64) for column in (amounts, seconds, other_amounts, other_seconds)]
    if len({column.shape for column in columns}) != 1 or columns[0].ndim != 1:
        raise ValueError(f"all sums must have one entry a unit; got shapes {[column.shape for column in columns]}")
    units = np.stack(columns, axis=-1)
    nan = float("nan")
    if not len(units):
        return Interval(nan, nan, nan, level)
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, len(units), size=(num_resamples, len(units)))
    samples = _rate_ratio(units[chosen].sum(axis=1))
    samples = samples[np.isfinite(samples)]
    value = float(_rate_ratio(units.sum(axis=0, keepdims=True))[0])
    if not len(samples):
        return Interval(value, nan, nan, level)
    tail = (1.0 - level) / 2.0
    low, high = np.quantile(samples, [tail, 1.0 - tail])
    return Interval(value, float(low), float(high), level)


def _rate_ratio(sums: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])


def interval_json(interval: Interval) -> dict[str, float | None]:
    """Plain dict of `value`, `low` and `high`, with null where there is no number (JSON has no NaN)."""
    return {name: finite_or_none(getattr(interval, name)) for name in ("value", "low", "high")}


def finite_or_none(value: int | float) -> float | None:
    """The number, or None for NaN and infinities."""
    return float(value) if np.isfinite(value) else None


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
