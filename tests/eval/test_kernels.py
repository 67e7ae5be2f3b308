"""The kernels' cost reports: floors from shapes, what is said without compiler or GPU, and the measurement itself."""

from __future__ import annotations

import dataclasses
import io
import json
import math

import pytest

from eval import kernels
from eval.kernel_compiled import KERNEL, XLA, add_measured_nu, static_report
from eval.kernel_engine import print_engine_step
from eval.kernel_floors import floors, head_floor, verifier_floor
from eval.kernel_inputs import operation
from eval.kernel_measure import differences, measure
from eval.kernel_tables import print_measured, print_static
from pallas_kernels.aot.chips import CHIPS
from pallas_kernels.block_verifier import shapes as verifier_shapes
from pallas_kernels.low_rank_head import shapes as head_shapes

H200 = CHIPS["h200"]


def test_floors_follow_from_shapes() -> None:
    floor = head_floor("greedy", head_shapes.LLAMA_8B, 1)
    assert floor.bytes == 2 * (4096 * 512 + 512 * 128256 + 4096)
    assert floor.microseconds(H200) == pytest.approx(28.2, abs=0.05)
    assert floor.nu == pytest.approx(0.129, abs=5e-4)
    assert head_floor("greedy", head_shapes.LLAMA_8B.full, 1).nu == 1
    assert head_floor("logits", head_shapes.LLAMA_8B, 64).bytes - floor.bytes == 4 * 64 * 128256 + 2 * 63 * 4096
    shape = verifier_shapes.get_shape("llama-3.1-8b batch 1, 8 x 8")
    assert verifier_floor("log_normalisers", shape).microseconds(H200) == pytest.approx(7.27, abs=0.01)
    assert verifier_floor("residual_masses", shape).bytes == 2 * 64 * 128256 * 2


def test_a_head_of_many_rows_is_bound_by_arithmetic() -> None:
    floor = dataclasses.replace(head_floor("greedy", head_shapes.LLAMA_8B, 1), flops=int(1e12))
    assert floor.microseconds(H200) == pytest.approx(1e6 * 1e12 / 989e12)


def test_the_static_report_says_what_is_missing() -> None:
    report = static_report("h200", list(floors((1,))), compile_programs=False)
    json.dumps(report, allow_nan=False)
    text = io.StringIO()
    print_static(report, text)
    assert "nothing was run" in text.getvalue()
    assert "No registers, memory and kernel counts: compilation was not asked for." in text.getvalue()
    assert len(text.getvalue().splitlines()) == 3 + len(report["rows"])
    with pytest.raises(ValueError, match="`--chip` must be one of a100, b200, h100, h200; got 'h300'"):
        static_report("h300", [])


def test_compiled_numbers_stand_beside_the_floor() -> None:
    report = static_report("h200", list(floors((1,)))[:6], compile_programs=False)
    kernel = {
        "kernels": ["a", "b"],
        "bytes_moved": 150_000_000,
        "temporary_bytes": 10,
        "mosaic_kernels": [{"registers": 101, "spill_bytes": 0, "smem_bytes": 7777}],
    }
    for row in report["rows"]:
        moved = 1_050_000_000 if row["shape"].endswith("full") else 150_000_000
        row |= {KERNEL: kernel | {"bytes_moved": moved}, XLA: {"error": "NotImplementedError: no"}}
    add_measured_nu(report["rows"])
    assert report["rows"][0]["nu_by_moved_bytes"] == pytest.approx(1 / 7)
    text = io.StringIO()
    print_static(report | {"missing": None}, text)
    assert " 101 " in text.getvalue()
    assert "7777 NotImplementedError: no" in text.getvalue()


@pytest.fixture
def tiny_floors(monkeypatch: pytest.MonkeyPatch) -> list:
    """Operations at shapes that a CPU can run."""
    low = head_shapes.HeadShape("tiny/d8", 64, 16, 384)
    monkeypatch.setitem(head_shapes.SHAPES, low.name, low)
    monkeypatch.setitem(head_shapes.SHAPES, low.full.name, low.full)
    shape = verifier_shapes.VerifierShape("tiny batch 1, 1 x 2", 1, 1, 2, 1024, "float32")
    monkeypatch.setitem(verifier_shapes.NAMED_SHAPES, shape.name, shape)
    return [
        head_floor("greedy", low, 2),
        head_floor("greedy", low.full, 2),
        verifier_floor("log_normalisers", shape),
        verifier_floor("residual_blocks", shape),
    ]


def test_the_measurement_checks_values_and_times(tiny_floors: list) -> None:
    chip = dataclasses.replace(H200, l2_bytes=0)
    report = measure(tiny_floors, chip, implementations=("pallas", "xla"), rounds=2, time_limit_seconds=0.0)
    assert {row["skipped"] for row in report["rows"]} == {"time limit"}
    report = measure(tiny_floors, chip, implementations=("xla",), rounds=2)
    assert report["failures"] == []
    assert len(report["rows"]) == 4
    assert all(math.isfinite(row["microseconds"]) for row in report["rows"])
    assert {row["shape"] for row in report["nu"]} == {"tiny/d8"}
    json.dumps(report, allow_nan=False)
    text = io.StringIO()
    print_measured(report | {"failures": ["greedy: differs"]}, text)
    assert "nu greedy" in text.getvalue()
    assert "WRONG VALUES: greedy: differs" in text.getvalue()


def test_wrong_values_are_told(tiny_floors: list) -> None:
    import jax

    from eval.kernel_inputs import make_buffers, make_variation

    floor = tiny_floors[3]
    key = jax.random.key(0)
    run = jax.jit(operation(floor, "xla"))
    right = run(make_buffers(key, floor), make_variation(key, floor))
    assert differences(floor, {"mosaic_gpu": right, "xla": right}) == []
    assert differences(floor, {"mosaic_gpu": right + 0.01, "xla": right}) == [
        "residual_blocks, tiny batch 1, 1 x 2, batch 1: mosaic_gpu differs from xla"
    ]


def test_the_engine_step_is_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    result = {
        "name": "engine step",
        "chip": "h200",
        "jax": "0.12.0",
        "kernels": ["fusion.1", "fusion.2", "call.3 (mosaic_gpu_v2)"],
        "bytes_moved": 16_000_000_000,
        "temporary_bytes": 2_000_000,
        "seconds": 3.0,
        "mosaic_kernels": [{"registers": 101, "spill_bytes": 0, "smem_bytes": 7777}],
    }
    print_engine_step(result)
    text = capsys.readouterr().out
    assert "3 kernels, operands and results 16.00 GB (look-ups whole), temporaries 2.0 MB" in text
    assert "     2  fusion" in text
    assert "     1  mosaic_gpu_v2" in text


def test_a_machine_without_gpu_is_told_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"`--run` needs a GPU; jax found cpu only"):
        kernels._this_chip()
