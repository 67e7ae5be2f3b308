"""The best few tokens by a score, with exact logits, all else left out: second half of preview and routed heads.

Both steps have a form of their own on CPUs, where the time of `lax.top_k` grows with the number of candidates, and
where the rows of many candidates, gathered at once, have left the caches before they are multiplied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from specjax.heads.base import matmul

# From this many on, counting is at least 1.5 times as fast as `lax.top_k` on CPUs (48 thousand scores a row).
_LEAST_COUNTED = 1024
_WORD_BITS = 32
_LANES = 512
_MOST_PER_LANE = 255
_LOWEST_KEY = jnp.iinfo(jnp.int32).min
_ROWS_IN_CACHE = 128


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
    ids = best_ids(scores, num_candidates)
    if ids.size > rows.shape[0]:
        # More rows are wanted in all than there are: one product over all of them reads less.
        logits = matmul(hidden.astype(jnp.float32), rows.astype(jnp.float32).T)
        values = jnp.take_along_axis(logits, ids, axis=-1)
    else:
        values = _row_products(rows, hidden, ids)
    return scattered(values, ids, scores.shape[-1])


def best_ids(scores: Float[Array, "... vocab"], count: int) -> Int[Array, "... count"]:
    """Ids of the highest scores: the set that `lax.top_k` finds, in an order that is not specified.

    Of equal scores the lowest ids are taken. The order is that of the bits: -inf is below all numbers and taken only
    where nothing else is left, lowest ids first; -0 is below +0; a NaN is above +inf, one with its sign bit set below
    -inf. No gradient.

    Args:
        scores: float32, [..., V].
        count: how many, C; from 1 to V.

    Returns:
        Ids, [..., C] int32.

    Raises:
        ValueError: if `count` is out of range.
    """
    if not 1 <= count <= scores.shape[-1]:
        raise ValueError(f"`count` must be in [1, {scores.shape[-1]}]; got {count}")
    scores = lax.stop_gradient(scores)

    def by_top_k(scores: Array) -> Array:
        return lax.top_k(scores, count)[1]

    def by_counting(scores: Array) -> Array:
        # Row by row: one row and its keys stay in the cache through all passes.
        ids = lax.map(lambda row: counted_ids(row, count), scores.reshape(-1, scores.shape[-1]))
        return ids.reshape(*scores.shape[:-1], count)

    if count < _LEAST_COUNTED:
        return by_top_k(scores)
    return lax.platform_dependent(scores, cpu=by_counting, default=by_top_k)


def counted_ids(scores: Float[Array, "vocab"], count: int) -> Int[Array, "count"]:
    """`best_ids` of one row in ascending order, by a threshold that counting passes find bit by bit."""
    bits = lax.bitcast_convert_type(scores, jnp.int32)
    keys = bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))
    # Enough lanes that no lane's count overflows a byte, in which sums are several times faster.
    lanes = _LANES * -(-keys.shape[0] // (_LANES * _MOST_PER_LANE))
    keys = jnp.pad(keys, (0, -keys.shape[0] % lanes), constant_values=_LOWEST_KEY)

    def as_key(prefix: Array) -> Array:
        return lax.bitcast_convert_type(prefix ^ jnp.uint32(1 << 31), jnp.int32)

    def is_open(carry: tuple[Array, Array, Array]) -> Array:
        bit, _, found = carry
        return (bit > 0) & (found != count)

    def next_bit(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, prefix, found = carry
        longer = prefix | bit
        reached = (keys.reshape(-1, lanes) >= as_key(longer)).astype(jnp.uint8)
        at_least = jnp.sum(jnp.sum(reached, axis=0, dtype=jnp.uint8), dtype=jnp.int32)
        enough = at_least >= count
        return bit >> 1, jnp.where(enough, longer, prefix), jnp.where(enough, at_least, found)

    start = (jnp.uint32(1 << 31), jnp.uint32(0), jnp.int32(keys.shape[0] + 1))
    threshold = as_key(lax.while_loop(is_open, next_bit, start)[1])
    above, equal = _packed(keys > threshold), _packed(keys == threshold)
    num_equal = _num_bits(equal)
    before = jnp.cumsum(num_equal) - num_equal
    wanted = jnp.clip(count - jnp.sum(_num_bits(above)) - before, 0, num_equal)
    # Words that are taken in part keep the bits below the first that is not wanted.
    below = (jnp.uint32(1) << _place_of_bit(equal, wanted)) - jnp.uint32(1)
    return _places_of_bits(above | jnp.where(wanted == num_equal, equal, equal & below), count)


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
    def at_once(rows: Array, states: Array, ids: Array) -> Array:
        gathered = jnp.take(rows, ids, axis=0, mode="clip").astype(jnp.float32)
        return jnp.einsum("...cd,...d->...c", gathered, states, precision=lax.Precision.HIGHEST)

    def in_blocks(rows: Array, states: Array, ids: Array) -> Array:
        count = ids.shape[-1]
        size = min(count, _ROWS_IN_CACHE)
        padded = jnp.pad(ids.reshape(-1, count), ((0, 0), (0, -count % size)))
        blocks = padded.reshape(-1, size)
        owners = jnp.repeat(states.reshape(-1, states.shape[-1]), padded.shape[1] // size, axis=0)
        products = lax.map(lambda block: at_once(rows, *block), (owners, blocks))
        return products.reshape(padded.shape)[:, :count].reshape(ids.shape)

    return lax.platform_dependent(rows, hidden.astype(jnp.float32), ids, cpu=in_blocks, default=at_once)


def _packed(marks: Bool[Array, "places"]) -> UInt32[Array, "words"]:
    """32 places a word, the first in the lowest bit."""
    shifted = marks.reshape(-1, _WORD_BITS).astype(jnp.uint32) << jnp.arange(_WORD_BITS, dtype=jnp.uint32)
    return jnp.sum(shifted, axis=-1, dtype=jnp.uint32)


def _num_bits(words: UInt32[Array, "words"]) -> Int[Array, "words"]:
    return lax.population_count(words).astype(jnp.int32)


def _places_of_bits(words: UInt32[Array, "words"], count: int) -> Int[Array, "count"]:
    """Places of the first `count` bits that are set."""
    ends = jnp.cumsum(_num_bits(words))
    order = jnp.arange(count, dtype=jnp.int32)
    word = jnp.searchsorted(ends, order, side="right").astype(jnp.int32)
    inside = order - (ends - _num_bits(words))[word]
    return word * _WORD_BITS + _place_of_bit(words[word], inside).astype(jnp.int32)


def _place_of_bit(words: UInt32[Array, "words"], order: Int[Array, "words"]) -> UInt32[Array, "words"]:
    """Place in each word of the set bit with that many set bits below it; any place if there is none."""
    place, left = jnp.zeros_like(words), order
    width = _WORD_BITS // 2
    while width:
        low = _num_bits((words >> place) & jnp.uint32((1 << width) - 1))
        is_past = left >= low
        place = jnp.where(is_past, place + jnp.uint32(width), place)
        left = jnp.where(is_past, left - low, left)
        width //= 2
    return place
