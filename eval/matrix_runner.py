"""Measures one rule, K, L and temperature after the other, on the same questions and seeds.

Configurations of equal sizes share one compiled step, whatever their rule and temperature. Speed is taken at full
slots: the speed-up is the block efficiency times the ratio of the seconds that a target call takes, plain over
speculative, at the same number of slots. Plain decoding is timed again whenever its last time is over a minute old, so
that a machine that slows down slows both.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from eval.estimates import finite_or_none, interval_json
from eval.matrix_plan import Configuration, Plan
from eval.questions import Question
from eval.ratio_intervals import ratio_interval
from eval.records import TurnRecord
from eval.spec_bench import answer_rows
from eval.summary import summarise_acceptance
from eval.timed_generation import TimedGroup, generate_timed, generate_warm
from specjax.decoding.engine import Engine
from specjax.decoding.request import Request, SamplingParams
from specjax.text.chat_template import encode_prompt

_REFERENCE_AGE_SECONDS = 60.0
_REFERENCE_CALLS = 12


@dataclasses.dataclass(frozen=True)
class MatrixSettings:
    """How every configuration decodes.

    Attributes:
        num_slots: questions decoded side by side.
        max_new_tokens: longest answer.
        seed: of the first question; each question has its own.
        top_k: truncation, 0 is off.
        top_p: truncation, 1 is off.
        min_p: truncation, 0 is off.

    Raises:
        ValueError: if a size is below 1.
    """

    num_slots: int = 8
    max_new_tokens: int = 48
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}")
        # The other fields are checked where requests are: here once, before anything is loaded or compiled.
        self.params(0, 0.0)

    def params(self, number: int, temperature: float, max_new_tokens: int | None = None) -> SamplingParams:
        """Sampling parameters of a question."""
        return SamplingParams(
            temperature=temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=(self.seed + number) % 2**32,
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
        )


class MatrixRunner:
    """The engines of one target and drafter, one speculative engine at a time."""

    def __init__(
        self,
        target: Any,
        drafter: Any,
        drafter_params: Any,
        questions: Sequence[Question],
        plan: Plan,
        settings: MatrixSettings,
    ) -> None:
        """Encodes the questions; nothing is compiled before the first `run`.

        Args:
            target: a loaded target with a chat template.
            drafter: its configuration object.
            drafter_params: its parameters.
            questions: what to ask; first turns only.
            plan: says which rules share a step.
            settings: how to decode.

        Raises:
            ValueError: if the target has no chat template or there is no question.
        """
        if target.chat_template is None:
            raise ValueError(f"the target {target.name} has no chat template: questions cannot be asked")
        if not questions:
            raise ValueError("`questions` must hold at least one conversation")
        self._target, self._drafter, self._drafter_params = target, drafter, drafter_params
        self._questions, self._plan, self._settings = list(questions), plan, settings
        self._prompts = [
            tuple(encode_prompt(target.tokenizer, target.chat_template, [{"role": "user", "content": q.turns[0]}]))
            for q in questions
        ]
        longest = max(map(len, self._prompts))
        # Multiples of 64 keep arrays aligned; the engine adds room for a proposal behind the text.
        needed = -(-(longest + settings.max_new_tokens) // 64) * 64
        self._cache_length = min(needed, target.config.max_position_embeddings)
        # All prompts are padded to one length: each length would be compiled for each K and L.
        self._padding = min(max(-(-(longest - 1) // 16), 1) * 16, self._cache_length)
        self._plain = self._make_engine(plan.configurations[0])
        self._engine: tuple[tuple[int, int], Engine] | None = None
        self._is_compiled = False
        self._reference: tuple[float, float] | None = None

    def run(self, configuration: Configuration) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Measures one configuration.

        Returns:
            Its row and its answers' rows, JSON-able.
        """
        began = time.perf_counter()
        engine = self._engine_for(configuration)
        # Answers of one token need everything that is compiled, so that nothing is while the clock runs.
        compile_seconds = 0.0
        if not self._is_compiled:
            compile_seconds = generate_timed(engine, self._requests(configuration.temperature, 1)).wall_seconds
            self._is_compiled = True
        plain_seconds = self._plain_seconds_per_call(configuration.temperature)
        group = generate_timed(engine, self._requests(configuration.temperature))
        records = [
            TurnRecord(question.id, question.category, 0, 0, completion)
            for question, completion in zip(self._questions, group.completions, strict=True)
        ]
        row = {
            **_identity(configuration),
            **_results(records, group, plain_seconds),
            "seconds": {
                "compile": compile_seconds,
                "prefill": group.prefill_seconds,
                "decode": group.decode_seconds,
                "all": time.perf_counter() - began,
            },
        }
        return row, answer_rows(configuration, records)

    def _engine_for(self, configuration: Configuration) -> Engine:
        """The engine of these sizes, set to the configuration's rule."""
        if configuration.is_plain:
            return self._plain
        if self._engine is None or self._engine[0] != configuration.sizes:
            # The engine before, with its caches, goes first.
            self._engine = None
            self._engine = (configuration.sizes, self._make_engine(configuration))
            self._is_compiled = False
        engine = self._engine[1]
        engine.verifier = configuration.verifier
        return engine

    def _make_engine(self, configuration: Configuration) -> Engine:
        speculative: dict[str, Any] = {"draft_length": 0}
        if not configuration.is_plain:
            speculative = {
                "drafter": self._drafter,
                "drafter_params": self._drafter_params,
                "draft_length": configuration.draft_length,
                "num_drafts": configuration.num_drafts,
                "verifier": configuration.verifier,
                "shared_verifiers": self._plan.rules(configuration.sizes),
            }
        return Engine(
            self._target,
            num_slots=self._settings.num_slots,
            cache_length=self._cache_length,
            prefill_chunk=self._padding,
            prefill_padding=self._padding,
            # Every configuration asks the same prompts, and prefills are not what is compared.
            keep_prefills=True,
            **speculative,
        )

    def _requests(self, temperature: float, max_new_tokens: int | None = None) -> list[Request]:
        return [
            Request(str(question.id), prompt, self._settings.params(number, temperature, max_new_tokens))
            for number, (question, prompt) in enumerate(zip(self._questions, self._prompts, strict=True))
        ]

    def _plain_seconds_per_call(self, temperature: float) -> float:
        """Of plain decoding with full slots, from the last minute."""
        if self._reference is None or time.perf_counter() - self._reference[0] > _REFERENCE_AGE_SECONDS:
            requests = self._requests(temperature, _REFERENCE_CALLS)[: self._settings.num_slots]
            group = generate_warm(self._plain, requests)
            self._reference = (time.perf_counter(), group.decode_seconds / max(group.num_calls, 1))
        return self._reference[1]


