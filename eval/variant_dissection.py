"""The parts of several variants' steps, timed in turn: one step of each, and of the engine's plain decoding, a round.

Measured one after the other, a variant that meets a slow minute of the machine would look slower than it is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.dissection import DECIDE, EXTEND, PROPOSE, TARGET, WARMUP_STEPS, StepClock, StepParts
from eval.head_timing import FULL, with_full_head, without_head
from eval.records import PLAIN
from eval.timing import Timing, alternated
from specjax.decoding import Engine, Request, SamplingParams
from specjax.heads.base import HeadConfig

Key = tuple[str, int]
"""A variant: name of the system and draft length."""

PLAIN_KEY: Key = (PLAIN, 0)

_NO_HEAD = "without head"
_FULL_HEAD = "with full head"


class Dissection:
    """Times the parts of steps on one prompt."""

    def __init__(self, target: Any, prompt_ids: Sequence[int], num_steps: int, num_slots: int) -> None:
        """Starts with plain decoding as the only variant.

        Args:
            target: a loaded target.
            prompt_ids: the prompt.
            num_steps: timed steps of each variant; fewer in a short context.
            num_slots: rows, all with the same prompt.
        """
        self._target, self._num_slots = target, num_slots
        # A long prompt would leave no room for the steps in a short context.
        room = target.config.max_position_embeddings // 2
        self._prompt_ids = tuple(prompt_ids[-room:])
        self._num_steps = num_steps
        self._lengths: dict[Key, int] = {}
        self._clocks: dict[Key, StepClock] = {}
        self._made: dict[Key, tuple[Any, Any]] = {PLAIN_KEY: (None, None)}
        self._heads: dict[Key, Mapping[str, tuple[Any, Any]]] = {}
        self._lengths[PLAIN_KEY] = 0
        self._plain_seconds: list[float] = []

    def add(
        self,
        key: Key,
        drafter: Any,
        params: Any,
        length: int,
        *,
        heads: Mapping[str, tuple[Any, Any]] | None = None,
    ) -> None:
        """One more variant.

        Args:
            key: its name and draft length.
            drafter: its configuration object.
            params: its parameters.
            length: drafts a step.
            heads: drafters by name, as (drafter, parameters), that propose from this variant's state in every step as
                well; `seconds_of_heads` has their times. They differ from it in nothing but the head.
        """
        self._made[key], self._lengths[key] = (drafter, params), length
        self._heads[key] = dict(heads or {})

    def run(self) -> None:
        """Steps all variants in turn."""
        num_prompt = len(self._prompt_ids)
        left = self._target.config.max_position_embeddings - num_prompt
        num_steps = max(1, min(self._num_steps, left // (max(self._lengths.values()) + 1) - WARMUP_STEPS))
        for key, (drafter, params) in self._made.items():
            length = self._lengths[key]
            self._clocks[key] = StepClock(
                StepParts(self._target.config, drafter, length),
                self._target.params,
                params,
                self._prompt_ids,
                num_steps=num_steps,
                batch=self._num_slots,
                cache_length=num_prompt + (num_steps + WARMUP_STEPS) * (length + 1),
                rivals={**self._rivals(drafter, params), **self._heads.get(key, {})},
            )
        total = num_steps + WARMUP_STEPS
        engine = Engine(self._target, num_slots=self._num_slots, cache_length=num_prompt + total)
        settings = SamplingParams(max_new_tokens=total, ignore_eos=True)
        requests = [Request(str(index), self._prompt_ids, settings) for index in range(self._num_slots)]
        plain = engine.stream(requests)
        for index in range(total):
            for key in alternated([*self._clocks, None], index):
                if key is None:
                    start = time.perf_counter()
                    for _ in range(self._num_slots):
                        next(plain)
                    self._plain_seconds.append(time.perf_counter() - start)
                else:
                    self._clocks[key].step()

    @property
    def plain_step_seconds(self) -> float:
        """Median time of the engine's own plain step."""
        return float(np.median(self._plain_seconds[WARMUP_STEPS:]))

    def parts(self, key: Key) -> tuple[dict[str, float], dict[str, float] | None]:
        """Median seconds of the parts, and what heads add to one call: {"own": ..., "full": ...} or None."""
        timings, length = self._clocks[key].timings, self._lengths[key]
        medians = {name: timings[name].median for name in (PROPOSE, TARGET, DECIDE, EXTEND) if name in timings}
        if _NO_HEAD not in timings:
            return medians, None
        full = timings.get(_FULL_HEAD, timings[PROPOSE])
        return medians, {
            "own": _median_difference(timings[PROPOSE], timings[_NO_HEAD]) / length,
            "full": _median_difference(full, timings[_NO_HEAD]) / length,
        }

    def seconds_of_heads(self, key: Key) -> dict[str, float]:
        """Median seconds that each of a variant's `heads` adds to one call, over a drafter without a head."""
        timings, length = self._clocks[key].timings, self._lengths[key]
        return {
            name: _median_difference(timings[name], timings[_NO_HEAD]) / length for name in self._heads.get(key, {})
        }

    def _rivals(self, drafter: Any, params: Any) -> dict[str, tuple[Any, Any]]:
        if not _has_head(drafter):
            return {}
        rivals = {_NO_HEAD: without_head(drafter, params)}
        if drafter.config.head.kind != FULL:
            rivals[_FULL_HEAD] = with_full_head(drafter, params, self._target.params["lm_head"])
        return rivals


def _has_head(drafter: Any) -> bool:
    return isinstance(getattr(getattr(drafter, "config", None), "head", None), HeadConfig)


def _median_difference(longer: Timing, shorter: Timing) -> float:
    # Pairs of the same step: slow moments of the machine hit both.
    difference = np.median(np.subtract(longer.samples, shorter.samples))
    return max(float(difference), 0.0)
