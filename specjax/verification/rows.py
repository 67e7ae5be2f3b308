"""Functions of one vocabulary row, shared by all rules: ratios, residuals and draws, in log space.

Letters as in the SpecTr papers: p is the draft's law, q the target's. Everything keeps the dtype it is given: float32
in decoding, float64 in exact enumeration. No epsilon stands in any acceptance test.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

# A drafted token was drawn, so its probability is not zero; a logarithm that underflowed is lifted to this value.
LOWEST_DRAFTED_LOG_PROB = -100.0


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
    """log(1 - exp(x)) for x <= 0, exact at both ends: 0 at -inf, -inf at 0; positive x count as 0."""
    return jnp.log(-jnp.expm1(jnp.minimum(log_prob, 0)))


def log_positive_part(
    target_log_law: Float[Array, "*shape"], draft_log_law: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    """log (q - p)_+ elementwise; -inf where q <= p, also where both are zero."""
    larger = target_log_law > draft_log_law
    difference = jnp.where(larger, draft_log_law - target_log_law, 0)
    return jnp.where(larger, target_log_law + log_one_minus_exp(difference), -jnp.inf)


def normalise_log_masses(
    log_masses: Float[Array, " vocab"], fallback: Float[Array, " vocab"]
) -> Float[Array, " vocab"]:
    """The law proportional to `exp(log_masses)`; `fallback` when there is no mass at all.

    A residual without mass belongs to an event of probability zero (up to rounding), so the fallback keeps a row
    finite; it is not what makes a rule right.
    """
    total = jax.nn.logsumexp(log_masses)
    empty = total == -jnp.inf
    return jnp.where(empty, fallback, log_masses - jnp.where(empty, 0, total))


def sample_log_law(rng_key: PRNGKeyArray, log_law: Float[Array, " vocab"]) -> Int[Array, ""]:
    """Draws an index from a log law by the largest perturbed entry; entries of -inf are never drawn.

    Args:
        rng_key: key, consumed.
        log_law: log-probabilities, normalised or not. If every entry is -inf the index is 0.

    Returns:
        The index, int32.
    """
    noise = jax.random.gumbel(rng_key, log_law.shape, log_law.dtype)
    return jnp.argmax(log_law + noise).astype(jnp.int32)