def _identity(configuration: Configuration) -> dict[str, Any]:
    fields = ("verifier", "num_drafts", "draft_length", "temperature", "label", "model_id")
    return {name: getattr(configuration, name) for name in fields}


def _results(records: Sequence[TurnRecord], group: TimedGroup, plain_seconds: float) -> dict[str, Any]:
    answered = [record for record in records if record.completion.steps and not record.completion.failed]
    tokens = [len(record.completion.token_ids) for record in answered]
    efficiency = ratio_interval(tokens, [len(record.completion.steps) for record in answered])
    seconds = group.decode_seconds / max(group.num_calls, 1)
    gain = plain_seconds / seconds
    return {
        "block_efficiency": interval_json(efficiency),
        # The interval is that of the block efficiency: it covers questions and draws, not the clock.
        "speed_up": {name: finite_or_none(gain * getattr(efficiency, name)) for name in ("value", "low", "high")},
        "acceptance": summarise_acceptance(answered),
        "num_tokens": sum(tokens),
        "num_answers": len(answered),
        "num_failed": len(records) - len(answered),
        "num_calls": group.num_calls,
        "tokens_per_second": sum(tokens) / group.decode_seconds,
        "seconds_per_call": seconds,
        "plain_seconds_per_call": plain_seconds,
        "num_compilations": group.num_compilations,
    }
