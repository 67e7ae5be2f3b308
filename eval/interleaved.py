"""Measures several engines on the same conversations, turn by turn and side by side.

Each group of prompts runs through every engine before the next group starts, in an order that turns around from group
to group (AB, BA, ...), so that a machine that slows down for a minute slows all of them. The prompts of a group have
one category and run side by side in the engines' slots; plain and speculative decoding have the same slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from eval.questions import Question
from eval.records import GroupTiming, TurnRecord, Variant
from eval.timed_generation import TimedGroup, generate_warm
from eval.timing import alternated
from specjax.decoding.engine import Engine
from specjax.decoding.request import Completion, Request

Messages = list[dict[str, str]]


@dataclasses.dataclass
class Measurements:
    """Answers and times of each variant, both in the order of the groups."""

    records: dict[Variant, list[TurnRecord]]
    timings: dict[Variant, list[GroupTiming]]


def group_questions(questions: Sequence[Question], size: int) -> list[list[Question]]:
    """Groups of at most `size` questions of one category, categories and questions in their order."""
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    return [members[start : start + size] for members in by_category.values() for start in range(0, len(members), size)]


def measure(
    engines: Mapping[Variant, Engine],
    questions: Sequence[Question],
    make_request: Callable[[str, Messages, int], Request],
    *,
    num_slots: int,
    repeats: int = 1,
    on_progress: Callable[[int, int], None] | None = None,
) -> Measurements:
    """Runs all conversations through all engines.

    A second turn is asked after the first answer *of plain decoding*, whoever is measured: all variants read the same
    prompts, and a difference in one answer does not change the next question. A conversation whose turn failed (a
    prompt that does not fit) is not continued.

    Args:
        engines: one engine a variant, each with `num_slots` slots; exactly one of them plain.
        questions: conversations.
        make_request: (request id, messages, number of the question) to a request.
        num_slots: prompts a group.
        repeats: runs of each group and engine; times are summed, answers kept from the first.
        on_progress: told (groups done, all groups).

    Raises:
        ValueError: if not exactly one variant is plain.
    """
    plain = [variant for variant in engines if variant.is_plain]
    if len(plain) != 1:
        raise ValueError(f"`engines` must hold exactly one plain variant; got {len(plain)}")
    measurements = Measurements({variant: [] for variant in engines}, {variant: [] for variant in engines})
    groups = group_questions(questions, num_slots)
    number = {question.id: index for index, question in enumerate(questions)}
    for group_index, group in enumerate(groups):
        histories: dict[str | int, Messages] = {question.id: [] for question in group}
        totals: dict[Variant, list[TimedGroup]] = {variant: [] for variant in engines}
        for turn in range(max(len(question.turns) for question in group)):
            asked = [question for question in group if turn < len(question.turns) and question.id in histories]
            requests = []
            for question in asked:
                histories[question.id].append({"role": "user", "content": question.turns[turn]})
                name = f"{question.id}-{turn}"
                requests.append(make_request(name, list(histories[question.id]), number[question.id]))
            if not requests:
                break
            answers = _run_turn(engines, requests, asked, turn, group_index, repeats, measurements, totals)
            for question, completion in zip(asked, answers[plain[0]], strict=True):
                if completion.failed:
                    del histories[question.id]
                else:
                    histories[question.id].append({"role": "assistant", "content": completion.text})
        for variant, timed in totals.items():
            measurements.timings[variant].append(_sum_timings(group_index, group[0].category, timed))
        if on_progress is not None:
            on_progress(group_index + 1, len(groups))
    return measurements


def _run_turn(
    engines: Mapping[Variant, Engine],
    requests: Sequence[Request],
    asked: Sequence[Question],
    turn: int,
    group_index: int,
    repeats: int,
    measurements: Measurements,
    totals: dict[Variant, list[TimedGroup]],
) -> dict[Variant, list[Completion]]:
    answers: dict[Variant, list[Completion]] = {}
    for repeat in range(repeats):
        # The turn counts too: the two turns of a conversation meet the engines in opposite orders.
        for variant in alternated(list(engines), group_index + turn + repeat):
            timed = generate_warm(engines[variant], requests)
            totals[variant].append(timed)
            if variant in answers:
                continue
            answers[variant] = timed.completions
            for question, completion in zip(asked, timed.completions, strict=True):
                measurements.records[variant].append(
                    TurnRecord(question.id, question.category, turn, group_index, completion)
                )
    return answers


def _sum_timings(group: int, category: str, timed: Sequence[TimedGroup]) -> GroupTiming:
    return GroupTiming(
        group=group,
        category=category,
        prefill_seconds=sum(t.prefill_seconds for t in timed),
        decode_seconds=sum(t.decode_seconds for t in timed),
        num_tokens=sum(t.num_tokens for t in timed),
        num_calls=sum(t.num_calls for t in timed),
    )
