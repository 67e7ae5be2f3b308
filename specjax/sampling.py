"""Draws from laws, and the argmax with a tie rule: what drafting, verification and decoding share."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray


def sample_law(rng_key: PRNGKeyArray, log_law: Float[Array, "vocab"]) -> Int[Array, ""]:
    """One draw from a law; never a token of probability zero.

    Gumbel maximum in two stages, first a block of the vocabulary, then a token inside it: the same law as
    one maximum over the vocabulary, with about 2 sqrt(V) instead of V noise values.

    Args:
        rng_key: consumed.
        log_law: [V]; need not be normalised.

    Returns:
        The token, [] int32.
    """
    vocab_size = log_law.shape[0]
    block_size = 2 ** math.ceil(math.log2(vocab_size) / 2)
    num_blocks = -(-vocab_size // block_size)
    padding = (0, num_blocks * block_size - vocab_size)
    blocks = jnp.pad(log_law, padding, constant_values=-jnp.inf).reshape(num_blocks, block_size)
    noise = jax.random.gumbel(rng_key, (num_blocks + block_size,), log_law.dtype)
    del rng_key
    block = jnp.argmax(jax.nn.logsumexp(blocks, axis=-1) + noise[:num_blocks])
    token = jnp.argmax(blocks[block] + noise[num_blocks:])
    return (block * block_size + token).astype(jnp.int32)


def sample_laws(rng_keys: Key[Array, "batch"], log_laws: Float[Array, "batch vocab"]) -> Int[Array, "batch"]:
    """One draw from each law, [B] int32; `sample_law` row by row, with one key a row."""
    return jax.vmap(sample_law)(rng_keys, log_laws)


def lowest_argmax(values: Float[Array, "*batch vocab"]) -> Int[Array, "*batch"]:
    """Lowest index of the maximum over the last axis, int32; two plain reductions, which vectorise."""
    vocab_size = values.shape[-1]
    largest = jnp.max(values, axis=-1, keepdims=True)
    return jnp.min(jnp.where(values == largest, jnp.arange(vocab_size, dtype=jnp.int32), vocab_size - 1), axis=-1)
