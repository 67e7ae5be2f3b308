"""From step records to acceptance numbers: ratios of sums, with intervals over requests.

Letters and names: a request makes *target calls*; call c verifies `num_drafted` draft tokens, accepts `num_accepted`
of them and commits `num_committed` tokens (accepted ones and one recovered, bonus or plain token). Tokens behind the
end of a text count nowhere; the records leave them out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Float, Int

from specjax.decoding.request import Completion, StepRecord


@dataclasses.dataclass(frozen=True)
class AcceptanceCounts:
    """Sums over target calls; add them to pool requests.

    Attributes:
        num_calls: target calls that decoded (prefills are not among them).
        num_drafting_calls: of these, calls that verified at least one draft token.
        num_drafted: draft tokens verified.
        num_accepted: draft tokens accepted.
        num_committed: tokens committed, bonus and recovered ones included.
        drafted_at: calls whose draft reached position i = 1, 2, ..., L.
        accepted_at: calls that accepted positions 1 to i.
        tried_at: calls whose draft reached position i and that accepted positions 1 to i - 1.
    """

    num_calls: int = 0
    num_drafting_calls: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    tried_at: tuple[int, ...] = ()

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        """Pools two sums."""
        fields = {}
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if isinstance(mine, tuple):
                length = max(len(mine), len(theirs))
                padded = [values + (0,) * (length - len(values)) for values in (mine, theirs)]
                fields[field.name] = tuple(a + b for a, b in zip(*padded, strict=True))
            else:
                fields[field.name] = mine + theirs
        return AcceptanceCounts(**fields)

    @property
    def acceptance_length(self) -> float:
        """tau: committed tokens per target call, bonus included; NaN without calls. 1 is plain decoding."""
        return _ratio(self.num_committed, self.num_calls)

    @property
    def block_efficiency(self) -> float:
        """Tokens per target call: the acceptance length under the name that work on block verification uses."""
        return self.acceptance_length

    @property
    def drafting_acceptance_length(self) -> float:
        """Committed tokens per target call that had a draft; NaN without such calls.

        Equals `acceptance_length` for drafters that always draft. For one that often has nothing to say
        (prompt lookup) it tells how good the drafts are when there is one.
        """
        plain_calls = self.num_calls - self.num_drafting_calls
        return _ratio(self.num_committed - plain_calls, self.num_drafting_calls)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token; NaN without drafts."""
        return _ratio(self.num_accepted, self.num_drafted)

    @property
    def accepted_per_call(self) -> float:
        """Accepted draft tokens per target call, bonus excluded; NaN without calls."""
        return _ratio(self.num_accepted, self.num_calls)

    @property
    def joint_acceptance(self) -> tuple[float, ...]:
        """For each position: how often it and all before it were accepted, among calls that drafted it."""
        return tuple(map(_ratio, self.accepted_at, self.drafted_at))

    @property
    def conditional_acceptance(self) -> tuple[float, ...]:
        """For each position: how often it was accepted where all before it were, among calls that drafted it."""
        return tuple(map(_ratio, self.accepted_at, self.tried_at))


@dataclasses.dataclass(frozen=True)
class Interval:
    """A bootstrap interval.

    Attributes:
        value: the ratio itself.
        low: lower end.
        high: upper end.
        level: coverage, for example 0.95.
    """

    value: float
    low: float
    high: float
    level: float


@dataclasses.dataclass(frozen=True)
class AcceptanceSummary:
    """What to report about one system.

    Attributes:
        counts: pooled over requests; its properties are the pooled ratios.
        acceptance_length: pooled, with its interval over requests.
        mean_request_acceptance_length: mean of the requests' own ratios (short requests weigh as much as
            long ones), for comparison with reports that use it.
        num_requests: requests with at least one target call.
    """

    counts: AcceptanceCounts
    acceptance_length: Interval
    mean_request_acceptance_length: float
    num_requests: int


def count_steps(steps: Iterable[StepRecord]) -> AcceptanceCounts:
    """Sums the records of one request (or of many).

    Args:
        steps: records, one a target call.

    Returns:
        The sums.
    """
    steps = list(steps)
    depth = max((step.num_drafted for step in steps), default=0)
    positions = range(1, depth + 1)
    return AcceptanceCounts(
        num_calls=len(steps),
        num_drafting_calls=sum(step.num_drafted > 0 for step in steps),
        num_drafted=sum(step.num_drafted for step in steps),
        num_accepted=sum(step.num_accepted for step in steps),
        num_committed=sum(step.num_committed for step in steps),
        drafted_at=tuple(sum(step.num_drafted >= i for step in steps) for i in positions),
        accepted_at=tuple(sum(step.num_accepted >= i for step in steps) for i in positions),
        tried_at=tuple(sum(step.num_drafted >= i and step.num_accepted >= i - 1 for step in steps) for i in positions),
    )


def summarise(
    completions: Sequence[Completion], *, level: float = 0.95, num_resamples: int = 2000, seed: int = 0
) -> AcceptanceSummary:
    """Acceptance numbers of a run; requests that failed or made no call are left out.

    Args:
        completions: of one system.
        level: coverage of the interval.
        num_resamples: bootstrap resamples.
        seed: of the bootstrap.

    Returns:
        The summary; its ratios are NaN if there is no call.
    """
    counts = [count_steps(completion.steps) for completion in completions if not completion.failed]
    counts = [count for count in counts if count.num_calls]
    pooled = sum(counts, AcceptanceCounts())
    interval = bootstrap_ratio(
        np.array([count.num_committed for count in counts], np.float64),
        np.array([count.num_calls for count in counts], np.float64),
        level=level,
        num_resamples=num_resamples,
        seed=seed,
    )
    mean = float(np.mean([count.acceptance_length for count in counts])) if counts else float("nan")
    return AcceptanceSummary(pooled, interval, mean, len(counts))


def bootstrap_ratio(
    numerators: Float[np.ndarray, "requests"] | Int[np.ndarray, "requests"],
    denominators: Float[np.ndarray, "requests"] | Int[np.ndarray, "requests"],
    *,
    level: float = 0.95,
    num_resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Ratio of two sums over requests, with its percentile bootstrap interval: requests are resampled whole.

    Args:
        numerators: one a request, for example committed tokens or seconds of the baseline.
        denominators: one a request, for example target calls or seconds.
        level: coverage, in (0, 1).
        num_resamples: resamples, at least 1.
        seed: of the resampling; the same seed gives the same interval.

    Returns:
        The interval; NaN without requests.

    Raises:
        ValueError: if the lengths differ, a denominator is not positive or an argument is out of range.
    """
    numerators, denominators = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    if numerators.shape != denominators.shape:
        raise ValueError(
            f"`denominators` must have the shape of `numerators`, {numerators.shape}; got {denominators.shape}"
        )
    if not 0 < level < 1:
        raise ValueError(f"`level` must be in (0, 1); got {level}")
    if num_resamples < 1:
        raise ValueError(f"`num_resamples` must be at least 1; got {num_resamples}")
    if not numerators.size:
        return Interval(float("nan"), float("nan"), float("nan"), level)
    if not np.all(denominators > 0):
        raise ValueError(f"`denominators` must be positive; got {denominators.min()}")
    generator = np.random.default_rng(seed)
    samples = generator.integers(0, numerators.size, (num_resamples, numerators.size))
    ratios = numerators[samples].sum(axis=1) / denominators[samples].sum(axis=1)
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(numerators.sum() / denominators.sum()), float(low), float(high), level)


def _ratio(numerator: int, denominator: int) -> float:
    return numerator / denominator if denominator else float("nan")
