"""Draws of gap tokens from the residual laws of many nodes at once, in two passes over the vocabulary.

The first pass adds up residual masses in blocks of about sqrt(V) tokens; a block is drawn by its mass, then a token of
the block. Noise for every token of every row would cost several times more than all the rest of a rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from pallas_kernels import block_verifier
from specjax.verification.rows import block_size, residual_sums


def residual_masses(log_target: Array, log_draft: Array, uses_draft: Array) -> Array:
    """(q - p)_+ elementwise, or q where the row does not use the draft's law."""
    return jnp.maximum(jnp.exp(log_target) - jnp.where(uses_draft, jnp.exp(log_draft), 0), 0)


def draw_gap_tokens(
    rng_key: PRNGKeyArray,
    target_log_laws: Float[Array, "nodes vocab"],
    draft_log_laws: Float[Array, "rows vocab"],
    *,
    target_row: np.ndarray,
    uses_draft: np.ndarray,
    row_of_draw: np.ndarray,
) -> tuple[Int[Array, " draws"], Bool[Array, " rows"]]:
    """Independent draws from the residual laws of rows.

    Args:
        rng_key: key, consumed.
        target_log_laws: the target's laws, [N+1, V].
        draft_log_laws: the draft's laws, [R, V].
        target_row: the target's row that each of the draft's is compared with, int [R].
        uses_draft: whether a row's residual is (q - p)_+ or all of q, bool [R].
        row_of_draw: the row that each draw is from, int [M].

    Returns:
        The tokens [M], and for each row whether its residual has any mass [R]; draws from rows without are meaningless.
    """
    block_key, entry_key = jax.random.split(rng_key)
    vocab_size = target_log_laws.shape[1]
    dtype = target_log_laws.dtype
    width = block_size(vocab_size)
    rows = np.arange(len(target_row), dtype=np.int32)
    pairs = block_verifier.Pairs(np.asarray(target_row, np.int32), rows, uses_draft=uses_draft)
    num_draws = len(row_of_draw)
    draws = block_verifier.draw_residuals(
        residual_sums(target_log_laws, draft_log_laws, pairs, width),
        block_verifier.Laws(target_log_laws),
        block_verifier.Laws(draft_log_laws),
        pairs,
        pair_of_draw=row_of_draw,
        block_noise=jax.random.gumbel(block_key, (num_draws, -(-vocab_size // width)), dtype),
        entry_noise=jax.random.gumbel(entry_key, (num_draws, width), dtype),
    )
    return draws.token, draws.has_mass
