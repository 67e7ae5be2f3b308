"""Console output of the stages of a run: one line each, with the time it took."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stage(name: str) -> Iterator[Callable[[str], None]]:
    """Times a stage; the function it gives takes the stage's summary, which is printed at the end."""
    start = time.perf_counter()
    summaries: list[str] = []
    yield summaries.append
    seconds = time.perf_counter() - start
    print(f"[{name}] {'; '.join(summaries)} ({seconds:.1f} s)", flush=True)
