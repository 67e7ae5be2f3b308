"""Acceptance and wall clock of all heads, prompt by prompt and side by side, beside plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.interleaved import Measurements, group_questions, measure
from eval.plane_heads import PlaneHead
from eval.questions import Question
from eval.records import PLAIN, TurnRecord, Variant
from eval.spec_bench import answer_rows
from eval.timing import alternated
from specjax import metrics
from specjax.decoding.engine import Engine
from specjax.decoding.request import Request, SamplingParams
from specjax.text.chat_template import encode_prompt

# One width of prompt pieces: every width is compiled for every head, which takes longer than it computes.
_PROMPT_PIECE = 64
Rows = list[dict[str, Any]]


def decoding_id(mark: str, draft_length: int, temperature: float, group: int) -> str:
    """Name of the row of one head (or of plain decoding) and group of prompts."""
    return f"decoding-{mark}-L{draft_length}-T{temperature:g}-g{group}"


class PlaneDecoding:
    """The engines of one draft length at a time; plain decoding is timed again with every group."""

    def __init__(
        self,
        target: Any,
        questions: Sequence[Question],
        *,
        draft_lengths: Sequence[int],
        num_slots: int,
        max_new_tokens: int,
        seed: int,
    ) -> None:
        """Sizes the caches; nothing is compiled yet.

        Args:
            target: a loaded target with a chat template.
            questions: what to ask; first turns only.
            draft_lengths: all that will be measured.
            num_slots: prompts decoded side by side.
            max_new_tokens: longest answer.
            seed: of the first question; each question has its own.

        Raises:
            ValueError: if the target has no chat template or there is no question.
        """
        if target.chat_template is None:
            raise ValueError(f"the target {target.name} has no chat template: questions cannot be asked")
        if not questions:
            raise ValueError("`questions` must hold at least one conversation")
        self._target, self._num_slots, self._max_new_tokens, self._seed = target, num_slots, max_new_tokens, seed
        self.groups = group_questions(questions, num_slots)
        self._numbers = {question.id: number for number, question in enumerate(questions)}
        longest = max(len(self.encode(question)) for question in questions)
        # Multiples of 64 keep arrays aligned; the margin is for one proposal behind the text.
        needed = -(-(longest + max_new_tokens + max(draft_lengths) + 1) // 64) * 64
        self.cache_length = min(needed, target.config.max_position_embeddings)
        self._plain = self._engine(0)
        self._engines: dict[str, Engine] = {}
        self._draft_length = 0

    def encode(self, question: Question) -> tuple[int, ...]:
        """Prompt of a question."""
        messages = [{"role": "user", "content": question.turns[0]}]
        return tuple(encode_prompt(self._target.tokenizer, self._target.chat_template, messages))

    def run_group(
        self, heads: Sequence[PlaneHead], draft_length: int, temperature: float, index: int
    ) -> Mapping[str, tuple[dict[str, Any], Rows]]:
        """Decodes one group plainly and with some heads.

        Args:
            heads: the drafters.
            draft_length: drafts a step.
            temperature: of sampling.
            index: of the group.

        Returns:
            By mark, "plain" among them: the row, and its answers in Spec-Bench's form.
        """
        if draft_length != self._draft_length:
            # The engines before, with their caches, go first.
            self._engines, self._draft_length = {}, draft_length
        for head in heads:
            if head.mark not in self._engines:
                self._engines[head.mark] = self._engine(draft_length, *head.pair)
        engines = {Variant(PLAIN, 0, temperature): self._plain}
        engines |= {Variant(head.mark, draft_length, temperature): self._engines[head.mark] for head in heads}
        # `measure` alternates within one call; each group is a call of its own here.
        order = alternated(list(engines), index)
        group = self.groups[index]
        measured = measure(
            {variant: engines[variant] for variant in order},
            [Question(question.id, question.category, question.turns[:1]) for question in group],
            self._request_maker(temperature, group),
            num_slots=self._num_slots,
        )
        plain = next(variant for variant in measured.records if variant.is_plain)
        rows: dict[str, tuple[dict[str, Any], Rows]] = {}
        for variant, records in measured.records.items():
            row = self._row(variant, plain, measured, index)
            answers = [{**answer, "model_id": row["model_id"]} for answer in answer_rows(variant, records)]
            rows[variant.system] = (row, answers)
        return rows

    def _engine(self, draft_length: int, drafter: Any = None, params: Any = None) -> Engine:
        return Engine(
            self._target,
            drafter,
            params,
            num_slots=self._num_slots,
            cache_length=self.cache_length,
            draft_length=draft_length,
            prefill_chunk=_PROMPT_PIECE,
            prefill_padding=_PROMPT_PIECE,
        )

    def _request_maker(self, temperature: float, group: Sequence[Question]) -> Callable[..., Request]:
        def make(name: str, messages: list[dict[str, str]], number: int) -> Request:
            # A question's seed follows its place among all questions, not within its group.
            place = self._numbers[group[number].id]
            params = SamplingParams(
                temperature=temperature,
                seed=(self._seed + place) % 2**32,
                max_new_tokens=self._max_new_tokens,
            )
            prompt = encode_prompt(self._target.tokenizer, self._target.chat_template, messages)
            return Request(id=name, prompt_ids=tuple(prompt), params=params)

        return make

    def _row(self, variant: Variant, plain: Variant, measured: Measurements, index: int) -> dict[str, Any]:
        (timing,), (plain_timing,) = measured.timings[variant], measured.timings[plain]
        answers = {record.key: record.completion.token_ids for record in measured.records[plain]}
        records = [record for record in measured.records[variant] if not record.completion.failed]
        same = sum(tuple(answers[r.key]) == tuple(r.completion.token_ids) for r in records)
        row = {
            "model_id": decoding_id(variant.system, variant.draft_length, variant.temperature, index),
            "part": "decoding",
            "mark": variant.system,
            "draft_length": variant.draft_length,
            "temperature": variant.temperature,
            "group": index,
            "category": timing.category,
            "questions": [_counts(record) for record in records],
            "num_failed": len(measured.records[variant]) - len(records),
            "num_equal": same if variant.temperature == 0 else None,
            "num_tokens": timing.num_tokens,
            "decode_seconds": timing.decode_seconds,
            "num_calls": timing.num_calls,
            "plain_num_tokens": plain_timing.num_tokens,
            "plain_decode_seconds": plain_timing.decode_seconds,
        }
        if variant.is_plain:
            row["token_ids"] = [list(map(int, record.completion.token_ids)) for record in records]
        return row


def _counts(record: TurnRecord) -> dict[str, Any]:
    counts = metrics.count_steps(record.completion.steps)
    return {
        "question_id": record.question_id,
        "num_committed": counts.num_committed,
        "num_calls": counts.num_calls,
        "num_drafted": counts.num_drafted,
        "num_accepted": counts.num_accepted,
        "accepted_at": list(counts.accepted_at),
        "tried_at": list(counts.tried_at),
    }
