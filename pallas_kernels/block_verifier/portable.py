"""The reductions as portable Pallas bodies: compiled for TPU, interpreted on any platform.

A program sees 8 rows and a tile of the vocabulary. Rows that are no neighbours are gathered before, by XLA: a TPU
moves 8 rows at a time anyway.

    grid (row blocks, tiles)      tile t of row block r -> parts [t, 8 r .. 8 r + 7]
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from pallas_kernels.block_verifier.laws import LOG2_E, Exponents, combine_normalisers

ROWS = 8
TILE = 4096
GROUP = 512

# One number a row, beside the rows of a tile.
_COLUMN = pl.BlockSpec((ROWS, 1), lambda row, t: (row, 0))


def log_normalisers(
    target_logits: Float[Array, "target_rows vocab"],
    draft_logits: Float[Array, "draft_rows vocab"],
    target_scale: Float[Array, " target_rows"] | None,
    draft_scale: Float[Array, " draft_rows"] | None,
    *,
    tile: int = TILE,
    interpret: bool = False,
) -> tuple[Array, Array]:
    """Log-normalisers of the target's and of the draft's rows.

    Args:
        target_logits: [T, V].
        draft_logits: [D, V].
        target_scale: inverse temperatures times log2(e), [T]; None for temperature 1.
        draft_scale: the same of the draft's rows, [D].
        tile: entries of a row that a program sees.
        interpret: run on any platform.

    Returns:
        Natural logarithms, [T] and [D].
    """
    return (
        _row_log_normalisers(target_logits, target_scale, tile, interpret),
        _row_log_normalisers(draft_logits, draft_scale, tile, interpret),
    )


def _row_log_normalisers(logits: Array, scale: Array | None, tile: int, interpret: bool) -> Array:
    num_rows, vocab_size = logits.shape
    if scale is None:
        scale = jnp.full(num_rows, LOG2_E, jnp.float32)
    tile = min(tile, -(-vocab_size // 128) * 128)
    grid = (pl.cdiv(num_rows, ROWS), pl.cdiv(vocab_size, tile))
    parts = jax.ShapeDtypeStruct((grid[1], grid[0] * ROWS, 1), jnp.float32)
    part = pl.BlockSpec((None, ROWS, 1), lambda row, t: (t, row, 0))
    largest, total = pl.pallas_call(
        functools.partial(_normaliser_body, vocab_size=vocab_size),
        grid=grid,
        in_specs=[_COLUMN, pl.BlockSpec((ROWS, tile), lambda row, t: (row, t))],
        out_shape=[parts, parts],
        out_specs=[part, part],
        interpret=interpret,
        name="block_verifier_log_normalisers",
    )(scale[:, None], logits)
    return combine_normalisers(largest[:, :num_rows, 0].T, total[:, :num_rows, 0].T)


def _normaliser_body(scale_ref: Any, logits_ref: Any, largest_ref: Any, total_ref: Any, *, vocab_size: int) -> None:
    values = logits_ref[...].astype(jnp.float32) * scale_ref[...]
    exists = _columns(values.shape) < vocab_size
    values = jnp.where(exists, values, -jnp.inf)
    largest = jnp.max(values, axis=1, keepdims=True)
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    largest_ref[...] = largest
    total_ref[...] = jnp.sum(jnp.exp2(values - shift), axis=1, keepdims=True)


def residual_sums(
    target_logits: Float[Array, "target_rows vocab"],
    draft_logits: Float[Array, "draft_rows vocab"],
    rows: Int[Array, "2 pairs"],
    scales: Float[Array, "4 pairs"],
    *,
    width: int,
    tile: int = TILE,
    interpret: bool = False,
) -> Float[Array, "pairs blocks"]:
    """Residual masses of blocks of tokens.

    Args:
        target_logits: [T, V].
        draft_logits: [D, V].
        rows: rows of the target and of the draft, [2, pairs].
        scales: `laws.Exponents` stacked, [4, pairs].
        width: tokens of a block.
        tile: entries of a row that a program sees, about.
        interpret: run on any platform.

    Returns:
        sum of max(w q(v) - p(v), 0) over each block, [pairs, ceil(V / width)].
    """
    num_pairs, vocab_size = rows.shape[1], target_logits.shape[1]
    one_block = width >= vocab_size
    # One sum over everything is added up from groups.
    group = GROUP if one_block else width
    num_groups = pl.cdiv(vocab_size, group)
    groups_a_tile = max(min(tile // group, num_groups), 1)
    grid = (pl.cdiv(num_pairs, ROWS), pl.cdiv(num_groups, groups_a_tile))
    block = pl.BlockSpec((ROWS, groups_a_tile * group), lambda row, t: (row, t))
    sums = pl.pallas_call(
        functools.partial(_residual_body, vocab_size=vocab_size, group=group),
        grid=grid,
        in_specs=[_COLUMN] * 4 + [block] * 2,
        out_shape=jax.ShapeDtypeStruct((grid[1], grid[0] * ROWS, groups_a_tile), jnp.float32),
        out_specs=pl.BlockSpec((None, ROWS, groups_a_tile), lambda row, t: (t, row, 0)),
        interpret=interpret,
        name="block_verifier_residual_sums",
    )(*(scale[:, None] for scale in scales), target_logits[rows[0]], draft_logits[rows[1]])
    sums = jnp.swapaxes(sums[:, :num_pairs], 0, 1).reshape(num_pairs, -1)
    return jnp.sum(sums, axis=-1, keepdims=True) if one_block else sums[:, :num_groups]


def _residual_body(*refs: Any, vocab_size: int, group: int) -> None:
    *exponent_refs, target_ref, draft_ref, sums_ref = refs
    scales = Exponents(*(ref[...] for ref in exponent_refs))
    residual = residual_tile(scales, target_ref[...].astype(jnp.float32), draft_ref[...].astype(jnp.float32))
    residual = jnp.where(_columns(residual.shape) < vocab_size, residual, 0)
    parts = [
        jnp.sum(residual[:, start : start + group], axis=1, keepdims=True)
        for start in range(0, residual.shape[1], group)
    ]
    sums_ref[...] = jnp.concatenate(parts, axis=1)


def residual_tile(scales: Exponents, target: Array, draft: Array) -> Array:
    """max(w q - p, 0) of a tile; NaN stays NaN, which a maximum would drop on some chips."""
    mass = jnp.exp2(target * scales.target_scale + scales.target_offset)
    difference = mass - jnp.exp2(draft * scales.draft_scale + scales.draft_offset)
    return jnp.where(difference <= 0, 0, difference)


def _columns(shape: tuple[int, ...]) -> Array:
    return pl.program_id(1) * shape[1] + lax.broadcasted_iota(jnp.int32, shape, 1)
