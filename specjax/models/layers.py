"""Building blocks of decoder layers; pure functions of parameters and activations."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.models.attention import matmul_precision

# Products of 4 or 5 rows, the usual sizes of a verified chain, take the CPU's kernel a fifth longer than those of 6.
_SLOW_ROWS = (4, 5)
_FAST_ROWS = 6


def rms_norm(x: Float[Array, "*batch width"], scale: Float[Array, "width"], eps: float) -> Float[Array, "*batch width"]:
    """Root-mean-square norm (Zhang and Sennrich, 2019); float32 inside, dtype of `x` outside."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + jnp.float32(eps))
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def matmul(x: Float[Array, "*batch inputs"], kernel: Float[Array, "inputs outputs"]) -> Float[Array, "*batch outputs"]:
    """`x @ kernel` in the kernel's dtype, accumulated and returned in float32."""
    shape = x.shape[:-1]
    rows = math.prod(shape)
    x = x.astype(kernel.dtype)
    padded = rows in _SLOW_ROWS
    if padded:
        x = jnp.pad(x.reshape(rows, -1), ((0, _FAST_ROWS - rows), (0, 0)))
    product = jnp.matmul(x, kernel, precision=matmul_precision(kernel.dtype), preferred_element_type=jnp.float32)
    return product[:rows].reshape(*shape, -1) if padded else product


def linear(
    x: Float[Array, "*batch inputs"],
    kernel: Float[Array, "inputs outputs"],
    bias: Float[Array, "outputs"] | None = None,
) -> Float[Array, "*batch outputs"]:
    """`x @ kernel + bias` in the kernel's dtype with float32 accumulation; the result has the kernel's dtype."""
    product = matmul(x, kernel)
    if bias is not None:
        product = product + bias.astype(jnp.float32)
    return product.astype(kernel.dtype)


def gated_feed_forward(
    x: Float[Array, "*batch width"],
    gate: Float[Array, "width inner"],
    up: Float[Array, "width inner"],
    down: Float[Array, "inner width"],
) -> Float[Array, "*batch width"]:
    """SwiGLU (Shazeer, 2020): `(silu(x @ gate) * (x @ up)) @ down`."""
    return linear(jax.nn.silu(linear(x, gate)) * linear(x, up), down)


def split_heads(x: Float[Array, "batch time width"], num_heads: int) -> Float[Array, "batch heads time head_dim"]:
    """[B, T, H * head_dim] to [B, H, T, head_dim]."""
    batch, time, width = x.shape
    return jnp.swapaxes(x.reshape(batch, time, num_heads, width // num_heads), 1, 2)
