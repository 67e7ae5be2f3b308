"""Interleaved timing and the compilation counter."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import pytest

from eval.timing import alternated, count_compilations, ratio_of_medians, time_interleaved


def test_order_turns_around_and_every_name_takes_every_place() -> None:
    names = ["a", "b", "c"]
    orders = [alternated(names, index) for index in range(6)]
    assert orders[:2] == [["a", "b", "c"], ["c", "b", "a"]]
    for place in range(3):
        assert sorted(order[place] for order in orders) == ["a", "a", "b", "b", "c", "c"]
    assert [alternated(["a", "b"], index) for index in range(2)] == [["a", "b"], ["b", "a"]]


def test_interleaved_timing_calls_each_function_equally_often() -> None:
    calls: list[str] = []
    timings = time_interleaved(
        {"short": lambda: calls.append("short"), "long": lambda: (calls.append("long"), time.sleep(0.01))},
        rounds=4,
        warmup=1,
    )
    assert calls.count("short") == calls.count("long") == 5
    assert len(timings["long"].samples) == 4
    assert ratio_of_medians(timings["long"], timings["short"]) > 1
    assert timings["long"].median >= 0.01
    assert timings["long"].to_json()["num_samples"] == 4


def test_results_are_waited_for() -> None:
    work = jax.jit(lambda x: jnp.linalg.matrix_power(x, 64))
    x = jnp.eye(300, dtype=jnp.float32)
    timing = time_interleaved({"work": lambda: work(x)}, rounds=3)["work"]
    start = time.perf_counter()
    jax.block_until_ready(work(x))
    assert timing.median > 0.05 * (time.perf_counter() - start)


def test_compilations_are_counted_while_the_block_is_open() -> None:
    function = jax.jit(lambda x: x * jnp.float32(3) + jnp.float32(1))
    with count_compilations() as outer:
        function(jnp.ones(3, jnp.float32))
        with count_compilations() as inner:
            function(jnp.ones(3, jnp.float32))
    assert outer.count >= 1
    assert inner.count == 0
    function(jnp.ones(5, jnp.float32))
    assert inner.count == 0


def test_faulty_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="`rounds` must be at least 1"):
        time_interleaved({"a": lambda: None}, rounds=0)
    with pytest.raises(ValueError, match="`functions` must name"):
        time_interleaved({}, rounds=1)
