"""Tokens drawn from residual laws in two levels, by noise that the caller brings.

A block of tokens is drawn by its residual mass, then a token of the block: the largest of log mass + noise, with
standard Gumbel noise, at either level. The law is that of one Gumbel-argmax over the whole row; noise is needed for
ceil(V / width) + width places of each draw only, and the second level reads one block of each law.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.block_verifier.laws import Laws, Pairs, Vector, pairs_of, scaled_log_probs
from pallas_kernels.block_verifier.xla import residual_masses


class Draws(NamedTuple):
    """Tokens drawn from residuals.

    Attributes:
        token: int32 [draws]; in [0, V) whatever the rows hold, meaningless where the residual has no mass.
        has_mass: whether each pair's residual has mass, bool [pairs].
    """

    token: Array
    has_mass: Array


def draw_residuals(
    sums: Float[Array, "pairs blocks"],
    target: Laws,
    draft: Laws,
    pairs: Pairs,
    *,
    pair_of_draw: Vector,
    block_noise: Float[Array, "draws blocks"],
    entry_noise: Float[Array, "draws width"],
) -> Draws:
    """Draws tokens with probabilities in proportion to max(w q(v) - p(v), 0).

    Args:
        sums: from `residual_sums` of the same pairs, blocks of `width` tokens.
        target: q.
        draft: p.
        pairs: the pairs.
        pair_of_draw: the pair whose residual each draw is from, int [draws].
        block_noise: standard Gumbel noise.
        entry_noise: standard Gumbel noise, independent of the other.

    Returns:
        The tokens, and which residuals have mass.

    Raises:
        ValueError: if the noise does not fit the blocks.
    """
    num_draws, width = entry_noise.shape
    vocab_size = target.logits.shape[1]
    num_blocks = -(-vocab_size // width)
    if sums.shape[1] != num_blocks or block_noise.shape != (num_draws, num_blocks):
        raise ValueError(
            f"`block_noise` must have shape [{num_draws}, {num_blocks}] and `sums` as many columns; "
            f"got {block_noise.shape} and {sums.shape}"
        )
    block = jnp.argmax(jnp.log(sums)[pair_of_draw] + block_noise, axis=-1).astype(jnp.int32)
    tokens = block[:, None] * width + jnp.arange(width, dtype=jnp.int32)
    drawn = pairs_of(pairs, pair_of_draw)
    entries = residual_masses(target, draft, drawn, tokens)
    entry = jnp.argmax(jnp.log(entries) + entry_noise, axis=-1).astype(jnp.int32)
    return Draws(block * width + entry, jnp.sum(sums, axis=-1) > 0)


def residual_log_ratio(target: Laws, draft: Laws, pairs: Pairs, draws: Draws, pair_of_draw: Vector) -> Array:
    """log p(c) - log q(c) of the drawn tokens c, [draws]: negative wherever p was taken away with w = 1 or less."""
    drawn = pairs_of(pairs, pair_of_draw)
    log_probs = [
        scaled_log_probs(laws, laws.logits[rows, draws.token][:, None], rows)[:, 0]
        for laws, rows in ((draft, jnp.asarray(drawn.draft_row)), (target, jnp.asarray(drawn.target_row)))
    ]
    return log_probs[0] - log_probs[1]
