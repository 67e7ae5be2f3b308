"""The verifier's passes at real shapes, compiled for H200 without one: registers, memory, kernels and bytes."""

from __future__ import annotations

import pytest

from pallas_kernels import aot
from pallas_kernels.aot.chips import CHIPS
from pallas_kernels.block_verifier import aot_cases
from pallas_kernels.block_verifier.shapes import get_shape

REASON = aot.why_unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=REASON or "")

LLAMA_1 = "llama-3.1-8b batch 1, 1 x 4"
LLAMA_64 = "llama-3.1-8b batch 64, 1 x 4"
DRAFTS_8 = "llama-3.1-8b batch 1, 8 x 8"
# (operation, shape): (most registers, most bytes of shared memory, most kernels)
BOUNDS = {
    ("row_statistics", LLAMA_1): (128, 72_000, 4),
    ("row_statistics", DRAFTS_8): (136, 72_000, 4),
    ("residual_masses", LLAMA_1): (104, 104_000, 3),
    ("residual_masses", DRAFTS_8): (168, 104_000, 3),
    ("residual_blocks", LLAMA_64): (104, 108_000, 3),
}
SLOW_BOUNDS = {
    ("row_statistics", LLAMA_64): (128, 72_000, 4),
    ("residual_masses", LLAMA_64): (104, 108_000, 3),
    ("residual_blocks", "qwen3-30b-a3b batch 1, 1 x 4"): (104, 104_000, 3),
    ("row_statistics", "gpt-oss-20b batch 64, 1 x 4"): (128, 72_000, 4),
    ("residual_blocks", "gpt-oss-20b batch 64, 1 x 4"): (104, 108_000, 3),
}


def compiled(keys, chip="h200", implementation="mosaic_gpu"):
    """Results by key, in one process."""
    cases = [aot_cases.case(*key, implementation) for key in keys]
    return dict(zip(keys, aot.compile_cases(chip, cases), strict=True))


def laws_bytes(op: str, shape_name: str) -> int:
    """What one read of each law moves."""
    shape = get_shape(shape_name)
    return shape.statistics_bytes if op == "row_statistics" else shape.residual_bytes


def table(results) -> str:
    """A line a case."""
    lines = ["operation, shape: registers, spills, shared memory, kernels, MB moved / one read of each law"]
    for (op, name), result in results.items():
        (kernel,) = result["mosaic_kernels"]
        lines.append(
            f"{op}, {name}: {kernel['registers']}, {kernel['spill_bytes']}, {kernel['smem_bytes']}, "
            f"{len(result['kernels'])}, {result['bytes_moved'] / 1e6:.1f} / {laws_bytes(op, name) / 1e6:.1f}"
        )
    return "\n".join(lines)


def check(key, result, bounds) -> None:
    """No spills, bulk copies, and each law read once."""
    op, name = key
    assert "error" not in result, result["error"]
    (kernel,) = result["mosaic_kernels"]
    most_registers, most_smem, most_kernels = bounds[key]
    assert kernel["target"] == "sm_90a"
    assert kernel["spill_bytes"] == 0
    assert kernel["registers"] <= most_registers
    assert kernel["smem_bytes"] <= min(most_smem, CHIPS["h200"].smem_per_block)
    instructions = kernel["instructions"]
    assert instructions["LDL"] == instructions["STL"] == 0
    assert instructions["UTMALDG"] > 0
    assert instructions["MUFU.EX2"] > 0
    assert len(result["kernels"]) <= most_kernels, result["kernels"]
    # Operands are counted whole: the target's last row in pass 2, and all logits once more where pass 1 gathers tokens.
    shape = get_shape(name)
    operands = (shape.num_target_rows + shape.num_draft_rows) * shape.row_bytes
    counted = 2 if op == "row_statistics" else 1
    assert result["bytes_moved"] <= (counted + 0.1) * operands, (result["bytes_moved"], operands)
    assert result["temporary_bytes"] <= 0.06 * operands


def test_the_passes_keep_their_bounds(capsys) -> None:
    results = compiled(BOUNDS)
    with capsys.disabled():
        print("\n" + table(results))
    for key, result in results.items():
        check(key, result, BOUNDS)


def test_blackwell_takes_xla() -> None:
    key = ("residual_masses", LLAMA_1)
    result = compiled([key], chip="b200", implementation=None)[key]
    assert "error" not in result
    assert result["mosaic_kernels"] == []
    refused = compiled([key], chip="b200")[key]
    assert "NotImplementedError" in refused["error"]


@pytest.mark.slow
def test_the_other_shapes_keep_their_bounds(capsys) -> None:
    results = compiled(SLOW_BOUNDS)
    with capsys.disabled():
        print("\n" + table(results))
    for key, result in results.items():
        check(key, result, SLOW_BOUNDS)
