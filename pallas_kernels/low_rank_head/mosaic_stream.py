"""A ring of tiles in shared memory that the copy engine fills and the tensor cores empty (Mosaic GPU, Hopper).

Each CTA owns every n-th tile of the head's rows. A tile's columns are cut into chunks; a chunk of rows is one bulk
copy into one slot of the ring, and its slot is refilled as soon as its product is done. So while the statistics of
a tile are computed, all slots are in flight. The states, a few rows, either stay in shared memory for good or, if
they are too wide, travel with every chunk.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import _compat

# Rows of one wgmma instruction's first operand.
MMA_ROWS = 64
_SWIZZLES = (128, 64, 32)
_MAX_STAGES = 4
# Of the 227 KB that a CTA may have, the rest is left to outputs, barriers and scratch.
_RING_AND_STATES_BYTES = 196 << 10
_MAX_RESIDENT_BYTES = 96 << 10
_MAX_CHUNK_COLUMNS = 512
# A multiprocessor's share of the bandwidth times the latency of memory is about 40 KB; twice that keeps it busy.
_ENOUGH_BYTES = 80 << 10


@dataclasses.dataclass(frozen=True)
class Plan:
    """How one CTA cuts its work.

    Attributes:
        num_columns: width of a row, k.
        num_states: rows of the states, padded.
        tile_rows: rows of a tile.
        chunk: columns of a chunk; divides `num_columns`.
        stages: slots of the ring.
        resident: whether the states stay in shared memory.
        swizzle: bytes over which shared memory addresses are permuted; a row of a block is that wide.
    """

    num_columns: int
    num_states: int
    tile_rows: int
    chunk: int
    stages: int
    resident: bool
    swizzle: int

    @property
    def num_chunks(self) -> int:
        """Chunks of a tile."""
        return self.num_columns // self.chunk

    @property
    def transforms(self) -> tuple[Any, ...]:
        """Layout of matrices in shared memory: what wgmma reads without bank conflicts."""
        return (plgpu.TilingTransform((8, self.swizzle // 2)), plgpu.SwizzleTransform(self.swizzle))

    def scratch_types(self) -> dict[str, Any]:
        """Shared memory and barriers of the ring."""
        copies = 1 if self.resident else 2
        states = self.num_chunks if self.resident else self.stages
        return {
            "ring": plgpu.SMEM((self.stages, self.tile_rows, self.chunk), jnp.bfloat16, transforms=self.transforms),
            "states": plgpu.SMEM((states, self.num_states, self.chunk), jnp.bfloat16, transforms=self.transforms),
            "filled": plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages),
            "states_filled": plgpu.Barrier(num_arrivals=self.num_chunks if self.resident else 1),
        }


def plan(num_columns: int, num_states: int, *, tile_rows: int | None = None, reserved_bytes: int = 0) -> Plan:
    """Cuts rows of `num_columns` (a multiple of 16) into tiles and chunks that fit the shared memory.

    Args:
        num_columns: width of a row, k.
        num_states: rows of the states, padded.
        tile_rows: rows of a tile, a multiple of 64; None chooses.
        reserved_bytes: shared memory that the caller needs for large things of its own.
    """
    swizzle = next(size for size in _SWIZZLES if num_columns % (size // 2) == 0)
    resident = num_states * num_columns * 2 <= _MAX_RESIDENT_BYTES
    # Streamed states are read once a tile: larger tiles halve that traffic.
    tile = tile_rows or (MMA_ROWS if resident else 2 * MMA_ROWS)
    unit = swizzle // 2
    budget = _RING_AND_STATES_BYTES - reserved_bytes - (num_states * num_columns * 2 if resident else 0)
    slot_rows = tile + (0 if resident else num_states)
    chunks = [
        chunk
        for chunk in range(unit, min(num_columns, _MAX_CHUNK_COLUMNS) + 1, unit)
        if num_columns % chunk == 0 and 2 * slot_rows * chunk * 2 <= budget
    ]

    def stages(chunk: int) -> int:
        return min(_MAX_STAGES, budget // (slot_rows * chunk * 2))

    def worth(chunk: int) -> tuple[int, int, int]:
        in_flight = stages(chunk) * tile * chunk * 2
        return min(in_flight, _ENOUGH_BYTES), stages(chunk), in_flight

    # Enough bytes in flight first, then more slots: a product frees one slot at a time.
    chunk = max(chunks, key=worth)
    return Plan(
        num_columns=num_columns,
        num_states=num_states,
        tile_rows=tile,
        chunk=chunk,
        stages=stages(chunk),
        resident=resident,
        swizzle=swizzle,
    )


def stream_tiles(
    plan: Plan,
    rows: Any,
    states: Any,
    scratch: dict[str, Any],
    *,
    cta: Any,
    num_ctas: int,
    multiply: Callable[[list[Any], Any, Any], None],
    accumulators: list[tuple[int, int]],
    finish_block: Callable[[Any, list[Any], Any], Any],
    carry: Any,
) -> Any:
    """Multiplies all tiles of this CTA with the states.

    Args:
        plan: the cut.
        rows: reference to the head's rows in global memory, [V_padded, k].
        states: reference to the states in global memory, [num_states, k].
        scratch: references made from `plan.scratch_types()`.
        cta: index of this CTA.
        num_ctas: number of CTAs; at most the number of tiles.
        multiply: adds products of a block of 64 rows and the states of a chunk to a block's accumulators; called with
            (accumulator references, rows [64, chunk], states [num_states, chunk]).
        accumulators: shapes of a block's accumulators.
        finish_block: takes (carry, accumulator values, first row of the block), returns the next carry.
        carry: start of the carry.

    Returns:
        The last carry.
    """
    ring, filled = scratch["ring"], scratch["filled"]
    num_tiles = rows.shape[0] // plan.tile_rows
    my_tiles = lax.div(num_tiles - 1 - cta, num_ctas) + 1
    my_chunks = my_tiles * plan.num_chunks

    def fill(index: Any) -> None:
        slot = lax.rem(index, plan.stages)
        tile = cta + lax.div(index, plan.num_chunks) * num_ctas
        columns = pl.ds(lax.rem(index, plan.num_chunks) * plan.chunk, plan.chunk)
        source = rows.at[pl.ds(tile * plan.tile_rows, plan.tile_rows), columns]
        plgpu.copy_gmem_to_smem(source, ring.at[slot], filled.at[slot])
        if not plan.resident:
            plgpu.copy_gmem_to_smem(states.at[:, columns], scratch["states"].at[slot], filled.at[slot])

    for stage in range(plan.stages):
        pl.when(stage < my_chunks)(lambda stage=stage: fill(jnp.int32(stage)))
    if plan.resident:
        for chunk in range(plan.num_chunks):
            columns = pl.ds(chunk * plan.chunk, plan.chunk)
            plgpu.copy_gmem_to_smem(states.at[:, columns], scratch["states"].at[chunk], scratch["states_filled"])
        plgpu.barrier_wait(scratch["states_filled"])

    def tile_step(turn: Any, carry: Any) -> Any:
        def products(*references: Any) -> list[Any]:
            def chunk_step(chunk: Any, _: None) -> None:
                index = turn * plan.num_chunks + chunk
                slot = lax.rem(index, plan.stages)
                plgpu.barrier_wait(filled.at[slot])
                chunk_states = scratch["states"].at[chunk if plan.resident else slot]
                for block, of_block in enumerate(_blocks(references, len(accumulators))):
                    multiply(of_block, ring.at[slot, pl.ds(block * MMA_ROWS, MMA_ROWS)], chunk_states)
                plgpu.wgmma_wait(0)
                pl.when(index + plan.stages < my_chunks)(lambda: fill(index + plan.stages))

            lax.fori_loop(0, plan.num_chunks, chunk_step, None)
            return [reference[...] for reference in references]

        num_blocks = plan.tile_rows // MMA_ROWS
        scopes = [plgpu.ACC(shape, jnp.float32) for shape in accumulators] * num_blocks
        values = pl.run_scoped(products, *scopes)
        first_row = (cta + turn * num_ctas) * plan.tile_rows
        for block, of_block in enumerate(_blocks(values, len(accumulators))):
            carry = finish_block(carry, of_block, first_row + block * MMA_ROWS)
        return carry

    return lax.fori_loop(0, my_tiles, tile_step, carry)


def _blocks(items: Any, size: int) -> list[list[Any]]:
    return [list(items[start : start + size]) for start in range(0, len(items), size)]


def transposed(reference: Any) -> Any:
    """A transposed view for the second operand of wgmma."""
    return _compat.transpose(reference)
