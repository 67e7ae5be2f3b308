"""Latest-start delays: an experimental refinement of the selection among drafted children.

A token whose selected children are all accepted can start its scores later without losing any, which leaves more room
for the others; repeated, this approaches the optimal one-step transport. Any delays are exact (`start_curve.py`), so
they are computed on a histogram of log(p/q) only. At nodes whose children branch on, a full delay would cost alignment
further down; there a token must be saturated already at time `share`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.verification.start_curve import StartCurve, start_curve

NUM_BINS = 64
LARGEST_LOG_RATIO = 4.0
NUM_ROUNDS = 4
INNER_SHARE = 0.85


def latest_start_delays(
    log_draft_law: Float[Array, " vocab"],
    log_target_law: Float[Array, " vocab"],
    num_children: int,
    share: Float[Array, ""],
) -> tuple[Float[Array, " bins"], Int[Array, " vocab"]]:
    """Delays for the tokens of one node: those of a bin have one.

    Args:
        log_draft_law: the law that the children are drawn from, [V].
        log_target_law: the target's law, [V].
        num_children: n, at least 2; with one child delays change nothing.
        share: 1 at nodes whose children are leaves, `INNER_SHARE` at others.

    Returns:
        Delays of bins, and the bin of each token.
    """
    possible = log_target_law > -jnp.inf
    log_ratio = jnp.where(possible, log_draft_law - jnp.where(possible, log_target_law, 0), 0)
    position = (log_ratio + LARGEST_LOG_RATIO) * (NUM_BINS / (2 * LARGEST_LOG_RATIO))
    position = jnp.clip(jnp.where(jnp.isfinite(position), position, 0), 0, NUM_BINS - 1)
    # The last bin holds the tokens that the target excludes.
    bins = jnp.where(possible, position.astype(jnp.int32), NUM_BINS)
    draft = jax.ops.segment_sum(jnp.exp(log_draft_law), bins, NUM_BINS + 1)
    target = jax.ops.segment_sum(jnp.exp(log_target_law), bins, NUM_BINS + 1)
    log_draft, log_target = jnp.log(draft), jnp.log(target)

    delay = jnp.zeros_like(log_target)
    for _ in range(NUM_ROUNDS):
        curve = start_curve(log_draft, log_target, num_children, delay)
        delay = _latest_start(curve, share.astype(delay.dtype))
    return delay, bins


def _latest_start(curve: StartCurve, share: Array) -> Array:
    """sup of the delays at which a token is still saturated at time `share`; the old delay where it is not."""
    usable = curve.ratio < jnp.inf
    length = jnp.where(usable, curve.ratio, 0) * share

    def saturated(delay: Array) -> Array:
        return curve.gain * (curve.integral(delay + length) - curve.integral(delay)) >= 1

    def bisect(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        good = saturated(middle)
        return jnp.where(good, middle, low), jnp.where(good, high, middle)

    ends = (curve.delay, jnp.full_like(curve.delay, curve.corners[-1]))
    latest, _ = jax.lax.fori_loop(0, 40, bisect, ends)
    return jnp.where(usable & saturated(curve.delay), latest, curve.delay)
