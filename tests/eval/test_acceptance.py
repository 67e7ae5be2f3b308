"""Acceptance counters: summed first, divided last; nothing behind the end of a text counts."""

from __future__ import annotations

import pytest

from eval.acceptance import StepCounts, acceptance_summary, count_steps
from specjax.decoding.request import StepRecord


def steps(*rows: tuple[int, int, int]) -> list[StepRecord]:
    return [StepRecord(*row) for row in rows]


def test_case_e1_pooled_and_mean_of_requests_are_both_reported() -> None:
    request_a = StepCounts(num_steps=20, num_committed=100)
    request_b = StepCounts(num_steps=10, num_committed=10)
    summary = acceptance_summary([request_a, request_b])
    assert summary["acceptance_length"] == pytest.approx(110 / 30)
    assert summary["acceptance_length_mean_of_requests"] == pytest.approx(3.0)


def test_case_e2_bonus_counts_in_acceptance_length_and_not_in_accepted_per_step() -> None:
    # Two drafts a step; 2, 0 and 1 of them accepted; one token more each time.
    summary = acceptance_summary([count_steps(steps((2, 2, 3), (2, 0, 1), (2, 1, 2)))])
    assert summary["num_committed"] == 6
    assert summary["acceptance_length"] == pytest.approx(2.0)
    assert summary["accepted_per_step"] == pytest.approx(1.0)
    assert summary["acceptance_rate"] == pytest.approx(0.5)
    assert summary["joint"] == pytest.approx([2 / 3, 1 / 3])
    assert summary["conditional"] == pytest.approx([2 / 3, 1 / 2])


def test_case_e2_all_turns_count_not_only_the_last() -> None:
    first, second = count_steps(steps((2, 2, 3))), count_steps(steps((2, 0, 1)))
    assert acceptance_summary([first, second])["acceptance_length"] == pytest.approx(2.0)


def test_case_s2_tokens_after_the_end_count_nowhere() -> None:
    # [101, 102, end, 104, 105, bonus]: five drafts were accepted, the text ended with the third.
    summary = acceptance_summary([count_steps(steps((5, 5, 3)))])
    assert summary["acceptance_length"] == pytest.approx(3.0)
    assert summary["num_accepted"] == 3
    assert summary["num_drafted"] == 3
    assert summary["joint"] == pytest.approx([1.0, 1.0, 1.0])
    assert summary["conditional"] == pytest.approx([1.0, 1.0, 1.0])


def test_steps_without_drafts_are_steps_and_reach_no_position() -> None:
    summary = acceptance_summary([count_steps(steps((0, 0, 1), (2, 1, 2)))])
    assert summary["acceptance_length"] == pytest.approx(1.5)
    assert summary["joint"] == pytest.approx([0.5, 0.0])
    assert summary["conditional"] == pytest.approx([1.0, 0.0])


def test_conditional_rates_reproduce_the_acceptance_length_of_full_chains() -> None:
    counts = count_steps(steps((3, 3, 4), (3, 1, 2), (3, 0, 1), (3, 2, 3), (3, 3, 4)))
    summary = acceptance_summary([counts])
    assert 1 + sum(summary["joint"]) == pytest.approx(summary["acceptance_length"])


def test_nothing_measured_gives_no_numbers_instead_of_failing() -> None:
    summary = acceptance_summary([])
    assert summary["acceptance_length"] is None
    assert summary["joint"] == []
    summary = acceptance_summary([StepCounts()])
    assert summary["acceptance_length_mean_of_requests"] is None


def test_impossible_counters_are_refused() -> None:
    with pytest.raises(ValueError, match="accepted <= drafted"):
        count_steps(steps((1, 2, 3)))
