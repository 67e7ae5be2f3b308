"""Logits on Hopper: the same stream of rows, multiplied the other way round and written to memory.

Here the batch is the first operand of wgmma, padded to 64 rows, so that an accumulator holds 64 tokens of each row
in the order of the result. Only as many rows as the batch has (in eights) are copied out.
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

_NUM_BUFFERS = 2
# 32 float32 columns are the 128 bytes of a swizzled row.
_OUT_TRANSFORMS = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))


def logits_kernel(
    states: Float[Array, "64 k"],
    rows: Float[Array, "V_padded k"],
    num_valid: int,
    *,
    num_rows: int,
    num_ctas: int,
    interpret: Any = None,
) -> Float[Array, "num_rows V_padded"]:
    """Float32 logits of the first `num_rows` states, a multiple of 8; -inf from token `num_valid` on."""
    cut = plan(states.shape[1], MMA_ROWS, tile_rows=MMA_ROWS)
    num_ctas = min(num_ctas, rows.shape[0] // cut.tile_rows)
    shape = (MMA_ROWS, MMA_ROWS)

    def body(states_ref: Any, rows_ref: Any, out: Any, scratch: dict[str, Any]) -> None:
        column_in_block = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)

        def multiply(accumulators: list[Any], block_rows: Any, chunk_states: Any) -> None:
            plgpu.wgmma(accumulators[0], chunk_states, transposed(block_rows))

        def finish_block(turn: Any, values: list[Array], first_row: Any) -> Any:
            buffer = scratch["out"].at[lax.rem(turn, _NUM_BUFFERS)]
            # The copy that read this buffer last must have left it.
            plgpu.wait_smem_to_gmem(_NUM_BUFFERS - 1, wait_read_only=True)
            buffer[...] = jnp.where(first_row + column_in_block < num_valid, values[0], -jnp.inf)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, num_rows)], out.at[:, pl.ds(first_row, MMA_ROWS)])
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

    return _compat.mosaic_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, rows.shape[0]), jnp.float32),
        scratch_types=[
            cut.scratch_types() | {"out": plgpu.SMEM((_NUM_BUFFERS, *shape), jnp.float32, transforms=_OUT_TRANSFORMS)}
        ],
        grid=(num_ctas,),
        grid_names=("cta",),
        interpret=interpret,
    )(states, rows)
