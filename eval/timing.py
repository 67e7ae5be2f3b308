"""Timing that survives a noisy machine: functions are interleaved, order alternates, medians and pairs are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

import jax
import numpy as np

Name = TypeVar("Name")

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass(frozen=True)
class Timing:
    """Samples of one function's duration.

    Attributes:
        samples: seconds of each call, in the order of the rounds, [rounds].
    """

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        """Median duration in seconds."""
        return float(np.median(self.samples))

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile in seconds."""
        low, high = np.quantile(self.samples, [0.25, 0.75])
        return float(low), float(high)

    def to_json(self) -> dict[str, float | int]:
        """Median, quartiles and number of samples, in seconds."""
        low, high = self.quartiles
        return {"median": self.median, "quartile_1": low, "quartile_3": high, "num_samples": len(self.samples)}


def time_interleaved(
    functions: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, Timing]:
    """Times several functions in one run, one call of each a round, in an order that rotates and turns around.

    A machine that slows down for a while slows all of them, so that ratios of medians stay meaningful.

    Args:
        functions: name to function without arguments; what it returns is waited for with `block_until_ready`.
        rounds: timed calls of each function.
        warmup: calls of each function before the first timed one (compilation happens there).

    Raises:
        ValueError: if `rounds` is below 1 or there is nothing to time.
    """
    if rounds < 1:
        raise ValueError(f"`rounds` must be at least 1; got {rounds}")
    if not functions:
        raise ValueError("`functions` must name at least one function")
    for _ in range(warmup):
        for function in functions.values():
            jax.block_until_ready(function())
    names = list(functions)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        for name in alternated(names, index):
            start = time.perf_counter()
            jax.block_until_ready(functions[name]())
            samples[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def alternated(names: Sequence[Name], index: int) -> list[Name]:
    """Order of one round: rotated by half the index, turned around in odd rounds (AB, BA, ...)."""
    turn = (index // 2) % len(names)
    rotated = [*names[turn:], *names[:turn]]
    return rotated[::-1] if index % 2 else rotated


def ratio_of_medians(top: Timing, bottom: Timing) -> float:
    """Median over median; for interleaved timings of one run."""
    return top.median / bottom.median


@dataclasses.dataclass
class CompileCount:
    """Number of XLA compilations seen while a `count_compilations` block was open."""

    count: int = 0


_open_counts: list[CompileCount] = []
_is_listening = False


def _on_event(event: str, duration_secs: float, **kwargs: str | int) -> None:
    del duration_secs, kwargs
    if event == _COMPILE_EVENT:
        for counter in _open_counts:
            counter.count += 1


@contextlib.contextmanager
def count_compilations() -> Iterator[CompileCount]:
    """Counts XLA compilations in the block: a timed section that compiled was not warm."""
    global _is_listening
    if not _is_listening:
        # JAX offers no way to take one listener back, so a single one serves all blocks of the process.
        jax.monitoring.register_event_duration_secs_listener(_on_event)
        _is_listening = True
    counter = CompileCount()
    _open_counts.append(counter)
    try:
        yield counter
    finally:
        # By identity: two open counts with equal values are equal dataclasses.
        _open_counts[:] = [other for other in _open_counts if other is not counter]
