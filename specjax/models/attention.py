"""Attention over a cache, shared by targets and drafters: masks, cache writes and the products."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

# A finite stand-in for minus infinity: a query that sees nothing (padding) gets a harmless mean, not NaN.
_HIDDEN_SCORE = float(np.finfo(np.float32).min)


def matmul_precision(dtype: jnp.dtype) -> lax.Precision:
    """Full precision for float32 operands, so that float32 means float32 on every backend."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT


def visibility_mask(
    start: Int[Array, "batch"],
    num_queries: int,
    num_slots: int,
    tree_mask: Bool[Array, "time block"] | Bool[np.ndarray, "time block"] | None = None,
) -> Bool[Array, "batch time slots"]:
    """Which cache slots each query of a packed block sees.

    Args:
        start: first slot of each row's block = number of committed tokens before it, [B].
        num_queries: T, queries.
        num_slots: S, slots in the cache.
        tree_mask: entry (t, j) says that query t sees block slot j, [T, N] for a block of N slots, of which the
            queries may be a part; None is causal.

    Returns:
        Mask [B, T, S]: slots before `start`, and the block slots that `tree_mask` allows.
    """
    offset = jnp.arange(num_slots, dtype=start.dtype)[None, :] - start[:, None]
    if tree_mask is None:
        return offset[:, None, :] <= jnp.arange(num_queries, dtype=start.dtype)[None, :, None]
    in_block = jnp.take(jnp.asarray(tree_mask), offset, axis=1, mode="fill", fill_value=False)
    # Negative indices would count from the end; they are the committed prefix, visible to all.
    return jnp.swapaxes(in_block, 0, 1) & (offset >= 0)[:, None, :] | (offset < 0)[:, None, :]


def update_cache(
    cache_array: Float[Array, "batch kv slots head_dim"],
    new: Float[Array, "batch kv time head_dim"],
    start: Int[Array, "batch"],
) -> Float[Array, "batch kv slots head_dim"]:
    """Writes a block into each row at the row's own slot, in place where the buffer is donated.

    Args:
        cache_array: keys or values of one layer, [B, KV, S, head_dim].
        new: the block, [B, KV, T, head_dim].
        start: first slot of each row, [B]; the caller guarantees `start + T <= S`.

    Returns:
        The updated array.

    Raises:
        ValueError: if the block is longer than the cache.
    """
    if new.shape[2] > cache_array.shape[2]:
        raise ValueError(f"a block must fit into the cache ({cache_array.shape[2]} slots); got {new.shape[2]} queries")
    new = new.astype(cache_array.dtype)
    if cache_array.shape[0] == 1:
        return lax.dynamic_update_slice(cache_array, new, (0, 0, start[0], 0))
    # One scatter of whole blocks: as fast as a chain of slices a row, and far quicker to compile.
    return jax.vmap(lambda rows, block, slot: lax.dynamic_update_slice(rows, block, (0, slot, 0)))(
        cache_array, new, start
    )


def attend(
    queries: Float[Array, "batch heads time head_dim"],
    keys: Float[Array, "batch kv slots head_dim"],
    values: Float[Array, "batch kv slots head_dim"],
    mask: Bool[Array, "batch time slots"],
) -> Float[Array, "batch time width"]:
    """Scaled dot-product attention with grouped queries; keys and values are never repeated.

    Args:
        queries: rotated queries, [B, H, T, head_dim]; head h uses key-value head h // (H / KV).
        keys: rotated keys, [B, KV, S, head_dim].
        values: values, [B, KV, S, head_dim].
        mask: which slots each query sees, [B, T, S].

    Returns:
        The heads' outputs side by side, [B, T, H * head_dim], in the dtype of `queries`.
    """
    batch, num_heads, time, head_dim = queries.shape
    num_kv_heads, num_slots = keys.shape[1], keys.shape[2]
    group = num_heads // num_kv_heads
    # The queries of one group are rows of one product with their shared keys.
    grouped = queries.reshape(batch, num_kv_heads, group * time, head_dim).astype(keys.dtype)
    # With a single query the CPU compiler writes the cache twice and copies all of it where a product reads
    # it; sums of elementwise products stay in place and are bound by the same memory traffic.
    single = batch * time == 1
    scores = _scores_single(grouped, keys) if single else _product("bkqd,bksd->bkqs", grouped, keys)
    scores = (scores * jnp.float32(head_dim**-0.5)).reshape(batch, num_kv_heads, group, time, num_slots)
    scores = jnp.where(mask[:, None, None], scores, jnp.float32(_HIDDEN_SCORE))
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    weights = weights.reshape(batch, num_kv_heads, group * time, num_slots)
    mixed = _mix_single(weights, values) if single else _product("bkqs,bksd->bkqd", weights, values)
    mixed = mixed.reshape(batch, num_heads, time, head_dim).astype(queries.dtype)
    return jnp.swapaxes(mixed, 1, 2).reshape(batch, time, num_heads * head_dim)


def _product(subscripts: str, left: Array, right: Array) -> Array:
    return jnp.einsum(
        subscripts, left, right, precision=matmul_precision(right.dtype), preferred_element_type=jnp.float32
    )


def _scores_single(queries: Array, keys: Array) -> Array:
    return jnp.sum(queries.astype(jnp.float32)[:, :, :, None, :] * keys.astype(jnp.float32)[:, :, None], axis=-1)


def _mix_single(weights: Array, values: Array) -> Array:
    return jnp.sum(weights.astype(jnp.float32)[..., None] * values.astype(jnp.float32)[:, :, None], axis=3)
