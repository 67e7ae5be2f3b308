"""From logits to laws: temperature, top-k, top-p and min-p, in this order, for target and draft alike.

A law is a float32 log-probability vector over the full vocabulary: what tokens are really drawn from.
Temperature 0 is the one-hot law at the lowest index of the maximum.

Truncation searches for the threshold by bisection over the bits of the values (exact, ties included)
and never sorts: a sort of a large vocabulary costs several times more on every backend.
"""

from __future__ import annotations

from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt

from specjax.sampling import lowest_argmax, sample_law, sample_laws

__all__ = [
    "LawParams",
    "finite_logits",
    "lowest_argmax",
    "one_hot_log_laws",
    "sample_law",
    "sample_laws",
    "to_log_laws",
]


@flax.struct.dataclass
class LawParams:
    """How each row turns logits into a law; every field is [B].

    Attributes:
        temperature: divides the logits; 0 is greedy.
        top_k: keeps the k largest; 0 is off, values above the vocabulary keep all.
        top_p: keeps the smallest set of largest tokens whose probability reaches p; 1 is off.
        min_p: keeps tokens with at least this fraction of the largest probability; 0 is off.
    """

    temperature: Float[Array, "batch"]
    top_k: Int[Array, "batch"]
    top_p: Float[Array, "batch"]
    min_p: Float[Array, "batch"]

    @classmethod
    def greedy(cls, batch: int) -> LawParams:
        """Temperature 0, nothing truncated, for `batch` rows."""
        return cls(
            temperature=jnp.zeros(batch, jnp.float32),
            top_k=jnp.zeros(batch, jnp.int32),
            top_p=jnp.ones(batch, jnp.float32),
            min_p=jnp.zeros(batch, jnp.float32),
        )


def to_log_laws(logits: Float[Array, "batch *nodes vocab"], params: LawParams) -> Float[Array, "batch *nodes vocab"]:
    """Laws of all rows: logits / temperature, then top-k, then top-p, then min-p, then normalisation.

    Each filter works on what the one before it left, renormalised. Ties at a threshold keep the lower
    index, so that `top_k = 1` is greedy decoding. Branches that no row needs are skipped for the whole
    batch, which changes no value.

    Args:
        logits: any float dtype, [B, ..., V]; -inf marks tokens that do not exist. NaN and +inf count as
            -inf, and a vector without any finite logit gives the one-hot law at token 0, so that ids stay
            valid; `finite_logits` tells such vectors apart.
        params: per row, [B].

    Returns:
        Log laws [B, ..., V] float32.
    """
    fields = (params.temperature, params.top_k, params.top_p, params.min_p)
    columns = _Columns(*(jnp.expand_dims(field, tuple(range(1, logits.ndim))) for field in fields))
    all_greedy = jnp.all(params.temperature == 0)
    # Bad values are replaced inside the branches, where that costs no pass over the vocabulary of its own.
    return jax.lax.cond(
        all_greedy, lambda x: _one_hot_laws(_usable(x)), lambda x: _mixed_laws(_usable(x), columns), logits
    )


def finite_logits(logits: Float[Array, "*batch vocab"]) -> Bool[Array, "*batch"]:
    """Whether a logit vector can be decoded from: no NaN, no +inf and at least one finite value."""
    return jnp.isfinite(jnp.max(logits, axis=-1))


def one_hot_log_laws(tokens: Int[Array, "*batch"], vocab_size: int) -> Float[Array, "*batch vocab"]:
    """Laws of deterministic choices: 0 at the token, -inf elsewhere, [..., V] float32."""
    return jnp.where(jnp.arange(vocab_size) == tokens[..., None], jnp.float32(0), -jnp.inf)


def _usable(logits: Array) -> Array:
    return jnp.where(jnp.isfinite(logits), logits.astype(jnp.float32), -jnp.inf)


