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
    blocks = _in_blocks(log_law)
    num_blocks, block_size = blocks.shape
    noise = jax.random.gumbel(rng_key, (num_blocks + block_size,), log_law.dtype)
    del rng_key
    block = jnp.argmax(jax.nn.logsumexp(blocks, axis=-1) + noise[:num_blocks])
    token = jnp.argmax(blocks[block] + noise[num_blocks:])
    return (block * block_size + token).astype(jnp.int32)


def sample_laws(rng_keys: Key[Array, "batch"], log_laws: Float[Array, "batch vocab"]) -> Int[Array, "batch"]:
    """One draw from each law, [B] int32; `sample_law` row by row, with one key a row."""
    return jax.vmap(sample_law)(rng_keys, log_laws)


def lowest_argmax(values: Float[Array, "*batch vocab"]) -> Int[Array, "*batch"]:
    """Lowest index of the maximum over the last axis, int32.

    In two stages as well: a maximum over blocks vectorises well, an argmax over the vocabulary does not.
    """
    blocks = _in_blocks(values)
    block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
    best = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
    return (block * blocks.shape[-1] + jnp.argmax(best, axis=-1)).astype(jnp.int32)


def _in_blocks(values: Array) -> Array:
    """The last axis as blocks of about the square root of its length, [..., blocks, size], padded with -inf."""
    vocab_size = values.shape[-1]
    exponent = math.ceil(math.log2(vocab_size) / 2)
    # A block size that divides the vocabulary needs no padded copy; those of large models have one.
    sizes = [2**e for e in range(exponent, max(exponent - 4, 0), -1) if vocab_size % 2**e == 0]
    block_size = sizes[0] if sizes else 2**exponent
    num_blocks = -(-vocab_size // block_size)
    if num_blocks * block_size != vocab_size:
        padding = [(0, 0)] * (values.ndim - 1) + [(0, num_blocks * block_size - vocab_size)]
        values = jnp.pad(values, padding, constant_values=-jnp.inf)
    return values.reshape(*values.shape[:-1], num_blocks, block_size)
