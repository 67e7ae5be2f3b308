"""The reductions for Hopper: TMA streams tiles of the rows through shared memory, every law once.

A row of V logits is seen as V/G groups of G entries, 256 bytes each, and a tile is 64 groups. A CTA (one warpgroup)
owns one row, or pair of rows, and a share of its tiles:

    HBM  row [V/G, G] --TMA, up to STAGES tiles in flight--> SMEM [64, G] --> registers, one group a quad of lanes
         registers: statistics of each of the 64 groups; no exchange between warps, no barrier besides the pipeline's
         --> SMEM --TMA--> HBM parts [row, share, 64], added up by XLA

The running maximum of pass 1 is one number for each of the 64 places of a tile. A group belongs to one block of tokens,
so pass 2 hands out the sums of the groups, and blocks are sums of neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from pallas_kernels import _compat
from pallas_kernels.block_verifier.laws import LOG2_E, combine_normalisers, group_size

GROUPS_A_TILE = 64
STATISTICS_STAGES = 4
RESIDUAL_STAGES = 3
# Shares of rows are so large that about this many CTAs come out, some for each processor.
NUM_CTAS = 1056


def log_normalisers(
    target_logits: Float[Array, "target_rows vocab"],
    draft_logits: Float[Array, "draft_rows vocab"],
    target_scale: Float[Array, " target_rows"] | None,
    draft_scale: Float[Array, " draft_rows"] | None,
    *,
    num_ctas: int = NUM_CTAS,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """Log-normalisers of the target's and of the draft's rows.

    Args:
        target_logits: [T, V].
        draft_logits: [D, V].
        target_scale: inverse temperatures times log2(e), [T]; None for temperature 1.
        draft_scale: the same of the draft's rows, [D].
        num_ctas: about how many CTAs.
        interpret: from `_compat.mosaic_interpreter`, or None to compile.

    Returns:
        Natural logarithms, [T] and [D].
    """
    num_target_rows, vocab_size = target_logits.shape
    num_rows = num_target_rows + draft_logits.shape[0]
    group = group_size(target_logits.dtype)
    num_groups = vocab_size // group
    num_shares, tiles_a_share, num_tiles = _divide(num_groups, num_rows, num_ctas)

    scales = [scale for scale in (target_scale, draft_scale) if scale is not None]

    def body(*refs: Any) -> None:
        *scales_gmem, target_gmem, draft_gmem, parts_gmem, parts_smem = refs
        target_scale_gmem = None if target_scale is None else scales_gmem[0]
        draft_scale_gmem = None if draft_scale is None else scales_gmem[-1]
        row, share = lax.axis_index("row"), lax.axis_index("share")
        first = share * tiles_a_share

        def reduce_row(source: Any, scales: Any, source_row: Array) -> None:
            row_scale = jnp.float32(LOG2_E) if scales is None else scales[source_row]

            def step(index: Any, tile_smem: Any, carry: tuple[Array, Array]) -> tuple[Array, Array]:
                values = _load_tile(tile_smem) * row_scale
                return _online_normaliser(values, _existing_groups(first + index[0], num_groups, group), *carry)

            start = (_per_group(-jnp.inf, group), _per_group(0.0, group))
            largest, total = _stream(step, first, tiles_a_share, num_tiles, STATISTICS_STAGES, start)(
                [(source, source_row)], group
            )
            parts_smem[0, :] = largest
            parts_smem[1, :] = total
            _write_out(parts_smem, parts_gmem.at[row, share])

        @_when(row < num_target_rows)
        def _() -> None:
            reduce_row(target_gmem, target_scale_gmem, row)

        @_when(row >= num_target_rows)
        def _() -> None:
            reduce_row(draft_gmem, draft_scale_gmem, row - num_target_rows)

    from jax.experimental.pallas import mosaic_gpu as plgpu

    parts = _compat.mosaic_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, num_shares, 2, GROUPS_A_TILE), jnp.float32),
        scratch_types=[plgpu.SMEM((2, GROUPS_A_TILE), jnp.float32)],
        grid=(num_rows, num_shares),
        grid_names=("row", "share"),
        interpret=interpret,
    )(*scales, _grouped(target_logits), _grouped(draft_logits))
    largest, total = (parts[:, :, place].reshape(num_rows, -1) for place in range(2))
    combined = combine_normalisers(largest, total)
    return combined[:num_target_rows], combined[num_target_rows:]


def residual_sums(
    target_logits: Float[Array, "target_rows vocab"],
    draft_logits: Float[Array, "draft_rows vocab"],
    rows: Int[Array, "2 pairs"],
    scales: Float[Array, "4 pairs"],
    *,
    width: int,
    num_ctas: int = NUM_CTAS,
    interpret: Any = None,
) -> Float[Array, "pairs blocks"]:
    """Residual masses of blocks of tokens.

    Args:
        target_logits: [T, V].
        draft_logits: [D, V].
        rows: rows of the target and of the draft, [2, pairs].
        scales: `laws.Exponents` stacked, [4, pairs].
        width: tokens of a block.
        num_ctas: about how many CTAs.
        interpret: from `_compat.mosaic_interpreter`, or None to compile.

    Returns:
        sum of max(w q(v) - p(v), 0) over each block, [pairs, ceil(V / width)].
    """
    sums = _group_sums(target_logits, draft_logits, rows, scales, num_ctas, interpret)
    vocab_size = target_logits.shape[1]
    if width >= vocab_size:
        return jnp.sum(sums, axis=-1, keepdims=True)
    groups_a_block = width // group_size(target_logits.dtype)
    num_blocks = -(-vocab_size // width)
    missing = max(num_blocks * groups_a_block - sums.shape[1], 0)
    sums = jnp.pad(sums, ((0, 0), (0, missing)))[:, : num_blocks * groups_a_block]
    return jnp.sum(sums.reshape(-1, num_blocks, groups_a_block), axis=-1)


def _group_sums(
    target_logits: Array, draft_logits: Array, rows: Array, scales: Array, num_ctas: int, interpret: Any
) -> Float[Array, "pairs groups"]:
    """Residual masses of groups, zeros behind the last."""
    num_pairs, vocab_size = rows.shape[1], target_logits.shape[1]
    group = group_size(target_logits.dtype)
    num_groups = vocab_size // group
    num_shares, tiles_a_share, num_tiles = _divide(num_groups, num_pairs, num_ctas)

    def body(
        rows_gmem: Any, scales_gmem: Any, target_gmem: Any, draft_gmem: Any, sums_gmem: Any, sums_smem: Any
    ) -> None:
        pair, share = lax.axis_index("pair"), lax.axis_index("share")
        target_scale, target_offset, draft_scale, draft_offset = (scales_gmem[place, pair] for place in range(4))
        first = share * tiles_a_share
        # The last share may be shorter.
        for tile in range(tiles_a_share):
            sums_smem[tile, :] = _per_group(0.0, group)

        def step(index: Any, target_smem: Any, draft_smem: Any, carry: tuple[()]) -> tuple[()]:
            mass = jnp.exp2(_load_tile(target_smem) * target_scale + target_offset)
            difference = mass - jnp.exp2(_load_tile(draft_smem) * draft_scale + draft_offset)
            # Not a maximum: NaN must stay NaN.
            total = jnp.sum(jnp.where(difference <= 0, 0.0, difference), axis=1)
            sums_smem[index[0], :] = jnp.where(_existing_groups(first + index[0], num_groups, group), total, 0.0)
            return carry

        _stream(step, first, tiles_a_share, num_tiles, RESIDUAL_STAGES, ())(
            [(target_gmem, rows_gmem[0, pair]), (draft_gmem, rows_gmem[1, pair])], group
        )
        _write_out(sums_smem, sums_gmem.at[pair, share])

    from jax.experimental.pallas import mosaic_gpu as plgpu

    sums = _compat.mosaic_kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_pairs, num_shares, tiles_a_share, GROUPS_A_TILE), jnp.float32),
        scratch_types=[plgpu.SMEM((tiles_a_share, GROUPS_A_TILE), jnp.float32)],
        grid=(num_pairs, num_shares),
        grid_names=("pair", "share"),
        interpret=interpret,
    )(rows, scales, _grouped(target_logits), _grouped(draft_logits))
    return sums.reshape(num_pairs, -1)


def _divide(num_groups: int, num_rows: int, num_ctas: int) -> tuple[int, int, int]:
    """Shares of a row, tiles of a share (the last may have fewer) and tiles of a row."""
    num_tiles = -(-num_groups // GROUPS_A_TILE)
    wanted = min(-(-num_ctas // num_rows), num_tiles)
    tiles_a_share = -(-num_tiles // wanted)
    return -(-num_tiles // tiles_a_share), tiles_a_share, num_tiles


def _grouped(logits: Array) -> Array:
    rows, vocab_size = logits.shape
    group = group_size(logits.dtype)
    return logits.reshape(rows, vocab_size // group, group)


def _stream(
    step: Callable[..., Any], first: Array, tiles_a_share: int, num_tiles: int, stages: int, start: Any
) -> Callable[..., Any]:
    """Runs `step` over the tiles of a share, with up to `stages` of them in flight."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def run(sources: list[tuple[Any, Array]], group: int) -> Any:
        specs = [
            _compat.block_spec((None, GROUPS_A_TILE, group), lambda index, row=row: (row, first + index, 0))
            for _, row in sources
        ]
        count = jnp.minimum(tiles_a_share, num_tiles - first)
        return plgpu.emit_pipeline(
            step, grid=(count,), in_specs=specs, max_concurrent_steps=min(stages, tiles_a_share), init_carry=start
        )(*(source for source, _ in sources))

    return run


