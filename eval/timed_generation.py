"""Running a group of requests through an engine with a clock beside it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from eval.timing import count_compilations
from specjax.decoding.engine import Engine
from specjax.decoding.request import Completion, Request


@dataclasses.dataclass(frozen=True)
class TimedGroup:
    """One group of requests that were decoded side by side.

    Attributes:
        completions: in the order of the requests.
        prefill_seconds: feeding the prompts.
        decode_seconds: the rest of the group's time; all new tokens come in it.
        num_calls: calls of the engine's step; with several slots, requests share them.
        num_compilations: XLA compilations while the clock ran; the times mean nothing unless it is 0.
    """

    completions: list[Completion]
    prefill_seconds: float
    decode_seconds: float
    num_calls: int
    num_compilations: int

    @property
    def wall_seconds(self) -> float:
        """Prefill and decoding together."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def num_tokens(self) -> int:
        """All new tokens of the group."""
        return sum(len(completion.token_ids) for completion in self.completions)


def generate_timed(engine: Engine, requests: Sequence[Request]) -> TimedGroup:
    """Generates with a clock.

    Args:
        engine: decodes the requests side by side.
        requests: at most as many as the engine has slots, so that no request waits for another one's slot.

    Returns:
        Completions and times.
    """
    with count_compilations() as compilations:
        start = time.perf_counter()
        completions = engine.generate(requests)
        seconds = time.perf_counter() - start
    prefill = engine.last_run.prefill_seconds
    return TimedGroup(list(completions), prefill, seconds - prefill, engine.last_run.num_calls, compilations.count)


def generate_warm(engine: Engine, requests: Sequence[Request], *, attempts: int = 3) -> TimedGroup:
    """As `generate_timed`, repeated while XLA compiled something during the run.

    A prompt may have a length for which nothing is compiled yet; its first run pays for that and is thrown away.
    """
    group = generate_timed(engine, requests)
    for _ in range(attempts - 1):
        if not group.num_compilations:
            break
        group = generate_timed(engine, requests)
    return group
