"""Acceptance numbers from hand-counted records."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specjax.decoding.request import Completion, StepRecord
from specjax.metrics import AcceptanceCounts, bootstrap_ratio, count_steps, summarise


def completion(request_id: str, steps: list[tuple[int, int, int]], finish_reason: str = "length") -> Completion:
    return Completion(request_id, (1,), steps=tuple(StepRecord(*step) for step in steps), finish_reason=finish_reason)


def test_case_e1_pooled_and_mean_of_requests():
    many = completion("a", [(4, 4, 5)] * 20)  # 100 tokens in 20 calls
    few = completion("b", [(4, 0, 1)] * 10)  # 10 tokens in 10 calls
    summary = summarise([many, few])
    assert summary.acceptance_length.value == pytest.approx(110 / 30)
    assert summary.counts.acceptance_length == pytest.approx(3.667, abs=5e-4)
    assert summary.mean_request_acceptance_length == pytest.approx(3.0)
    assert summary.num_requests == 2


def test_case_e2_the_bonus_token_counts():
    counts = count_steps([StepRecord(2, 2, 3), StepRecord(2, 0, 1), StepRecord(2, 1, 2)])
    assert counts.num_committed == 6
    assert counts.acceptance_length == pytest.approx(2.0)
    assert counts.block_efficiency == pytest.approx(2.0)
    assert counts.accepted_per_call == pytest.approx(1.0)
    assert counts.joint_acceptance == pytest.approx((2 / 3, 1 / 3))
    assert counts.conditional_acceptance == pytest.approx((2 / 3, 1 / 2))
    assert counts.acceptance_rate == pytest.approx(3 / 6)


def test_case_s2_tokens_behind_the_end_count_nowhere():
    # 101, 102, EOS were committed of five accepted drafts and a bonus token.
    summary = summarise([completion("a", [(3, 3, 3)], "stop")])
    assert summary.counts.acceptance_length == 3.0
    assert summary.counts.num_drafted == 3
    assert summary.counts.joint_acceptance == (1.0, 1.0, 1.0)


def test_case_e2_all_turns_count():
    turns = [completion("turn 1", [(2, 2, 3)] * 4), completion("turn 2", [(2, 0, 1)] * 4)]
    assert summarise(turns).acceptance_length.value == pytest.approx(2.0)


def test_calls_without_a_draft():
    counts = count_steps([StepRecord(0, 0, 1), StepRecord(4, 3, 4), StepRecord(0, 0, 1), StepRecord(2, 2, 3)])
    assert counts.acceptance_length == pytest.approx(9 / 4)
    assert counts.drafting_acceptance_length == pytest.approx(7 / 2)
    assert counts.drafted_at == (2, 2, 1, 1)
    assert counts.accepted_at == (2, 2, 1, 0)
    assert counts.tried_at == (2, 2, 1, 1)


def test_sums_pool_and_pad_positions():
    first, second = count_steps([StepRecord(1, 1, 2)]), count_steps([StepRecord(3, 1, 2)])
    assert first + second == count_steps([StepRecord(1, 1, 2), StepRecord(3, 1, 2)])
    assert first + AcceptanceCounts() == first


def test_nothing_gives_nan_and_failures_are_left_out():
    empty = summarise([completion("a", []), completion("b", [(4, 4, 5)], "error: no")])
    assert empty.num_requests == 0
    assert math.isnan(empty.acceptance_length.value)
    assert math.isnan(empty.acceptance_length.low)
    assert math.isnan(empty.mean_request_acceptance_length)
    assert math.isnan(empty.counts.acceptance_rate)
    assert empty.counts.joint_acceptance == ()


def test_identity_between_length_and_positions():
    # tau = 1 + sum over positions of calls that accepted it / calls, whatever the drafts' lengths.
    generator = np.random.default_rng(0)
    steps = []
    for _ in range(200):
        drafted = int(generator.integers(0, 6))
        accepted = int(generator.integers(0, drafted + 1))
        steps.append(StepRecord(drafted, accepted, accepted + 1))
    counts = count_steps(steps)
    assert counts.acceptance_length == pytest.approx(1 + sum(counts.accepted_at) / counts.num_calls)


def test_bootstrap_covers_and_repeats():
    generator = np.random.default_rng(3)
    covered = 0
    for trial in range(200):
        calls = generator.integers(5, 50, 40)
        committed = generator.binomial(calls * 4, 0.5)
        interval = bootstrap_ratio(committed, calls, seed=trial, num_resamples=400)
        assert interval.low <= interval.value <= interval.high
        covered += interval.low <= 2.0 <= interval.high
    # About 95 % of 200, a little less for a percentile interval of 40 requests; 165 is 4 sigma below 92 %.
    assert covered >= 165
    assert bootstrap_ratio(committed, calls, seed=1) == bootstrap_ratio(committed, calls, seed=1)
    assert bootstrap_ratio(committed, calls, seed=1) != bootstrap_ratio(committed, calls, seed=2)


def test_one_request_has_a_degenerate_interval():
    interval = bootstrap_ratio(np.array([30]), np.array([10]))
    assert (interval.low, interval.value, interval.high) == (3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (([1, 2], [1, 0]), {}, "`denominators` must be positive; got 0"),
        (([1], [1]), {"level": 1.0}, r"`level` must be in \(0, 1\); got 1.0"),
        (([1], [1]), {"num_resamples": 0}, "`num_resamples` must be at least 1; got 0"),
    ],
)
def test_bootstrap_refuses_bad_input(arguments, settings, message):
    with pytest.raises(ValueError, match=message):
        bootstrap_ratio(*map(np.array, arguments), **settings)