def _tile_layout(group: int) -> Any:
    """16 lanes hold a group, each 16 bytes of it: loads without bank conflicts, and sums that stay inside a warp."""
    from jax.experimental.mosaic.gpu import fragmented_array
    from jax.experimental.pallas import mosaic_gpu as plgpu

    # Of 8 groups each warp has two neighbours.
    tiling = fragmented_array.Tiling(((8, group), (2, group), (group // 16,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _load_tile(tile_smem: Any) -> Array:
    return _compat.load(tile_smem, _tile_layout(tile_smem.shape[1])).astype(jnp.float32)


def _per_group(value: float, group: int) -> Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.layout_cast(jnp.full((GROUPS_A_TILE,), value, jnp.float32), _tile_layout(group).reduce(1))


def _existing_groups(tile: Array, num_groups: int, group: int) -> Array:
    """Which of the 64 groups of a tile lie inside the row; what is read behind its end is arbitrary."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    place = plgpu.broadcasted_iota(jnp.int32, (GROUPS_A_TILE,), 0, layout=_tile_layout(group).reduce(1))
    return tile * GROUPS_A_TILE + place < num_groups


def _online_normaliser(values: Array, exists: Array, largest: Array, total: Array) -> tuple[Array, Array]:
    """One step of the running maximum and the sum relative to it, for each group."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    new = jnp.maximum(largest, jnp.where(exists, jnp.max(values, axis=1), -jnp.inf))
    shift = jnp.where(new == -jnp.inf, 0.0, new)
    wide = lax.broadcast_in_dim(shift, values.shape, (0,))
    wide = plgpu.layout_cast(wide, _tile_layout(values.shape[1]))
    sums = jnp.where(exists, jnp.sum(jnp.exp2(values - wide), axis=1), 0.0)
    return new, total * jnp.exp2(largest - shift) + sums


def _write_out(parts_smem: Any, parts_gmem: Any) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(parts_smem, parts_gmem)
    plgpu.wait_smem_to_gmem(0)


def _when(condition: Array) -> Callable[[Callable[[], None]], None]:
    from jax.experimental import pallas as pl

    return pl.when(condition)
