"""Answer files in Spec-Bench's form: one JSON object a question and system."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.records import TurnRecord, Variant


def answer_rows(variant: Variant, records: Sequence[TurnRecord]) -> list[dict[str, Any]]:
    """Rows of one variant, one a conversation, in the order of their first turns.

    `turns`, `decoding_steps`, `new_tokens` and `wall_time` (seconds, prefill included) have one entry a turn;
    `accept_lengths` is flat over all turns, one entry a decoding step, the recovered or bonus token included.
    An answer without tokens has 0 steps, 0 tokens and its time.
    """
    conversations: dict[str | int, list[TurnRecord]] = {}
    for record in records:
        conversations.setdefault(record.question_id, []).append(record)
    return [_row(variant, sorted(turns, key=lambda record: record.turn)) for turns in conversations.values()]


def _row(variant: Variant, turns: Sequence[TurnRecord]) -> dict[str, Any]:
    choice: Mapping[str, Any] = {
        "index": 0,
        "turns": [record.completion.text for record in turns],
        "decoding_steps": [len(record.completion.steps) for record in turns],
        "new_tokens": [len(record.completion.token_ids) for record in turns],
        "wall_time": [record.completion.seconds for record in turns],
        "accept_lengths": [step.num_committed for record in turns for step in record.completion.steps],
        "finish_reasons": [record.completion.finish_reason for record in turns],
    }
    return {
        "question_id": turns[0].question_id,
        "category": turns[0].category,
        "model_id": variant.model_id,
        "choices": [choice],
    }
