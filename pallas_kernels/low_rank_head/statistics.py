"""Running maximum, sum of exponentials and best score: what greedy and sampled drafting keep of the logits.

Every accumulator of a kernel holds its own `Running` and updates it elementwise; `merge` joins the sets of tokens
that CTAs or grid steps have seen.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

# Finite, since -inf - -inf is not a number; below every logit, so that a row of low ones still has a token.
LOWEST = np.finfo(np.float32).min
NO_TOKEN = np.int32(2**31 - 1)
# Colder, float32 logits no longer tell the law: their rounding alone is a nat.
COLDEST = np.float32(1e-5)
# Hotter, the law is uniform; without this bound an excluded token's -inf would be multiplied with zero.
HOTTEST = np.float32(1e30)
_LOG2_E = np.float32(np.log2(np.e))


class HeadDraw(NamedTuple):
    """A token for each row.

    Attributes:
        token: [B] int32.
        log_prob: its log-probability, [B] float32.
        logsumexp: log of the sum of exp of the (tempered) logits, [B] float32.
    """

    token: Int[Array, "batch"]
    log_prob: Float[Array, "batch"]
    logsumexp: Float[Array, "batch"]


class Running(NamedTuple):
    """Statistics of the logits seen so far; all arrays have one shape.

    Attributes:
        maximum: greatest logit, float32.
        total: sum of exp(logit - maximum), float32.
        best: greatest score (logit plus noise), float32; of greedy drafting it is `maximum`.
        token: lowest id with that score, int32.
    """

    maximum: Any
    total: Any
    best: Any
    token: Any


class Part(NamedTuple):
    """Statistics of a set of tokens; all arrays have one shape.

    Attributes:
        logsumexp: of its logits, float32; -inf for an empty set.
        best: greatest score, float32.
        token: lowest id with that score, int32.
        log_prob: log-probability of that token within the set, float32; NaN for an empty set.
    """

    logsumexp: Any
    best: Any
    token: Any
    log_prob: Any


def update(running: Running, logits: Array, scores: Array | None, token: Array, valid: Array) -> Running:
    """Adds one logit to each accumulator, with one exponential.

    Tokens must come in increasing order, so that the first of equal scores stays.

    Args:
        running: the accumulators.
        logits: float32.
        scores: logits plus noise, or None for greedy drafting.
        token: ids, int32.
        valid: which of them exist; the others change nothing.
    """
    logits = jnp.where(valid, logits, LOWEST)
    greater = logits > running.maximum
    # exp(-|difference|) rescales the old sum if the maximum moves, and is the new term if it does not.
    scale = jnp.exp2(jnp.minimum(logits - running.maximum, running.maximum - logits) * _LOG2_E)
    total = jnp.where(greater, running.total * scale + jnp.float32(1.0), running.total + jnp.where(valid, scale, 0.0))
    maximum = jnp.where(greater, logits, running.maximum)
    if scores is None:
        return Running(maximum, total, maximum, jnp.where(greater, token, running.token))
    scores = jnp.where(valid, scores, LOWEST)
    better = scores > running.best
    return Running(maximum, total, jnp.where(better, scores, running.best), jnp.where(better, token, running.token))


def of_tile(logits: Array, scores: Array | None, token: Array, valid: Array) -> Part:
    """Statistics of a whole tile [B, tile], over its last axis."""
    logits = jnp.where(valid, logits, LOWEST)
    maximum = jnp.max(logits, axis=1)
    total = jnp.sum(jnp.where(valid, jnp.exp(logits - maximum[:, None]), 0.0), axis=1)
    scores = logits if scores is None else jnp.where(valid, scores, LOWEST)
    best = jnp.max(scores, axis=1)
    # A maximum of negated ids: every compiler has it for int32.
    lowest = -jnp.max(jnp.where(scores == best[:, None], -token, -NO_TOKEN), axis=1)
    chosen = jnp.max(jnp.where(token == lowest[:, None], logits, LOWEST), axis=1)
    logsumexp = closed_sum(maximum, total)
    return Part(logsumexp, best, known_token(lowest, logsumexp), log_prob_of(chosen, logsumexp))


def closed_sum(maximum: Array, total: Array) -> Array:
    """The logsumexp of a running sum: -inf if it is empty, NaN if a logit was NaN or plus infinity."""
    logsumexp = maximum + jnp.log(total)
    return jnp.where(total == 0.0, -jnp.inf, jnp.where(logsumexp < jnp.inf, logsumexp, jnp.nan))


def known_token(token: Array, logsumexp: Array) -> Array:
    """The token, or 0 where there is none: a logit is NaN or plus infinity, or all are -inf."""
    return jnp.where((logsumexp < jnp.inf) & (logsumexp > -jnp.inf), token, 0)


def log_prob_of(logit: Array, logsumexp: Array) -> Array:
    """Log-probability of a logit within its set; NaN in an empty set."""
    return jnp.where(logsumexp == -jnp.inf, jnp.nan, logit - logsumexp)


def merge(one: Part, other: Part) -> Part:
    """Statistics of two disjoint sets of tokens together; a sum that is not finite gives NaN and token 0."""
    takes = (other.best > one.best) | ((other.best == one.best) & (other.token < one.token))
    greatest = jnp.maximum(one.logsumexp, other.logsumexp)
    # Two empty sets: without the shift their difference would be NaN.
    shift = jnp.where(greatest == -jnp.inf, 0.0, greatest)
    logsumexp = shift + jnp.log(jnp.exp(one.logsumexp - shift) + jnp.exp(other.logsumexp - shift))
    token = known_token(jnp.where(takes, other.token, one.token), logsumexp)
    # The steps of the logsumexp cancel along the way, so that these sums end at logit - logsumexp.
    log_prob = jnp.where(takes, other.log_prob + other.logsumexp, one.log_prob + one.logsumexp) - logsumexp
    return Part(logsumexp, jnp.where(takes, other.best, one.best), token, log_prob)


def merge_all(parts: Part) -> HeadDraw:
    """Joins parts [n, B] to the result of each row: one reduction of four operands, which compiles to one kernel.

    The log-probability and the rule for what is not finite are inside the reduction for the same reason.
    """
    start = Part(np.float32(-np.inf), LOWEST, NO_TOKEN, np.float32(0.0))
    whole = Part(*lax.reduce(tuple(parts), tuple(start), lambda a, b: tuple(merge(Part(*a), Part(*b))), (0,)))
    return HeadDraw(whole.token, whole.log_prob, whole.logsumexp)


def checked(token: Int[Array, "batch"], log_prob: Float[Array, "batch"], logsumexp: Float[Array, "batch"]) -> HeadDraw:
    """The documented result of rows without a finite logsumexp: token 0, and NaN; the logsumexp may be -inf."""
    finite = jnp.isfinite(logsumexp)
    nan = jnp.float32(jnp.nan)
    return HeadDraw(
        jnp.where(finite, token, 0).astype(jnp.int32),
        jnp.where(finite, log_prob, nan),
        jnp.where(logsumexp < jnp.inf, logsumexp, nan),
    )


def tempering(temperature: Float[Array, "batch"]) -> tuple[Array, Array]:
    """What to multiply the logits with, and the noise: 1/temperature and 1, or 1 and 0 where it is not above 0."""
    hot = temperature > 0
    return jnp.where(hot, 1.0 / bounded(temperature), 1.0), hot.astype(jnp.float32)


def bounded(temperature: Float[Array, "batch"]) -> Float[Array, "batch"]:
    """Temperatures for division: those that float32 logits can bear."""
    return jnp.clip(temperature, COLDEST, HOTTEST)
