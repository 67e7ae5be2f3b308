"""The head as XLA compiles it: runs everywhere, and serves what the kernels do not.

It writes the logits to memory and reads them again for the statistics.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt32

from pallas_kernels.low_rank_head.candidates import nan_as_greatest
from pallas_kernels.low_rank_head.noise import gumbel
from pallas_kernels.low_rank_head.projection import product, project
from pallas_kernels.low_rank_head.statistics import HeadDraw, checked, tempering
from pallas_kernels.low_rank_head.weights import PreparedHead

_ROW_MULTIPLE = 8


def logits(hidden: Float[Array, "batch d"], head: PreparedHead) -> Float[Array, "batch vocab"]:
    """Float32 logits, -inf where a token is not valid."""
    values = product(project(hidden, head, _ROW_MULTIPLE), head.rows.T)[: hidden.shape[0], : head.vocab_size]
    return jnp.where(jnp.arange(head.vocab_size, dtype=jnp.int32) < head.num_valid_tokens, values, -jnp.inf)


def greedy(hidden: Float[Array, "batch d"], head: PreparedHead) -> HeadDraw:
    """See `api.greedy`."""
    values = logits(hidden, head)
    return _draw(values, values)


def sample(
    hidden: Float[Array, "batch d"],
    head: PreparedHead,
    key_words: UInt32[Array, "batch 2"],
    temperature: Float[Array, "batch"],
) -> HeadDraw:
    """See `api.sample`."""
    inverse, noise_scale = tempering(temperature)
    values = logits(hidden, head) * inverse[:, None]
    token = jnp.arange(head.vocab_size, dtype=jnp.int32)[None]
    noise = gumbel(key_words[:, :1], key_words[:, 1:], token)
    return _draw(values, values + noise_scale[:, None] * noise)


def top_candidates(hidden: Float[Array, "batch d"], head: PreparedHead, count: int) -> tuple[Array, Array]:
    """See `api.top_candidates`."""
    values, token = jax.lax.top_k(nan_as_greatest(logits(hidden, head)), count)
    return token.astype(jnp.int32), values


def _draw(values: Float[Array, "batch vocab"], scores: Float[Array, "batch vocab"]) -> HeadDraw:
    token = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    logsumexp = jax.nn.logsumexp(values, axis=-1)
    log_prob = jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0] - logsumexp
    return checked(token, log_prob, logsumexp)
