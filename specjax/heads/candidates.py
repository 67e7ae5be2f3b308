"""Exact logits of a few chosen tokens, everything else left out: the second half of preview and routed heads."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from specjax.heads.base import matmul


def rescored(
    rows: Float[Array, "vocab width"],
    hidden: Float[Array, "... width"],
    scores: Float[Array, "... vocab"],
    num_candidates: int,
) -> Float[Array, "... vocab"]:
    """Exact logits of the tokens with the highest scores, -inf for all others.

    Products and sums are float32 whatever the rows' dtype: bfloat16 products of single rows would be off by per cents.

    Args:
        rows: rows of the dense head, [V, d].
        hidden: normed states, [..., d].
        scores: previews, [..., V].
        num_candidates: tokens that are rescored, C; at most V.

    Returns:
        Float32 logits, [..., V].
    """
    ids = lax.top_k(scores, num_candidates)[1]
    if ids.size > rows.shape[0]:
        # More rows are wanted in all than there are: one product over all of them reads less.
        logits = matmul(hidden.astype(jnp.float32), rows.astype(jnp.float32).T)
        values = jnp.take_along_axis(logits, ids, axis=-1)
    else:
        values = _row_products(rows, hidden, ids)
    return scattered(values, ids, scores.shape[-1])


def scattered(
    values: Float[Array, "... candidates"], ids: Int[Array, "... candidates"], vocab_size: int
) -> Float[Array, "... vocab"]:
    """Puts values at their ids, -inf elsewhere; ids past the vocabulary are left out."""
    lead = values.shape[:-1]
    flat_values, flat_ids = values.reshape(-1, values.shape[-1]), ids.reshape(-1, ids.shape[-1])
    empty = jnp.full((flat_values.shape[0], vocab_size), -jnp.inf, jnp.float32)
    filled = jax.vmap(lambda row, places, new: row.at[places].set(new, mode="drop"))(empty, flat_ids, flat_values)
    return filled.reshape(*lead, vocab_size)


def _row_products(
    rows: Float[Array, "vocab width"], hidden: Float[Array, "... width"], ids: Int[Array, "... candidates"]
) -> Float[Array, "... candidates"]:
    states = hidden.astype(jnp.float32)
    gathered = jnp.take(rows, ids, axis=0, mode="clip").astype(jnp.float32)
    return jnp.einsum("...cd,...d->...c", gathered, states, precision=lax.Precision.HIGHEST)
