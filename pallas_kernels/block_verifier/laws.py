"""What the reductions read: rows of logits with their normalisers, and pairs of a target's and a draft's row.

Letters, in this package as in the rules: p is the draft's law, q the target's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

LOG2_E = float(np.log2(np.e))

# The Hopper kernels read 256 bytes of a row at a time.
GROUP_BYTES = 256

Vector = Array | np.ndarray


class Laws(NamedTuple):
    """Laws in the form that they leave a model: law(v) = exp(inverse_temperature * logits[v] - log_normaliser).

    Attributes:
        logits: rows over the vocabulary, bfloat16 or float32, [rows, V].
        log_normaliser: logarithm of the sum of exp(inverse_temperature * logits), float32 [rows]; None where the
            logits are log-probabilities already. A row with -inf here has no mass at all.
        inverse_temperature: one over the temperature, positive and finite, float32 [rows]; None for 1.
    """

    logits: Array
    log_normaliser: Array | None = None
    inverse_temperature: Array | None = None


class Pairs(NamedTuple):
    """Which residuals are asked for: those of w q - p for pairs of a target's row and a draft's row.

    Row numbers that are numpy arrays are static: rows that follow each other are then read in place.

    Attributes:
        target_row: row of the target's laws, int32 [pairs].
        draft_row: row of the draft's laws, int32 [pairs].
        log_weight: log w, float32 [pairs]; None for w = 1.
        uses_draft: whether p is taken away at all, bool [pairs]; None for yes.
    """

    target_row: Vector
    draft_row: Vector
    log_weight: Array | None = None
    uses_draft: Vector | None = None


def group_size(dtype: Any) -> int:
    """Entries that the Hopper kernels sum first: 128 of bfloat16, 64 of float32."""
    return GROUP_BYTES // jnp.dtype(dtype).itemsize


def pairs_of(pairs: Pairs, chosen: Vector) -> Pairs:
    """Some of the pairs, in any order, as arrays."""

    def take(field: Vector) -> Array:
        return jnp.asarray(field)[jnp.asarray(chosen)]

    return Pairs(
        take(pairs.target_row),
        take(pairs.draft_row),
        None if pairs.log_weight is None else take(pairs.log_weight),
        None if pairs.uses_draft is None else take(pairs.uses_draft),
    )


def take_rows(array: Array, rows: Vector) -> Array:
    """`array[rows]`; static rows that follow each other are a slice, which copies nothing."""
    if isinstance(rows, np.ndarray) and rows.size and np.array_equal(rows, np.arange(rows[0], rows[0] + rows.size)):
        return array[int(rows[0]) : int(rows[0]) + rows.size]
    return array[rows]


class Exponents(NamedTuple):
    """A pair's laws as powers of two: w q(v) = 2^(target_scale * logit + target_offset), p(v) alike.

    One multiplication and addition an element is all that temperature, normaliser and weight then cost. An offset of
    -inf stands for a law without mass. float32 [pairs] each.
    """

    target_scale: Array
    target_offset: Array
    draft_scale: Array
    draft_offset: Array


def row_scales(inverse_temperature: Array | None) -> Float[Array, " rows"] | None:
    """Inverse temperatures times log2(e), as the kernels of pass 1 take them; None for log2(e) everywhere."""
    return None if inverse_temperature is None else jnp.float32(LOG2_E) * inverse_temperature.astype(jnp.float32)


def exponents(target: Laws, draft: Laws, pairs: Pairs) -> Exponents:
    """Scales and offsets of the pairs."""
    target_scale, target_offset = _row_exponents(target, pairs.target_row)
    draft_scale, draft_offset = _row_exponents(draft, pairs.draft_row)
    if pairs.log_weight is not None:
        target_offset = target_offset + jnp.float32(LOG2_E) * pairs.log_weight.astype(jnp.float32)
    if pairs.uses_draft is not None:
        draft_offset = jnp.where(jnp.asarray(pairs.uses_draft), draft_offset, -jnp.inf)
    return Exponents(target_scale, target_offset, draft_scale, draft_offset)


def _row_exponents(laws: Laws, rows: Vector) -> tuple[Array, Array]:
    scale = jnp.full(len(rows), LOG2_E, jnp.float32)
    if laws.inverse_temperature is not None:
        scale = scale * laws.inverse_temperature.astype(jnp.float32)[jnp.asarray(rows)]
    offset = jnp.zeros(len(rows), jnp.float32)
    if laws.log_normaliser is not None:
        normaliser = laws.log_normaliser.astype(jnp.float32)[jnp.asarray(rows)]
        offset = jnp.where(normaliser == -jnp.inf, -jnp.inf, jnp.float32(-LOG2_E) * normaliser)
    return scale, offset


def scaled_log_probs(laws: Laws, logits: Array, rows: Vector) -> Float[Array, "rows entries"]:
    """Log-probabilities of some entries of rows, in float32 (float64 where the logits are).

    Args:
        laws: the rows' normalisers and temperatures.
        logits: entries of the rows, [R, entries].
        rows: the row that each line is of, [R].

    Returns:
        inverse_temperature * logits - log_normaliser; -inf in rows without mass.
    """
    values = logits if logits.dtype == jnp.float64 else logits.astype(jnp.float32)
    if laws.inverse_temperature is not None:
        values = values * take_rows(laws.inverse_temperature.astype(values.dtype), rows)[:, None]
    if laws.log_normaliser is not None:
        normaliser = take_rows(laws.log_normaliser.astype(values.dtype), rows)[:, None]
        values = jnp.where(normaliser == -jnp.inf, -jnp.inf, values - normaliser)
    return values


def combine_normalisers(largest: Float[Array, "rows parts"], total: Float[Array, "rows parts"]) -> Array:
    """Natural log-normalisers from parts: maxima in base-2 logarithms, and sums of 2^(x - maximum), [rows]."""

    def add(left: tuple[Array, Array], right: tuple[Array, Array]) -> tuple[Array, Array]:
        top = jnp.maximum(left[0], right[0])
        # Parts of -inf have no mass; without the shift their difference would be NaN.
        shift = jnp.where(top == -jnp.inf, 0, top)
        return top, left[1] * jnp.exp2(left[0] - shift) + right[1] * jnp.exp2(right[0] - shift)

    # One reduction of pairs and not a maximum followed by a sum: a single launch.
    empty = (jnp.float32(-jnp.inf), jnp.float32(0))
    top, sums = lax.reduce((largest, total), empty, add, (1,))
    return (top + jnp.log2(sums)) * jnp.float32(1 / LOG2_E)
