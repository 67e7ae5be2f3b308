"""The first product of the head, hidden state to the width of a token's row; left to XLA on every platform."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.low_rank_head.weights import PreparedHead


def project(hidden: Float[Array, "batch d"], head: PreparedHead, row_multiple: int) -> Float[Array, "rows k"]:
    """Padded states in the weights' dtype.

    The batch is padded with zero rows before the product: for a single row XLA's GPU compiler writes a float32 copy
    of the whole matrix.
    """
    depth = head.inner_size if head.down is None else head.down.shape[0]
    padding = ((0, -hidden.shape[0] % row_multiple), (0, depth - head.hidden_size))
    hidden = jnp.pad(hidden.astype(head.rows.dtype), padding)
    return hidden if head.down is None else product(hidden, head.down).astype(head.rows.dtype)


def product(left: Float[Array, "rows k"], right: Float[Array, "k columns"]) -> Float[Array, "rows columns"]:
    """Matrix product with a float32 result; float32 operands are not rounded on the way."""
    precision = lax.Precision.HIGHEST if right.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.matmul(left, right, precision=precision, preferred_element_type=jnp.float32)
