"""Settings of every test: strict dtype promotion, a fresh key fixture, and how parallel workers share the files."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def next_key() -> Callable[[], jax.Array]:
    """A function that returns another key at every call; statistical tests use literal keys instead."""
    counter = itertools.count(20260101)
    return lambda: jax.random.key(next(counter))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`, a file stays with one worker: its fixtures and compiled functions are made once, not once a worker."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log)
