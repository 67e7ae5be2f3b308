"""Times the kernels on a real GPU, after checking their values; `python -m eval.kernels --run`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from eval.kernel_floors import HEAD, Floor
from eval.kernel_inputs import make_buffers, make_variation, operation
from eval.provenance import describe_run
from pallas_kernels._platform import Implementation
from pallas_kernels.aot.chips import Chip

# Programs of a few and of many calls: their difference is free of the cost of starting and waiting.
CALLS = (4, 12)
# Buffers are rotated over more bytes than the cache holds.
CACHE_MULTIPLE = 3
IMPLEMENTATIONS: tuple[Implementation, ...] = ("mosaic_gpu", "xla")


def measure(
    floors: Sequence[Floor],
    chip: Chip,
    *,
    implementations: Sequence[Implementation] = IMPLEMENTATIONS,
    rounds: int = 30,
    time_limit_seconds: float = 460.0,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Checks and times every operation with every implementation.

    A program calls the operation on one buffer after the other; twelve calls less four, divided by eight, are the time
    of one, whatever the host does. Medians over rounds. What does not fit in the time limit is listed as skipped.

    Args:
        floors: operations and shapes, from `kernel_floors.floors`.
        chip: data sheet of the device.
        implementations: names; the last one is the yardstick of the values.
        rounds: timed runs of each program.
        time_limit_seconds: nothing is started after that.
        on_progress: told what comes next.

    Returns:
        A JSON-able dict: `rows`, `nu` of the low-rank heads, `failures` (values that differ), and what ran where.
    """
    begin = time.perf_counter()
    device = jax.devices()[0]
    rows: list[dict[str, Any]] = []
    failures: list[str] = []
    for number, floor in enumerate(floors):
        base = {
            "kernel": floor.kernel,
            "op": floor.op,
            "shape": floor.shape,
            "batch": floor.batch,
            "floor_us": floor.microseconds(chip),
        }
        if time.perf_counter() - begin > time_limit_seconds:
            rows += [base | {"implementation": name, "skipped": "time limit"} for name in implementations]
            continue
        if on_progress is not None:
            on_progress(f"{floor.op}, {floor.shape}, batch {floor.batch}")
        buffers = rotating_buffers(floor, chip, seed=number)
        variations = [make_variation(key, floor) for key in jax.random.split(jax.random.key(number), max(CALLS))]
        outputs: dict[str, Any] = {}
        for name in implementations:
            function = operation(floor, name)
            try:
                outputs[name] = jax.tree.map(np.asarray, jax.jit(function)(buffers[0], variations[0]))
            except NotImplementedError as error:
                rows.append(base | {"implementation": name, "skipped": str(error)})
                continue
            seconds = seconds_of_a_call(function, buffers, variations, rounds)
            rows.append(base | {"implementation": name, "microseconds": 1e6 * seconds})
        failures += differences(floor, outputs)
    return {
        "schema": 1,
        "kind": "kernels_measured",
        **describe_run(),
        "device": device.device_kind,
        "jax": f"jax {jax.__version__}, {device.client.platform_version.splitlines()[0]}",
        "rounds": rounds,
        "rows": rows,
        "nu": measured_nu(rows),
        "failures": failures,
        "seconds": time.perf_counter() - begin,
    }


def rotating_buffers(floor: Floor, chip: Chip, *, seed: int) -> list[Any]:
    """As many sets of buffers as it takes to fill the cache several times over, at most one a call."""
    count = min(max(-(-CACHE_MULTIPLE * chip.l2_bytes // max(floor.bytes, 1)), 2), max(CALLS))
    make = jax.jit(lambda key: make_buffers(key, floor))
    return [make(key) for key in jax.random.split(jax.random.key(seed), count)]


def seconds_of_a_call(function: Callable[..., Any], buffers: list[Any], variations: list[Any], rounds: int) -> float:
    """Median time of one call on the device."""
    programs = []
    for calls in CALLS:
        chosen = variations[:calls]

        def run(buffers: list[Any], chosen: list[Any]) -> list[Any]:
            return [function(buffers[place % len(buffers)], variation) for place, variation in enumerate(chosen)]

        compiled = jax.jit(run).lower(buffers, chosen).compile()
        jax.block_until_ready(compiled(buffers, chosen))
        programs.append((compiled, chosen))
    samples: list[float] = []
    for _ in range(rounds):
        times = []
        for compiled, chosen in programs:
            start = time.perf_counter()
            jax.block_until_ready(compiled(buffers, chosen))
            times.append(time.perf_counter() - start)
        samples.append((times[1] - times[0]) / (CALLS[1] - CALLS[0]))
    return statistics.median(samples)


def differences(floor: Floor, outputs: dict[str, Any]) -> list[str]:
    """Where an implementation's values differ from the last one's by more than rounding."""
    if len(outputs) < 2:
        return []
    *others, yardstick = outputs
    found = []
    for name in others:
        for ours, theirs in zip(jax.tree.leaves(outputs[name]), jax.tree.leaves(outputs[yardstick]), strict=True):
            if np.issubdtype(ours.dtype, np.integer):
                # Logits of bfloat16 products may tie within rounding.
                same = np.mean(ours == theirs) >= 0.9 or ours.size < 10
            else:
                tolerance = 3e-2 if floor.kernel == HEAD else 2e-5
                same = np.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
            if not same:
                found.append(f"{floor.op}, {floor.shape}, batch {floor.batch}: {name} differs from {yardstick}")
                break
    return found


def measured_nu(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Time of each low-rank head over that of the same implementation's full head, and over XLA's."""
    heads = {
        (row["op"], row["shape"], row["batch"], row["implementation"]): row["microseconds"]
        for row in rows
        if row["kernel"] == HEAD and "microseconds" in row
    }
    result = []
    for (op, shape, batch, name), own in heads.items():
        target, kind = shape.split("/")
        full = heads.get((op, f"{target}/full", batch, name))
        if kind != "full" and full:
            result.append({"op": op, "shape": shape, "batch": batch, "implementation": name, "nu": own / full})
    return result
