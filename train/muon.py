"""Muon (Jordan, 2024) with its orthogonalisation done on the small side of each matrix.

The update is that of `optax.contrib.muon`: momentum, then the quintic Newton-Schulz iteration, then a scale by shape.
Every iterate is a polynomial in A = X X^T times X, so the iteration runs on the m x m matrix A alone (m the shorter
side) and X takes part in two products instead of ten. For a head's matrix of 72 x 49152 that is seven times less work.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Int

# a X + b (X X^T) X + c (X X^T)^2 X, steep at zero: singular values end between about 0.7 and 1.2.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_SMALLEST_NORM = 1e-8


class MuonState(NamedTuple):
    """Updates made, and the running mean of the gradients."""

    count: Int[Array, ""]
    momentum: Any


def orthogonalise(matrix: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Nearly the closest matrix with all singular values 1: five Newton-Schulz iterations.

    Args:
        matrix: [m, n] float32.

    Returns:
        The same singular vectors, singular values near 1.
    """
    transposed = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if transposed else matrix
    wide = wide / (jnp.sqrt(jnp.sum(jnp.square(wide))) + jnp.float32(_SMALLEST_NORM))
    a, b, c = (jnp.float32(coefficient) for coefficient in _COEFFICIENTS)
    gram = _dot(wide, wide.T)
    identity = jnp.eye(gram.shape[0], dtype=jnp.float32)
    product = identity
    for iteration in range(_NUM_ITERATIONS):
        polynomial = a * identity + b * gram + c * _dot(gram, gram)
        product = polynomial if iteration == 0 else _dot(product, polynomial)
        if iteration + 1 < _NUM_ITERATIONS:
            # Polynomials of one matrix commute: the next X X^T is p(A) A p(A).
            gram = _dot(polynomial, _dot(polynomial, gram))
    result = _dot(product, wide)
    return result.T if transposed else result


def scale_by_muon(momentum: float) -> optax.GradientTransformation:
    """Orthogonal updates of spectral norm sqrt(max(1, outputs / inputs)) from Nesterov momentum; matrices only.

    Args:
        momentum: decay of the running mean of gradients.

    Returns:
        The transformation; it needs a sign and a learning rate behind it.
    """

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, MuonState]:
        del params
        count = state.count + 1
        decay = jnp.float32(momentum)
        mean = jax.tree.map(lambda old, new: decay * old + (1 - decay) * new, state.momentum, updates)
        # Both means start at zero and are corrected for it; the look-ahead is one update further.
        ahead = 1 - decay ** (count + 1).astype(jnp.float32)
        now = 1 - decay ** count.astype(jnp.float32)

        def direction(mean: Array, gradient: Array) -> Array:
            rows, columns = gradient.shape
            nesterov = decay * mean / ahead + (1 - decay) * gradient / now
            return orthogonalise(nesterov) * jnp.float32(max(1.0, columns / rows) ** 0.5)

        return jax.tree.map(direction, mean, updates), MuonState(count, mean)

    return optax.GradientTransformation(init, update)


def _dot(left: Array, right: Array) -> Array:
    return jnp.matmul(left, right, precision=lax.Precision.HIGHEST)
