"""Settings of every test: strict dtype promotion, and a fresh key fixture."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")


@pytest.fixture
def next_key() -> Callable[[], jax.Array]:
    """A function that returns another key at every call; statistical tests use literal keys instead."""
    counter = itertools.count(20260101)
    return lambda: jax.random.key(next(counter))
