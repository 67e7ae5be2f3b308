"""Rotary position embedding in the half-split convention, with linear and llama3 scaling."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.models.config import RopeScaling


@runtime_checkable
class RopeSettings(Protocol):
    """What the frequencies depend on; target and drafter configurations both have it."""

    @property
    def head_dim(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> RopeScaling | None: ...


def rope_frequencies(config: RopeSettings) -> Float[np.ndarray, "half"]:
    """Angular frequencies of the rotary pairs, radians a token.

    Args:
        config: has `head_dim`, `rope_theta` and `rope_scaling`.

    Returns:
        Frequencies [head_dim / 2], float32, as a host constant.
    """
    # float64 on the host: an error of one float32 rounding in a frequency grows with the position.
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = 1.0 / np.float64(config.rope_theta) ** exponents
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    return frequencies.astype(np.float32)


def _scale(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    low, high, original = (
        scaling.low_freq_factor,
        scaling.high_freq_factor,
        scaling.original_max_position_embeddings,
    )
    if low is None or high is None or original is None:
        raise ValueError(f"`rope_scaling` of kind llama3 must have all its factors; got {scaling}")
    # Turns that a pair makes over the original context decide how much of its frequency is kept.
    turns = original * frequencies / (2.0 * np.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rope_tables(
    positions: Int[Array, "batch time"], inv_freq: Float[Array, "half"] | Float[np.ndarray, "half"]
) -> tuple[Float[Array, "batch 1 time half"], Float[Array, "batch 1 time half"]]:
    """Cosines and sines of all positions, to be shared by the layers of one forward pass.

    Args:
        positions: position of each token, [B, T].
        inv_freq: frequencies of `rope_frequencies`, [head_dim / 2].

    Returns:
        Cosines and sines, both [B, 1, T, head_dim / 2] float32.
    """
    angles = positions[:, None, :, None].astype(jnp.float32) * jnp.asarray(inv_freq, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "batch heads time head_dim"],
    cos: Float[Array, "batch 1 time half"],
    sin: Float[Array, "batch 1 time half"],
) -> Float[Array, "batch heads time head_dim"]:
    """Rotates queries or keys by the angles of `rope_tables`; float32 inside, dtype of `x` outside."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1)
    return rotated.astype(x.dtype)


def apply_rope(
    x: Float[Array, "batch heads time head_dim"],
    positions: Int[Array, "batch time"],
    inv_freq: Float[Array, "half"] | Float[np.ndarray, "half"],
) -> Float[Array, "batch heads time head_dim"]:
    """Rotates queries or keys to their positions.

    Args:
        x: queries or keys, [B, H, T, head_dim]; element i pairs with element i + head_dim / 2.
        positions: position of each token, [B, T].
        inv_freq: frequencies of `rope_frequencies`, [head_dim / 2].

    Returns:
        The rotated array, of the shape and dtype of `x`.
    """
    return rotate(x, *rope_tables(positions, inv_freq))
