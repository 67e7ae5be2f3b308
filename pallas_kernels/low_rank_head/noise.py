"""Gumbel noise as a pure function of a key and a token id, the same numbers on every implementation.

The bits are those of jax's threefry generator under its default settings, so that the noise of row b equals
`jax.random.gumbel(rng_keys[b], (V,))`; but any element of it can be had alone, which is what a kernel needs.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Key, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_TINY = np.float32(np.finfo(np.float32).tiny)
# Below this 1 - u a series replaces the logarithm; its last term is beyond float32 there.
_SERIES_BELOW = np.float32(0.125)
_SERIES_TERMS = 8


def raw_keys(rng_keys: Key[Array, "batch"]) -> UInt32[Array, "batch 2"]:
    """The two words of each key.

    Raises:
        ValueError: if the keys are not new-style threefry keys.
    """
    dtype = getattr(rng_keys, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key):
        found = type(rng_keys).__name__ if dtype is None else f"dtype {dtype}"
        raise ValueError(f"`rng_keys` must be keys made by jax.random.key; got {found}")
    if str(jax.random.key_impl(rng_keys)) != "threefry2x32":
        raise ValueError(f"`rng_keys` must be threefry2x32 keys; got {jax.random.key_impl(rng_keys)}")
    return jax.random.key_data(rng_keys)


def threefry2x32(key0: Array, key1: Array, count0: Array, count1: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., 2011) on uint32 arrays of one shape."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(0x1BD11BDA))
    count0, count1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            count0 = count0 + count1
            count1 = (count1 << jnp.uint32(rotation)) | (count1 >> jnp.uint32(32 - rotation))
            count1 = count0 ^ count1
        count0 = count0 + keys[(group + 1) % 3]
        count1 = count1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return count0, count1


def gumbel(key0: Array, key1: Array, token: Array) -> Array:
    """Standard Gumbel noise of one token under one key, elementwise.

    Args:
        key0: first key word, uint32.
        key1: second key word, uint32, same shape.
        token: token id, int32, same shape.

    Returns:
        -log(-log u), float32.
    """
    count = token.astype(jnp.uint32)
    # A zero made from an array: inside a kernel it has the array's register layout.
    bits0, bits1 = threefry2x32(key0, key1, count ^ count, count)
    mantissa = ((bits0 ^ bits1) >> jnp.uint32(9)) | jnp.uint32(0x3F800000)
    uniform = lax.bitcast_convert_type(mantissa, jnp.float32) - jnp.float32(1.0)
    return -jnp.log(_minus_log(jnp.maximum(uniform, _TINY)))


def _minus_log(uniform: Array) -> Array:
    """-log(u) with a small relative error also near u = 1.

    The largest noise, which decides the maximum, comes from u near 1. There fast hardware logarithms are only good
    to an absolute 2e-7, which is as large as the result; 1 - u is exact, so its power series is not.
    """
    rest = jnp.float32(1.0) - uniform
    series = rest * jnp.float32(1.0 / _SERIES_TERMS)
    for power in range(_SERIES_TERMS - 1, 0, -1):
        series = (series + jnp.float32(1.0 / power)) * rest
    return jnp.where(rest < _SERIES_BELOW, series, -jnp.log(uniform))
