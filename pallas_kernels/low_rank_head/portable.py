"""The head as one `pl.pallas_call`: tokens' rows are streamed tile by tile, only statistics of a tile are written.

Compiled for TPU, interpreted on CPU. Each grid step reads one tile of rows and keeps nothing, so that the order of
steps does not matter; one small reduction joins the tiles.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, UInt32

from pallas_kernels.low_rank_head import noise as noise_lib
from pallas_kernels.low_rank_head.candidates import top_of_blocks
from pallas_kernels.low_rank_head.projection import project
from pallas_kernels.low_rank_head.statistics import HeadDraw, Part, merge_all, of_tile, tempering
from pallas_kernels.low_rank_head.weights import ROW_MULTIPLE, PreparedHead

# Rows of the batch fill whole bfloat16 tiles of a TPU register.
_ROW_MULTIPLE = 16
_TILE_BYTES = 2 << 20


def greedy(hidden: Float[Array, "batch d"], head: PreparedHead, *, interpret: bool = False) -> HeadDraw:
    """See `api.greedy`."""
    return _statistics(hidden, head, None, None, interpret)


def sample(
    hidden: Float[Array, "batch d"],
    head: PreparedHead,
    key_words: UInt32[Array, "batch 2"],
    temperature: Float[Array, "batch"],
    *,
    interpret: bool = False,
) -> HeadDraw:
    """See `api.sample`."""
    inverse, noise_scale = tempering(temperature)
    return _statistics(hidden, head, key_words, jnp.stack([inverse, noise_scale], axis=1), interpret)


def logits(hidden: Float[Array, "batch d"], head: PreparedHead, *, interpret: bool = False) -> Array:
    """Float32 logits [B, V], -inf where a token is not valid."""
    states = project(hidden, head, _ROW_MULTIPLE, in_parts=False)
    tile = _tile_rows(head)
    batch = states.shape[0]
    values = pl.pallas_call(
        functools.partial(_logits_body, num_valid=head.num_valid_tokens),
        grid=(pl.cdiv(head.rows.shape[0], tile),),
        in_specs=[_whole(states), _tile_of(head, tile)],
        out_specs=pl.BlockSpec((batch, tile), lambda step: (0, step)),
        out_shape=jax.ShapeDtypeStruct((batch, head.rows.shape[0]), jnp.float32),
        interpret=interpret,
        name="low_rank_head_logits",
    )(states, head.rows)
    return values[: hidden.shape[0], : head.vocab_size]


def top_candidates(
    hidden: Float[Array, "batch d"], head: PreparedHead, count: int, *, interpret: bool = False
) -> tuple[Array, Array]:
    """See `api.top_candidates`."""
    return top_of_blocks(logits(hidden, head, interpret=interpret), count)


def _statistics(
    hidden: Array, head: PreparedHead, key_words: Array | None, tempering: Array | None, interpret: bool
) -> HeadDraw:
    states = project(hidden, head, _ROW_MULTIPLE, in_parts=False)
    batch, tile = states.shape[0], _tile_rows(head)
    num_tiles = pl.cdiv(head.rows.shape[0], tile)
    extra = []
    if key_words is not None and tempering is not None:
        padding = ((0, batch - hidden.shape[0]), (0, 0))
        extra = [jnp.pad(key_words, padding), jnp.pad(tempering, padding)]
    dtypes = (jnp.float32, jnp.float32, jnp.int32, jnp.float32)
    parts = pl.pallas_call(
        functools.partial(_statistics_body, tile=tile, num_valid=head.num_valid_tokens),
        grid=(num_tiles,),
        in_specs=[_whole(states), *(_whole(array) for array in extra), _tile_of(head, tile)],
        out_specs=[pl.BlockSpec((None, 1, batch), lambda step: (step, 0, 0)) for _ in dtypes],
        out_shape=[jax.ShapeDtypeStruct((num_tiles, 1, batch), dtype) for dtype in dtypes],
        interpret=interpret,
        name="low_rank_head_statistics",
    )(states, *extra, head.rows)
    return merge_all(Part(*(part[:, 0, : hidden.shape[0]] for part in parts)))


def _statistics_body(state_ref: Any, *refs: Any, tile: int, num_valid: int) -> None:
    *extra, rows_ref, logsumexp_ref, best_ref, token_ref, log_prob_ref = refs
    values = _dot(state_ref[...], rows_ref[...])
    token = pl.program_id(0) * tile + lax.broadcasted_iota(jnp.int32, values.shape, 1)
    scores = None
    if extra:
        keys_ref, tempering_ref = extra
        values = values * tempering_ref[:, 0:1]
        words = [jnp.broadcast_to(keys_ref[:, word : word + 1], values.shape) for word in (0, 1)]
        scores = values + tempering_ref[:, 1:2] * noise_lib.gumbel(words[0], words[1], token)
    part = of_tile(values, scores, token, token < num_valid)
    for ref, value in zip((logsumexp_ref, best_ref, token_ref, log_prob_ref), part, strict=True):
        ref[...] = value[None]


def _logits_body(state_ref: Any, rows_ref: Any, out_ref: Any, *, num_valid: int) -> None:
    values = _dot(state_ref[...], rows_ref[...])
    token = pl.program_id(0) * values.shape[1] + lax.broadcasted_iota(jnp.int32, values.shape, 1)
    out_ref[...] = jnp.where(token < num_valid, values, -jnp.inf)


def _dot(states: Array, rows: Array) -> Array:
    precision = lax.Precision.HIGHEST if rows.dtype == jnp.float32 else lax.Precision.DEFAULT
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(states, rows, dimensions, precision=precision, preferred_element_type=jnp.float32)


def _tile_rows(head: PreparedHead) -> int:
    """Rows of a tile: whole multiples of the padding, about 2 MB, so that two of them fit with everything else."""
    row_bytes = head.inner_size * head.rows.dtype.itemsize
    tile = max(_TILE_BYTES // row_bytes // ROW_MULTIPLE, 1) * ROW_MULTIPLE
    return min(tile, head.rows.shape[0])


def _whole(array: Array) -> pl.BlockSpec:
    return pl.BlockSpec(array.shape, lambda step: (0,) * array.ndim)


def _tile_of(head: PreparedHead, tile: int) -> pl.BlockSpec:
    return pl.BlockSpec((tile, head.inner_size), lambda step: (step, 0))
