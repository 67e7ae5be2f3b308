"""The head at real shapes, compiled for H200 without one: registers, memory, instructions, kernels and bytes."""

from __future__ import annotations

import pytest

from eval.kernel_floors import HEAD_OPS, head_floor
from pallas_kernels import aot
from pallas_kernels.aot.chips import CHIPS
from pallas_kernels.low_rank_head import aot_cases, shapes

REASON = aot.why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

# (operation, shape, rows): (most registers, most kernels)
BOUNDS = {
    ("greedy", "llama-3.1-8b/d8", 1): (128, 6),
    ("greedy", "llama-3.1-8b/d8", 64): (200, 6),
    ("sample", "llama-3.1-8b/d8", 1): (128, 6),
    ("sample", "llama-3.1-8b/d8", 64): (255, 6),
    ("logits", "llama-3.1-8b/d8", 1): (128, 6),
    ("logits", "llama-3.1-8b/d8", 64): (160, 6),
    ("greedy", "gpt-oss-20b/d8", 1): (128, 6),
    ("greedy", "llama-3.1-8b/full", 1): (128, 6),
}
SLOW_BOUNDS = {
    ("greedy", "qwen3-30b-a3b/d8", 1): (128, 6),
    ("sample", "qwen3-30b-a3b/d8", 64): (255, 6),
    ("sample", "gpt-oss-20b/d8", 64): (255, 6),
    ("logits", "gpt-oss-20b/d8", 64): (160, 6),
    ("greedy", "llama-3.1-8b/full", 64): (255, 6),
    ("sample", "llama-3.1-8b/full", 64): (255, 6),
    ("logits", "llama-3.1-8b/full", 1): (160, 6),
    ("logits", "llama-3.1-8b/d8", 8): (128, 6),
    ("top_candidates", "llama-3.1-8b/d8", 1): (160, 16),
}


def compiled(bounds, chip="h200", implementation="mosaic_gpu"):
    cases = [aot_cases.case(*key, implementation) for key in bounds]
    return dict(zip(bounds, aot.compile_cases(chip, cases), strict=True))


@pytest.fixture(scope="module")
def results():
    return compiled(BOUNDS)


def table(results) -> str:
    lines = ["operation shape rows: registers, spills, shared memory, kernels, MB moved / weights' MB"]
    for (op, name, batch), result in results.items():
        (kernel,) = result["mosaic_kernels"]
        weights = shapes.SHAPES[name].weight_bytes()
        lines.append(
            f"{op} {name} {batch}: {kernel['registers']}, {kernel['spill_bytes']}, {kernel['smem_bytes']}, "
            f"{len(result['kernels'])}, {result['bytes_moved'] / 1e6:.1f} / {weights / 1e6:.1f}"
        )
    return "\n".join(lines)


def check(key, result, bounds) -> None:
    op, name, batch = key
    assert "error" not in result, result["error"]
    (kernel,) = result["mosaic_kernels"]
    most_registers, most_kernels = bounds[key]
    assert kernel["target"] == "sm_90a"
    assert kernel["spill_bytes"] == 0
    assert kernel["registers"] <= most_registers
    assert 0 < kernel["smem_bytes"] <= CHIPS["h200"].smem_per_block
    instructions = kernel["instructions"]
    assert instructions["LDL"] == instructions["STL"] == 0
    assert instructions["HGMMA"] > 0
    assert instructions["UTMALDG"] > 0
    if op in ("logits", "top_candidates"):
        # A single row of results is a plain bulk copy, more are a box of a tensor.
        assert instructions["UTMASTG"] + instructions["UBLKCP"] > 0
    assert len(result["kernels"]) <= most_kernels, result["kernels"]
    if op in HEAD_OPS:
        # Weights, states and, of `logits` alone, B*V floats, each once; the rest is padding and partial results.
        assert result["bytes_moved"] <= 1.05 * head_floor(op, shapes.SHAPES[name], batch).bytes


def test_the_kernels_keep_their_bounds(results, capsys):
    with capsys.disabled():
        print("\n" + table(results))
    for key, result in results.items():
        check(key, result, BOUNDS)


def test_a_single_row_moves_hardly_more_than_the_weights(results):
    for op, name in (("greedy", "llama-3.1-8b/d8"), ("logits", "llama-3.1-8b/d8"), ("greedy", "llama-3.1-8b/full")):
        moved = results[op, name, 1]["bytes_moved"]
        assert moved <= 1.01 * head_floor(op, shapes.SHAPES[name], 1).bytes
    nu = (
        results["greedy", "llama-3.1-8b/d8", 1]["bytes_moved"]
        / results["greedy", "llama-3.1-8b/full", 1]["bytes_moved"]
    )
    assert nu <= 0.14


def test_blackwell_takes_xla():
    key = ("greedy", "llama-3.1-8b/d8", 1)
    result = compiled([key], chip="b200", implementation=None)[key]
    assert "error" not in result
    assert result["mosaic_kernels"] == []
    refused = compiled([key], chip="b200")[key]
    assert "NotImplementedError" in refused["error"]


@pytest.mark.slow
def test_the_other_shapes_keep_their_bounds(capsys):
    results = compiled(SLOW_BOUNDS)
    with capsys.disabled():
        print("\n" + table(results))
    for key, result in results.items():
        check(key, result, SLOW_BOUNDS)
