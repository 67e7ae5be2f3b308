"""What the kernels' operations must cost at least: bytes, operations, and the time a chip's data sheet allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pallas_kernels.aot.chips import Chip
from pallas_kernels.block_verifier import shapes as verifier_shapes
from pallas_kernels.low_rank_head import shapes as head_shapes

HEAD = "low_rank_head"
VERIFIER = "block_verifier"
HEAD_OPS = ("greedy", "sample", "logits")
VERIFIER_OPS = ("log_normalisers", "residual_masses", "residual_blocks")
BATCHES = (1, 64)

# Multiply, shift, power of two, add; in pass 2 twice the first three, a difference, a maximum and a sum.
_OPERATIONS_AN_ENTRY = {"log_normalisers": 4, "residual_masses": 9, "residual_blocks": 9}


@dataclasses.dataclass(frozen=True)
class Floor:
    """Least cost of one operation at one named shape.

    Attributes:
        kernel: "low_rank_head" or "block_verifier".
        op: operation.
        shape: name of the shape.
        batch: rows of the head, or requests of the verification.
        bytes: of weights, logits and results that have to be moved once.
        flops: arithmetic operations.
        nu: bytes over those of the full head at the same batch; None for the verifier.
    """

    kernel: str
    op: str
    shape: str
    batch: int
    bytes: int
    flops: int
    nu: float | None

    def microseconds(self, chip: Chip) -> float:
        """The larger of the time to move the bytes and, for the head, that of its products on tensor cores."""
        seconds = self.bytes / chip.memory_bandwidth
        if self.kernel == HEAD:
            seconds = max(seconds, self.flops / chip.bf16_flops)
        return 1e6 * seconds


def floors(batches: tuple[int, ...] = BATCHES) -> Iterator[Floor]:
    """All operations at the named shapes of the low-rank and full heads, then of the verifier."""
    for op in HEAD_OPS:
        for shape in head_shapes.SHAPES.values():
            for batch in batches:
                yield head_floor(op, shape, batch)
    for op in VERIFIER_OPS:
        for shape in verifier_shapes.NAMED_SHAPES.values():
            if shape.batch in batches:
                yield verifier_floor(op, shape)


def head_floor(op: str, shape: head_shapes.HeadShape, batch: int) -> Floor:
    """A head in bfloat16: weights once, hidden states, and the float32 logits where they are asked for."""
    size, full = (_head_bytes(op, head, batch) for head in (shape, shape.full))
    down = 0 if shape.rank is None else shape.hidden_size * shape.rank
    flops = 2 * batch * (down + shape.inner_size * shape.vocab_size)
    return Floor(HEAD, op, shape.name, batch, size, flops, size / full)


def _head_bytes(op: str, shape: head_shapes.HeadShape, batch: int) -> int:
    logits = 4 * batch * shape.vocab_size if op == "logits" else 0
    return shape.weight_bytes() + 2 * batch * shape.hidden_size + logits


def verifier_floor(op: str, shape: verifier_shapes.VerifierShape) -> Floor:
    """A pass of the verifier: each law that it needs once."""
    size = shape.statistics_bytes if op == "log_normalisers" else shape.residual_bytes
    rows = shape.num_draft_rows + (shape.num_target_rows if op == "log_normalisers" else 0)
    flops = _OPERATIONS_AN_ENTRY[op] * rows * shape.vocab_size
    return Floor(VERIFIER, op, shape.name, shape.batch, size, flops, None)
