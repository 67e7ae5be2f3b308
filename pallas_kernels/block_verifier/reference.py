"""The reductions written down plainly, in float32 (float64 for float64 logits): what the others must equal."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_verifier.laws import Laws, Pairs, scaled_log_probs


def log_normalisers(logits: Float[Array, "rows vocab"], inverse_temperature: Float[Array, " rows"] | None) -> Array:
    """log sum_v exp(inverse_temperature * logits[v]) of each row; -inf without finite logits, NaN with NaN or +inf."""
    values = logits if logits.dtype == jnp.float64 else logits.astype(jnp.float32)
    if inverse_temperature is not None:
        values = values * inverse_temperature.astype(values.dtype)[:, None]
    largest = jnp.max(values, axis=-1, keepdims=True)
    shift = jnp.where(largest == -jnp.inf, 0, largest)
    return shift[:, 0] + jnp.log(jnp.sum(jnp.exp(values - shift), axis=-1))


def residual_sums(target: Laws, draft: Laws, pairs: Pairs, width: int) -> Float[Array, "pairs blocks"]:
    """sum of max(w q(v) - p(v), 0) over each block of `width` tokens, [pairs, ceil(V / width)]."""
    vocab_size = target.logits.shape[1]
    q = jnp.exp(scaled_log_probs(target, target.logits, jnp.arange(len(target.logits)))[jnp.asarray(pairs.target_row)])
    p = jnp.exp(scaled_log_probs(draft, draft.logits, jnp.arange(len(draft.logits)))[jnp.asarray(pairs.draft_row)])
    if pairs.log_weight is not None:
        q = jnp.exp(pairs.log_weight.astype(q.dtype))[:, None] * q
    if pairs.uses_draft is not None:
        p = jnp.where(jnp.asarray(pairs.uses_draft)[:, None], p, 0)
    residual = jnp.maximum(q - p, 0)
    blocks = range(0, vocab_size, width)
    return jnp.stack([jnp.sum(residual[:, start : start + width], axis=-1) for start in blocks], axis=-1)
