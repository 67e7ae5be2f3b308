"""Functions of vocabulary rows, shared by all rules: ratios, residuals and draws, in log space.

Letters as in the SpecTr papers: p is the draft's law, q the target's. Everything keeps the dtype it is given: float32
in decoding, float64 in exact enumeration. No epsilon stands in any acceptance test.

`residual_sums` is the one place where the rules meet `pallas_kernels`: it reads both laws once, by a kernel on
platforms that have one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from pallas_kernels import block_verifier

# A drafted token was drawn, so its probability is not zero; a logarithm that underflowed is lifted to this value.
LOWEST_DRAFTED_LOG_PROB = -100.0

# Longer rows are sampled in two levels: noise for every entry would cost more than everything else in a rule.
LARGEST_PLAIN_ROW = 1024


def drafted_log_ratio(
    target_log_prob: Float[Array, "*shape"], draft_log_prob: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """log q(x) - log p(x) at drafted tokens: -inf where the target excludes the token, never NaN.

    Args:
        target_log_prob: log q(x), may be -inf.
        draft_log_prob: log p(x) of a token that was drafted; -inf (underflow) counts as -100.

    Returns:
        The log ratio, of the same shape.
    """
    return target_log_prob - jnp.maximum(draft_log_prob, jnp.asarray(LOWEST_DRAFTED_LOG_PROB, draft_log_prob.dtype))


def log_one_minus_exp(log_prob: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """log(1 - exp(x)) for x <= 0, accurate at both ends: 0 at -inf, -inf at 0; positive x count as 0."""
    log_prob = jnp.minimum(log_prob, 0)
    # Each form loses all digits where the other is good; the border is where exp(x) is a half.
    return jnp.where(log_prob > -np.log(2).item(), jnp.log(-jnp.expm1(log_prob)), jnp.log1p(-jnp.exp(log_prob)))


def log_positive_part(
    target_log_masses: Float[Array, "*shape"], draft_log_masses: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """log (q - p)_+ elementwise; -inf where q <= p, also where both are zero."""
    larger = target_log_masses > draft_log_masses
    difference = jnp.where(larger, draft_log_masses - target_log_masses, 0)
    return jnp.where(larger, target_log_masses + log_one_minus_exp(difference), -jnp.inf)


def residual_sums(
    target_log_laws: Float[Array, "target_rows vocab"],
    draft_log_laws: Float[Array, "draft_rows vocab"],
    pairs: block_verifier.Pairs,
    width: int | None = None,
) -> Float[Array, "pairs blocks"]:
    """sum_x (w q(x) - p(x))_+ over blocks of tokens; one pass over both laws, by a kernel where the platform has one.

    On CPU, and for float64, these are plain sums in the order of the tokens; elsewhere they differ by rounding.

    Args:
        target_log_laws: log q, [T, V].
        draft_log_laws: log p, [D, V].
        pairs: rows of both, weights w, and whether p is taken away at all.
        width: tokens of a block; None for one sum over the whole row.

    Returns:
        The sums, [pairs, ceil(V / width)].
    """
    return block_verifier.residual_sums(
        block_verifier.Laws(target_log_laws), block_verifier.Laws(draft_log_laws), pairs, width=width
    )


def positive_part_mass(
    log_weight: Float[Array, "*pairs"],
    target_log_laws: Float[Array, "target_rows vocab"],
    draft_log_laws: Float[Array, "draft_rows vocab"],
    target_row: np.ndarray,
    draft_row: np.ndarray,
) -> Float[Array, "*pairs"]:
    """sum_x (w q(x) - p(x))_+ for pairs of rows, with w <= 1 given by its logarithm.

    Args:
        log_weight: log w of each pair, any shape.
        target_log_laws: log q, [T, V].
        draft_log_laws: log p, [D, V].
        target_row: row of q of each pair, int, of that shape.
        draft_row: row of p, the same.

    Returns:
        The masses, of that shape.
    """
    if log_weight.size == 0:
        return jnp.zeros_like(log_weight)
    pairs = block_verifier.Pairs(
        target_row=np.asarray(target_row, np.int32).reshape(-1),
        draft_row=np.asarray(draft_row, np.int32).reshape(-1),
        log_weight=log_weight.reshape(-1),
    )
    return residual_sums(target_log_laws, draft_log_laws, pairs).reshape(log_weight.shape)


def normalise_log_masses(
    log_masses: Float[Array, "*rows vocab"], fallback: Float[Array, "*rows vocab"]
) -> Float[Array, "*rows vocab"]:
    """The laws proportional to `exp(log_masses)`; a row of `fallback` where there is no mass at all.

    A residual without mass belongs to an event of probability zero (up to rounding), so the fallback keeps a row
    finite; it is not what makes a rule right.
    """
    total = jax.nn.logsumexp(log_masses, axis=-1, keepdims=True)
    empty = total == -jnp.inf
    return jnp.where(empty, fallback, log_masses - jnp.where(empty, 0, total))


def block_size(vocab_size: int) -> int:
    """Entries in a block of the two-level draw: the power of two at or above the square root."""
    return 1 << int(np.ceil(np.log2(max(vocab_size, 1)) / 2))


def sample_log_law(rng_key: PRNGKeyArray, log_law: Float[Array, " size"]) -> Int[Array, ""]:
    """Draws an index from a log law; entries of -inf are never drawn.

    Short rows take the largest perturbed entry (Gumbel). Long rows draw a block by its mass, then an entry of it, so
    that noise is needed for about `2 sqrt(size)` entries only.

    Args:
        rng_key: key, consumed.
        log_law: normalised log-probabilities. If every entry is -inf the index is 0.

    Returns:
        The index, int32.
    """
    if log_law.shape[0] <= LARGEST_PLAIN_ROW:
        return _largest_perturbed(rng_key, log_law)
    return sample_masses(rng_key, jnp.exp(log_law))


def sample_masses(rng_key: PRNGKeyArray, masses: Float[Array, " size"]) -> Int[Array, ""]:
    """Draws an index in proportion to `masses`, in two levels; zero masses are never drawn unless all are zero."""
    block_key, entry_key = jax.random.split(rng_key)
    size = masses.shape[0]
    width = block_size(size)
    num_blocks = -(-size // width)
    blocks = jnp.pad(masses, (0, num_blocks * width - size)).reshape(num_blocks, width)
    block = _largest_perturbed(block_key, jnp.log(jnp.sum(blocks, axis=-1)))
    return block * width + _largest_perturbed(entry_key, jnp.log(blocks[block]))


def _largest_perturbed(rng_key: PRNGKeyArray, log_masses: Float[Array, " size"]) -> Int[Array, ""]:
    noise = jax.random.gumbel(rng_key, log_masses.shape, log_masses.dtype)
    return jnp.argmax(log_masses + noise).astype(jnp.int32)
