"""The first product of the head, hidden state to the width of a token's row; left to XLA on every platform."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.low_rank_head.weights import PreparedHead, depth_parts


def project(
    hidden: Float[Array, "batch d"], head: PreparedHead, row_multiple: int, *, in_parts: bool = True
) -> Float[Array, "rows k"]:
    """Padded states in the weights' dtype.

    The batch is padded with zero rows before the product: for a single row XLA's GPU compiler writes a float32 copy
    of the whole matrix.

    Args:
        hidden: hidden states.
        head: the prepared head.
        row_multiple: what the batch is padded to a multiple of.
        in_parts: multiply parts of the depth at the same time and add them up. A few rows by k columns are too few
            results to keep a GPU busy. Its compiler cuts the depth by itself, but pads the operands for that in every
            call.
    """
    depth = head.inner_size if head.down is None else head.down.shape[0]
    padding = ((0, -hidden.shape[0] % row_multiple), (0, depth - head.hidden_size))
    hidden = jnp.pad(hidden.astype(head.rows.dtype), padding)
    if head.down is None:
        return hidden
    parts = depth_parts(head.hidden_size)
    if not in_parts or parts[0] == 1:
        return _rounded(product(hidden, head.down), head)
    # [rows, parts, size] by [parts, size, k]: the parts are the batch of a batched product.
    sums = lax.dot_general(
        hidden.reshape(-1, *parts),
        head.down.reshape(*parts, -1),
        (((2,), (1,)), ((1,), (0,))),
        precision=_precision(head.down),
        preferred_element_type=jnp.float32,
    )
    return _rounded(jnp.sum(sums, axis=0), head)


def _rounded(states: Array, head: PreparedHead) -> Array:
    """In the weights' dtype. XLA may leave out a rounding between two conversions, but not this one."""
    if head.rows.dtype == jnp.bfloat16:
        states = lax.reduce_precision(states, exponent_bits=8, mantissa_bits=7)
    return states.astype(head.rows.dtype)


def product(left: Float[Array, "rows k"], right: Float[Array, "k columns"]) -> Float[Array, "rows columns"]:
    """Matrix product with a float32 result; float32 operands are not rounded on the way."""
    return jnp.matmul(left, right, precision=_precision(right), preferred_element_type=jnp.float32)


def _precision(weights: Array) -> lax.Precision:
    return lax.Precision.HIGHEST if weights.dtype == jnp.float32 else lax.Precision.DEFAULT
