"""Logits on Hopper: the same stream of rows, its products written to memory.

With more than 8 rows the batch is the first operand of wgmma, padded to 64 rows, so that an accumulator holds 64 tokens
of each row in the order of the result; only as many rows as the batch has (in eights) are copied out. With up to 8 rows
the tokens stay the first operand and the batch is padded to 8 only; each column of the products is then put together as
a row, and exactly as many rows as the batch has are written.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from pallas_kernels import _compat
from pallas_kernels.low_rank_head.mosaic_stream import MMA_ROWS, plan, stream_tiles, transposed

# Rows of a batch whose columns of products are written one by one.
FEW_ROWS = 8
_NUM_BUFFERS = 2
# 32 float32 columns are the 128 bytes of a swizzled row.
_OUT_TRANSFORMS = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def logits_kernel(
    states: Float[Array, "states k"],
    rows: Float[Array, "V_padded k"],
    num_valid: int,
    *,
    num_rows: int,
    num_ctas: int,
    interpret: Any = None,
) -> Float[Array, "num_rows V_padded"]:
    """Float32 logits of the first `num_rows` states; -inf from token `num_valid` on.

    Args:
        states: input of the last product, bfloat16; 8 of them, or 64.
        rows: a row a token, bfloat16.
        num_valid: ids from here on are not valid.
        num_rows: how many rows are written; a multiple of 8 if there are 64 states.
        num_ctas: at most so many CTAs.
        interpret: see `_compat.mosaic_kernel`.
    """
    few = states.shape[0] <= FEW_ROWS
    cut = plan(states.shape[1], states.shape[0], tile_rows=MMA_ROWS)
    num_ctas = min(num_ctas, rows.shape[0] // cut.tile_rows)
    shape = (MMA_ROWS, states.shape[0])
    token_axis = 0 if few else 1

    def body(states_ref: Any, rows_ref: Any, out: Any, scratch: dict[str, Any]) -> None:
        token_in_block, column = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA) for axis in (token_axis, 1)
        )

        def multiply(accumulators: list[Any], block_rows: Any, chunk_states: Any) -> None:
            operands = (block_rows, chunk_states) if few else (chunk_states, block_rows)
            plgpu.wgmma(accumulators[0], operands[0], transposed(operands[1]))

        def finish_block(turn: Any, values: list[Array], first_row: Any) -> Any:
            logits = jnp.where(first_row + token_in_block < num_valid, values[0], -jnp.inf)
            slot = lax.rem(turn, _NUM_BUFFERS)
            # The copy that read this buffer last must have left it.
            plgpu.wait_smem_to_gmem(_NUM_BUFFERS - 1, wait_read_only=True)
            if few:
                for row in range(num_rows):
                    # A sum with one term: the column as a vector.
                    scratch["out"][slot, row] = jnp.sum(jnp.where(column == row, logits, 0.0), axis=1)
            else:
                scratch["out"][slot] = logits
            plgpu.commit_smem()
            ready = scratch["out"].at[slot, pl.ds(0, num_rows)]
            plgpu.copy_smem_to_gmem(ready, out.at[:, pl.ds(first_row, MMA_ROWS)])
            return turn + 1

        stream_tiles(
            cut,
            rows_ref,
            states_ref,
            scratch,
            cta=lax.axis_index("cta"),
            num_ctas=num_ctas,
            multiply=multiply,
            accumulators=[shape],
            finish_block=finish_block,
            carry=jnp.int32(0),
        )
        plgpu.wait_smem_to_gmem(0)

    buffers = (
        plgpu.SMEM((_NUM_BUFFERS, num_rows, MMA_ROWS), jnp.float32)
        if few
        else plgpu.SMEM((_NUM_BUFFERS, *shape), jnp.float32, transforms=_OUT_TRANSFORMS)
    )
    return _compat.mosaic_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, rows.shape[0]), jnp.float32),
        scratch_types=[cut.scratch_types() | {"out": buffers}],
        grid=(num_ctas,),
        grid_names=("cta",),
        interpret=interpret,
    )(states, rows)
