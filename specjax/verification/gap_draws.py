"""Draws of gap tokens from the residual laws of many nodes at once, in two passes over the vocabulary.

The first pass adds up residual masses in blocks of about sqrt(V) tokens; a block is drawn by its mass, then a token of
the block. Noise for every token of every row would cost several times more than all the rest of a rule.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from specjax.verification.rows import block_size


def residual_masses(log_target: Array, log_draft: Array, uses_draft: Array) -> Array:
    """(q - p)_+ elementwise, or q where the row does not use the draft's law."""
    return jnp.maximum(jnp.exp(log_target) - jnp.where(uses_draft, jnp.exp(log_draft), 0), 0)


def draw_gap_tokens(
    rng_key: PRNGKeyArray,
    log_target_rows: Float[Array, "rows vocab"],
    log_draft_rows: Float[Array, "rows vocab"],
    uses_draft: np.ndarray,
    row_of_draw: np.ndarray,
) -> tuple[Int[Array, " draws"], Bool[Array, " rows"]]:
    """Independent draws from the residual laws of rows.

    Args:
        rng_key: key, consumed.
        log_target_rows: the target's laws, [R, V].
        log_draft_rows: the draft's laws, [R, V].
        uses_draft: whether a row's residual is (q - p)_+ or all of q, bool [R].
        row_of_draw: the row that each draw is from, int [M].

    Returns:
        The tokens [M], and for each row whether its residual has any mass [R]; draws from rows without are meaningless.
    """
    block_key, entry_key = jax.random.split(rng_key)
    vocab_size = log_target_rows.shape[1]
    dtype = log_target_rows.dtype
    width = block_size(vocab_size)
    num_blocks = -(-vocab_size // width)
    masses = residual_masses(log_target_rows, log_draft_rows, jnp.asarray(uses_draft)[:, None])
    masses = jnp.pad(masses, ((0, 0), (0, num_blocks * width - vocab_size)))
    block_masses = jnp.sum(masses.reshape(-1, num_blocks, width), axis=-1)

    num_draws = len(row_of_draw)
    noise = jax.random.gumbel(block_key, (num_draws, num_blocks), dtype)
    block = jnp.argmax(jnp.log(block_masses)[row_of_draw] + noise, axis=-1).astype(jnp.int32)
    tokens = block[:, None] * width + jnp.arange(width, dtype=jnp.int32)
    rows = jnp.asarray(row_of_draw)[:, None]
    take = {"mode": "fill", "fill_value": -jnp.inf}
    entries = residual_masses(
        log_target_rows.at[rows, tokens].get(**take),
        log_draft_rows.at[rows, tokens].get(**take),
        jnp.asarray(uses_draft)[rows],
    )
    noise = jax.random.gumbel(entry_key, (num_draws, width), dtype)
    entry = jnp.argmax(jnp.log(entries) + noise, axis=-1).astype(jnp.int32)
    return block * width + entry, jnp.sum(block_masses, axis=-1) > 0
