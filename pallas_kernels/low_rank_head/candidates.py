"""The greatest C of V logits without sorting V of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_BLOCK = 128


def top_of_blocks(logits: Float[Array, "batch vocab"], count: int) -> tuple[Array, Array]:
    """Ids [B, C] and values [B, C] of the greatest logits, in falling order, the lower id first among equals.

    Only the C blocks with the greatest maxima can hold one of them: any other block is beaten by C blocks. So V/128
    maxima and C*128 logits are ranked in place of V. NaN counts as greatest.
    """
    batch, vocab_size = logits.shape
    logits = nan_as_greatest(logits)
    padded = jnp.pad(logits, ((0, 0), (0, -vocab_size % _BLOCK)), constant_values=-jnp.inf)
    blocks = padded.reshape(batch, -1, _BLOCK)
    if blocks.shape[1] <= count:
        values, token = jax.lax.top_k(logits, count)
        return token.astype(jnp.int32), values
    _, best = jax.lax.top_k(jnp.max(blocks, axis=-1), count)
    # In the order of the vocabulary, so that top_k's rule for equal values is the rule for ids.
    best = jnp.sort(best, axis=-1)
    kept = jnp.take_along_axis(blocks, best[..., None], axis=1)
    values, index = jax.lax.top_k(kept.reshape(batch, -1), count)
    block = jnp.take_along_axis(best, index // _BLOCK, axis=1)
    return (block * _BLOCK + index % _BLOCK).astype(jnp.int32), values


def nan_as_greatest(logits: Float[Array, "batch vocab"]) -> Float[Array, "batch vocab"]:
    """The same logits without negative NaN, which top_k ranks below -inf: tokens that are not there would be taken."""
    return jnp.where(jnp.isnan(logits), jnp.nan, logits)