class _Columns(NamedTuple):
    """`LawParams` with an axis of length 1 for every axis of the logits behind the batch."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array


def _one_hot_laws(logits: Array) -> Array:
    return one_hot_log_laws(lowest_argmax(logits), logits.shape[-1])


def _mixed_laws(logits: Array, params: _Columns) -> Array:
    greedy = params.temperature == 0
    largest = jnp.max(logits, axis=-1, keepdims=True)
    dead = jnp.isneginf(largest)
    # Shifted first: dividing by a tiny temperature then overflows to -inf only where the law is zero.
    scaled = (logits - jnp.where(dead, 0, largest)) / jnp.where(greedy, 1, params.temperature)
    truncates = (params.top_k > 0) | (params.top_p < 1)
    scaled = jax.lax.cond(jnp.any(truncates), lambda x: _truncate(x, params), lambda x: x, scaled)
    scaled = jnp.where(scaled >= jnp.log(params.min_p), scaled, -jnp.inf)
    # The maximum is 0 by construction, so that no further shift is needed.
    laws = scaled - jnp.log(jnp.sum(jnp.exp(scaled), axis=-1, keepdims=True))
    return jnp.where(greedy | dead, _one_hot_laws(logits), laws)


def _truncate(scaled: Array, params: _Columns) -> Array:
    """Top-k, then top-p: the same search, once with every token counting one, once with its probability."""
    vocab_size = scaled.shape[-1]
    top_k = jnp.clip(params.top_k, 1, vocab_size).astype(jnp.float32)

    def filter_once(is_top_p: Array, scaled: Array) -> Array:
        needed = jnp.where(is_top_p, params.top_p < 1, params.top_k > 0)

        def search(scaled: Array) -> Array:
            weights = jnp.where(is_top_p, jnp.exp(scaled), 1)
            amount = jnp.where(is_top_p, params.top_p * jnp.sum(weights, axis=-1, keepdims=True), top_k)
            return jnp.where(needed & ~_keep_largest(scaled, weights, amount), -jnp.inf, scaled)

        return jax.lax.cond(jnp.any(needed), search, lambda x: x, scaled)

    # A loop of two rounds and not two calls: the search is compiled once.
    return jax.lax.fori_loop(0, 2, lambda stage, x: filter_once(stage == 1, x), scaled)


def _keep_largest(values: Array, weights: Array, amount: Array) -> Array:
    """The fewest largest values, lower index first among equals, whose weights sum to `amount` or more.

    Equal values must have equal weights. `amount` is at most the sum of all weights up to rounding.
    """
    order = _sortable_bits(values)
    shape = (*values.shape[:-1], 1)

    def weigh(kept: Array) -> Array:
        return jnp.sum(jnp.where(kept, weights, 0), axis=-1, keepdims=True)

    def raise_threshold(step: Array, threshold: Array) -> Array:
        # Two bits a round: the three sums share one pass over the values.
        shift = (30 - 2 * step).astype(jnp.uint32)
        candidates = [threshold | (jnp.uint32(digit) << shift) for digit in (1, 2, 3)]
        for candidate in candidates:
            threshold = jnp.where(weigh(order >= candidate) >= amount, candidate, threshold)
        return threshold

    # Invariant: what lies at or above the threshold weighs at least `amount`.
    threshold = jax.lax.fori_loop(0, 16, raise_threshold, jnp.zeros(shape, jnp.uint32))
    tied = order == threshold
    missing = amount - weigh(order > threshold)
    weight_of_one = jnp.max(jnp.where(tied, weights, 0), axis=-1, keepdims=True)
    num_kept_ties = jnp.maximum(jnp.ceil(missing / jnp.where(weight_of_one > 0, weight_of_one, 1)), 1).astype(jnp.int32)
    num_ties = jnp.sum(tied, axis=-1, keepdims=True)
    tied = jax.lax.cond(jnp.all(num_kept_ties >= num_ties), lambda tied, _: tied, _keep_first, tied, num_kept_ties)
    return (order > threshold) | tied


def _keep_first(flags: Array, count: Array) -> Array:
    """The first `count` true entries of each row."""
    return flags & (jnp.cumsum(flags, axis=-1, dtype=jnp.int32) <= count)


def _sortable_bits(values: Array) -> UInt[Array, "..."]:
    """Unsigned integers in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(values + 0, jnp.uint32)  # -0 + 0 is +0
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))
