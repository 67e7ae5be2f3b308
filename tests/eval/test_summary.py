"""A result row out of hand-made records: counters are summed first and divided last."""

from __future__ import annotations

from typing import Any

import pytest

from eval.records import GroupTiming, TurnRecord, Variant
from eval.summary import summarise_variant
from specjax.decoding import Completion, StepRecord

SLIM = Variant("slim", 2, 0.0)


def record(question: str, turn: int, steps: list[tuple[int, int, int]], group: int = 0, **fields: Any) -> TurnRecord:
    tokens = tuple(range(sum(step[2] for step in steps)))
    completion = Completion(
        f"{question}-{turn}", (1,), token_ids=tokens, steps=tuple(StepRecord(*step) for step in steps), **fields
    )
    return TurnRecord(question, "chat", turn, group, completion)


def timing(group: int, seconds: float, tokens: int) -> GroupTiming:
    return GroupTiming(group, "chat", 0.5, seconds, tokens, tokens)


def summarise(records: list[TurnRecord]) -> dict[str, Any]:
    return summarise_variant(SLIM, records, [timing(0, 1.0, 100)], [timing(0, 2.0, 100)], [])


def test_case_e1_pooled_and_mean_of_requests_are_both_reported() -> None:
    row = summarise([record("a", 0, [(4, 4, 5)] * 20), record("b", 0, [(4, 0, 1)] * 10)])
    assert row["acceptance"]["acceptance_length"] == pytest.approx(110 / 30)
    assert row["acceptance"]["acceptance_length_mean_of_requests"] == pytest.approx(3.0)
    assert row["block_efficiency"] == pytest.approx(110 / 30)


def test_case_e2_bonus_counts_in_the_acceptance_length_and_not_in_accepted_per_step() -> None:
    row = summarise([record("a", 0, [(2, 2, 3), (2, 0, 1)]), record("a", 1, [(2, 1, 2)])])
    acceptance = row["acceptance"]
    # Two turns of one conversation: both count.
    assert acceptance["acceptance_length"] == pytest.approx(2.0)
    assert acceptance["accepted_per_step"] == pytest.approx(1.0)
    assert acceptance["joint"] == pytest.approx([2 / 3, 1 / 3])
    assert acceptance["conditional"] == pytest.approx([2 / 3, 1 / 2])


def test_case_s2_drafts_behind_the_end_count_nowhere() -> None:
    row = summarise([record("a", 0, [(3, 3, 3)], finish_reason="stop")])
    assert row["acceptance"]["acceptance_length"] == pytest.approx(3.0)
    assert row["acceptance"]["joint"] == pytest.approx([1.0, 1.0, 1.0])


def test_case_e4_speeds_are_ratios_of_sums_and_empty_answers_weigh_nothing() -> None:
    timings = [timing(0, 1.0, 100), timing(1, 10.0, 100), timing(2, 0.01, 0)]
    plain = [timing(0, 2.0, 100), timing(1, 20.0, 100), timing(2, 0.01, 0)]
    records = [record("a", 0, [(2, 2, 3)]), record("b", 0, [(2, 2, 3)], 1), record("c", 0, [], 2)]
    row = summarise_variant(SLIM, records, timings, plain, [])
    assert row["tokens_per_second"]["value"] == pytest.approx(200 / 11.01)
    assert row["speed_up"]["value"] == pytest.approx(22.01 / 11.01)
    assert row["speed_up"]["mean_of_prompts"] == pytest.approx(2.0)
    assert row["speed_up"]["with_prefill"]["value"] == pytest.approx((22.01 + 1.5) / (11.01 + 1.5))
    assert (row["num_empty"], row["num_failed"], row["num_tokens"]) == (1, 0, 6)


def test_failed_answers_are_counted_apart() -> None:
    row = summarise([record("a", 0, [(2, 2, 3)]), record("b", 0, [], finish_reason="error: too long")])
    assert (row["num_answers"], row["num_failed"]) == (1, 1)
    assert row["acceptance"]["num_steps"] == 1


def test_nothing_answered_gives_no_numbers() -> None:
    row = summarise([record("b", 0, [], finish_reason="error: too long")])
    assert row["acceptance"]["acceptance_length"] is None
    assert row["acceptance"]["joint"] == []
    assert row["repeated_4gram_share"] is None
