"""Acceptance of drafts out of step counters. Counters are summed first and divided last.

Terms: a *step* is one call of the target that verifies drafts. It commits its accepted drafts and one token more (the
recovered or the bonus token). *Acceptance length* tau is tokens committed a step, that token included. Tokens after the
end of a text were never committed and count nowhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eval.estimates import mean_of_ratios, ratio_of_sums
from specjax.decoding.request import StepRecord


@dataclasses.dataclass(frozen=True)
class StepCounts:
    """Sums over steps.

    Attributes:
        num_steps: steps, those without drafts included.
        num_drafted: drafts that were verified and lie before the end of the text.
        num_accepted: accepted drafts among them.
        num_committed: committed tokens.
        accepted_at: steps that accepted the draft at position i (0-based) and all before it.
        reached_at: steps that had a draft at position i, accepted all before it and did not end the text before it.
    """

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_committed: int = 0
    accepted_at: tuple[int, ...] = ()
    reached_at: tuple[int, ...] = ()

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(
            self.num_steps + other.num_steps,
            self.num_drafted + other.num_drafted,
            self.num_accepted + other.num_accepted,
            self.num_committed + other.num_committed,
            _add(self.accepted_at, other.accepted_at),
            _add(self.reached_at, other.reached_at),
        )


def _add(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    length = max(len(left), len(right))
    padded = [tuple(counts) + (0,) * (length - len(counts)) for counts in (left, right)]
    return tuple(a + b for a, b in zip(*padded, strict=True))


def count_steps(steps: Iterable[StepRecord]) -> StepCounts:
    """Sums the counters of one request's steps.

    A step whose text ended inside its block may report more accepted drafts than it committed; the drafts after the
    end count neither as accepted nor as drafted.

    Raises:
        ValueError: if a counter is negative or more drafts were accepted than drafted.
    """
    total = StepCounts()
    for step in steps:
        drafted, accepted, committed = step.num_drafted, step.num_accepted, step.num_committed
        if not (0 <= accepted <= drafted and committed >= 0):
            raise ValueError(
                f"a step must have 0 <= accepted <= drafted and committed >= 0; got {accepted}, {drafted}, {committed}"
            )
        ended = committed <= accepted
        accepted = min(accepted, committed)
        drafted = committed if ended else drafted
        reached = min(accepted + 1, drafted)
        total += StepCounts(1, drafted, accepted, committed, (1,) * accepted, (1,) * reached)
    return total


def acceptance_summary(requests: Sequence[StepCounts]) -> dict[str, Any]:
    """Acceptance of a set of requests.

    Returns:
        A dict of
        `acceptance_length`: tau pooled, committed tokens over steps;
        `acceptance_length_mean_of_requests`: unweighted mean of the requests' own tau (some peers report this one);
        `accepted_per_step`: the same without the recovered or bonus token, accepted drafts over steps;
        `acceptance_rate`: accepted drafts over drafts;
        `joint`: share of steps that accepted position i and all before it, [longest draft];
        `conditional`: share of those that reached position i, [longest draft];
        and the counters. Numbers without data are None.
    """
    total = sum(requests, start=StepCounts())
    accepted_at = _add(total.accepted_at, (0,) * len(total.reached_at))
    return {
        "acceptance_length": _none_if_nan(ratio_of_sums([total.num_committed], [total.num_steps])),
        "acceptance_length_mean_of_requests": _none_if_nan(
            mean_of_ratios([r.num_committed for r in requests], [r.num_steps for r in requests])
        ),
        "accepted_per_step": _none_if_nan(ratio_of_sums([total.num_accepted], [total.num_steps])),
        "acceptance_rate": _none_if_nan(ratio_of_sums([total.num_accepted], [total.num_drafted])),
        "joint": [count / total.num_steps for count in accepted_at],
        "conditional": [
            count / reached if reached else None for count, reached in zip(accepted_at, total.reached_at, strict=True)
        ],
        "num_steps": total.num_steps,
        "num_drafted": total.num_drafted,
        "num_accepted": total.num_accepted,
        "num_committed": total.num_committed,
    }


def _none_if_nan(value: float) -> float | None:
    return value if np.isfinite(value) else None
