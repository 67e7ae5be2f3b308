"""A long process must not keep every program it ever compiled."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from eval.compiled_programs import num_compiled_programs, release_compiled_programs


class Circular:
    """Refers to itself, as engines do, so that only the collector finds it."""

    def __init__(self, factor: float) -> None:
        self.run: Callable[[jax.Array], jax.Array] = jax.jit(lambda x: self.factor * x)
        self.factor = factor


def test_programs_of_dropped_and_of_living_objects_are_freed_and_made_again() -> None:
    release_compiled_programs()
    before = num_compiled_programs()
    living = Circular(2.0)
    for factor in range(1, 6):
        Circular(float(factor)).run(jnp.ones(3))
    assert living.run(jnp.ones(3)).tolist() == [2.0] * 3
    assert num_compiled_programs() >= before + 6
    release_compiled_programs()
    assert num_compiled_programs() <= before
    assert living.run(jnp.ones(3)).tolist() == [2.0] * 3
