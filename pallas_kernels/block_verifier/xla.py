"""The reductions for XLA: every platform, and the rules' own path on CPU.

Absent parts of `Laws` and `Pairs` cost nothing and change no bit, so that laws of plain log-probabilities take exactly
the sums that the rules would write themselves.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_verifier.laws import Laws, Pairs, Vector, scaled_log_probs, take_rows
from pallas_kernels.block_verifier.reference import log_normalisers as _row_log_normalisers


def log_normalisers(
    target_logits: Float[Array, "target_rows vocab"],
    draft_logits: Float[Array, "draft_rows vocab"],
    target_inverse_temperature: Float[Array, " target_rows"] | None,
    draft_inverse_temperature: Float[Array, " draft_rows"] | None,
) -> tuple[Array, Array]:
    """Log-normalisers of the target's and of the draft's rows; see `api.row_statistics`."""
    return (
        _row_log_normalisers(target_logits, target_inverse_temperature),
        _row_log_normalisers(draft_logits, draft_inverse_temperature),
    )


def residual_sums(target: Laws, draft: Laws, pairs: Pairs, width: int) -> Float[Array, "pairs blocks"]:
    """Residual masses of blocks of tokens; see `api.residual_sums`."""
    masses = residual_masses(target, draft, pairs)
    vocab_size = masses.shape[1]
    num_blocks = -(-vocab_size // width)
    if num_blocks == 1:
        return jnp.sum(masses, axis=-1, keepdims=True)
    masses = jnp.pad(masses, ((0, 0), (0, num_blocks * width - vocab_size)))
    return jnp.sum(masses.reshape(-1, num_blocks, width), axis=-1)


def residual_masses(target: Laws, draft: Laws, pairs: Pairs, tokens: Array | None = None) -> Float[Array, "pairs some"]:
    """max(w q(v) - p(v), 0) at every token, or at some tokens of each pair; tokens from V on have mass 0.

    Args:
        target: q, [rows, V].
        draft: p, [rows, V].
        pairs: the residuals that are asked for.
        tokens: tokens of each pair, int32 [pairs, some]; None for all.

    Returns:
        The masses, [pairs, V] or [pairs, some].
    """
    target_mass = jnp.exp(scaled_log_probs(target, _entries(target, pairs.target_row, tokens), pairs.target_row))
    if pairs.log_weight is not None:
        target_mass = jnp.exp(pairs.log_weight)[:, None] * target_mass
    draft_mass = jnp.exp(scaled_log_probs(draft, _entries(draft, pairs.draft_row, tokens), pairs.draft_row))
    if pairs.uses_draft is not None:
        draft_mass = jnp.where(jnp.asarray(pairs.uses_draft)[:, None], draft_mass, 0)
    return jnp.maximum(target_mass - draft_mass, 0)


def _entries(laws: Laws, rows: Vector, tokens: Array | None) -> jax.Array:
    if tokens is None:
        return take_rows(laws.logits, rows)
    return laws.logits.at[jnp.asarray(rows)[:, None], tokens].get(mode="fill", fill_value=-jnp.inf)
