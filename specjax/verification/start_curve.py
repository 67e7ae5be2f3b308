"""Selecting the smallest raw score among n drafted children: the curve that makes it exact.

Letters: p is the draft's law, q the target's at one node, rho_c = p(c)/q(c). A child with token c and time u has the
score s = d_c + rho_c u, where the delays d_c >= 0 are fixed before the children are drawn; the smallest score is
selected. With R(s) = P(score of one child > s) and H(s) = int_0^s n R^{n-1}, the selected child is token c with time
below r with probability q(c) A_c(r), A_c(r) = H(d_c + rho_c r) - H(d_c), and the general lemma of `latent_times.py`
applies with A_c clipped at 1. Without delays R(s) >= 1 - s, hence A_c(r) >= 1 - (1 - min(rho_c r, 1))^n: never below
the gap-filled minimum. Any delays are exact; good ones bring one step up to the optimum over all couplings.

R is piecewise linear with a corner wherever a token's scores begin or end, so H has a closed form between corners.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.verification.sorting import ascending_order

# With delays, scores of tokens with larger ratios are drawn on a shorter range, and A_c corrected for it.
LARGEST_RATIO = 64.0

_SHORT_LIST = 512


@flax.struct.dataclass
class StartCurve:
    """H, R and the tokens' ranges at one node.

    Attributes:
        corners: sorted corners, the first is 0, [C].
        area: H at the corners, [C].
        survival: R at the corners, [C].
        slope: -R' after each corner, [C].
        delay: d_c, [V].
        ratio: length of the tokens' score range, [V]; infinite where q is zero.
        gain: rho_c divided by that length, [V].
        start_area: H(d_c), [V].
        share: A_c(1) clipped at 1, [V]; 1 where q is zero.
        num_children: n.
    """

    corners: Float[Array, " corners"]
    area: Float[Array, " corners"]
    survival: Float[Array, " corners"]
    slope: Float[Array, " corners"]
    delay: Float[Array, " vocab"]
    ratio: Float[Array, " vocab"]
    gain: Float[Array, " vocab"]
    start_area: Float[Array, " vocab"]
    share: Float[Array, " vocab"]
    num_children: int = flax.struct.field(pytree_node=False)

    def scores(self, tokens: Array, log_times: Array) -> Array:
        """Scores of drafted children, [n]; infinite for tokens that the target excludes."""
        ratio = self.ratio[tokens]
        usable = ratio < jnp.inf
        times = jnp.exp(log_times)
        return jnp.where(usable, self.delay[tokens] + jnp.where(usable, ratio, 0) * times, jnp.inf)

    def integral(self, score: Array) -> Array:
        """H at a finite score, any shape."""
        num_corners = self.corners.shape[0]
        # On a short list of corners one comparison with all is faster than a search.
        method = "compare_all" if num_corners <= _SHORT_LIST else "scan"
        index = jnp.searchsorted(self.corners, score, side="right", method=method) - 1
        index = jnp.clip(index, 0, num_corners - 1)
        start, survival = self.corners[index], self.survival[index]
        end_survival = jnp.maximum(survival - (score - start) * self.slope[index], 0)
        return self.area[index] + _segment(survival, end_survival, score - start, self.num_children)

    def node_time(self, token: Array, score: Array) -> Array:
        """h = A_c(u_c) of the selected child from its score; 1 or more means overflow."""
        usable = score < jnp.inf
        finite = jnp.where(usable, score, 0)
        time = self.gain[token] * (self.integral(finite) - self.start_area[token])
        return jnp.where(usable, time, jnp.inf)


def _segment(start: Array, end: Array, width: Array, num_children: int) -> Array:
    """Integral of n R^{n-1} over a stretch on which R falls linearly: width * sum_j start^j end^{n-1-j}."""
    total = jnp.ones_like(start)
    power = jnp.ones_like(start)
    for _ in range(num_children - 1):
        power = power * start
        total = total * end + power
    return width * total


def start_curve(
    log_draft_law: Float[Array, " vocab"],
    log_target_law: Float[Array, " vocab"],
    num_children: int,
    delay: Float[Array, " groups"] | None = None,
    group: Int[Array, " vocab"] | None = None,
) -> StartCurve:
    """Builds the curve of one node: one sort of the row.

    Args:
        log_draft_law: the law that the children were drawn from, [V].
        log_target_law: the target's law, [V].
        num_children: n, at least 1.
        delay: non-negative and finite delays of groups of tokens, [G]; None means no delays.
        group: the group of each token, [V]; None means that each token is one, G = V.

    Returns:
        The curve.
    """
    dtype = log_target_law.dtype
    vocab_size = log_target_law.shape[0]
    possible = log_target_law > -jnp.inf
    draft = jnp.exp(log_draft_law)
    log_ratio = jnp.where(possible, log_draft_law - jnp.where(possible, log_target_law, 0), jnp.inf)
    full_ratio = jnp.exp(log_ratio)
    # Without delays only scores below 1 matter, so long ranges do no harm.
    longest = jnp.inf if delay is None else LARGEST_RATIO
    ratio = jnp.where(possible, jnp.minimum(full_ratio, longest), jnp.inf)
    gain = jnp.where(possible & (full_ratio > ratio), full_ratio / jnp.where(possible, ratio, 1), 1)

    # R(s) = constant(s) - s * slope(s), where each corner after s contributes: the end of a token's range its mass and
    # its density, the begin takes back what the token does not lose before it starts.
    excluded = jnp.sum(jnp.where(possible, 0, draft))
    density = jnp.where(possible, draft / jnp.where(possible & (ratio > 0), ratio, 1), 0)
    density = jnp.where(ratio > 0, density, 0)
    mass = jnp.where(possible, draft, 0)
    length = jnp.where(possible, ratio, 0)
    if delay is None:
        delays = jnp.zeros((vocab_size,), dtype)
        # H(1) >= 1: what happens beyond 1 is overflow.
        corners, constants, slopes = jnp.minimum(length, 1), mass, density
        order = ascending_order(corners, largest=1.0)
    else:
        delay = delay.astype(dtype)
        delays = delay if group is None else delay[group]
        density_of_group = density if group is None else jax.ops.segment_sum(density, group, delay.shape[0])
        corners = jnp.concatenate([delays + length, delay])
        constants = jnp.concatenate([mass + density * delays, -density_of_group * delay])
        slopes = jnp.concatenate([density, -density_of_group])
        order = ascending_order(corners)
    zero = jnp.zeros((1,), dtype)
    corners = jnp.concatenate([zero, corners[order]])
    constant = excluded + jnp.append(jax.lax.cumsum(constants[order], reverse=True), zero)
    slope = jnp.maximum(jnp.append(jax.lax.cumsum(slopes[order], reverse=True), zero), 0)
    survival = jnp.clip(constant - corners * slope, 0, 1)
    width = corners[1:] - corners[:-1]
    end_survival = jnp.maximum(survival[:-1] - width * slope[:-1], 0)
    area = jnp.concatenate([zero, jnp.cumsum(_segment(survival[:-1], end_survival, width, num_children))])

    # Every range begins and ends at a corner, so no search is needed for H there.
    corner_area = jnp.zeros(order.shape, dtype).at[order].set(area[1:], unique_indices=True)
    end_area = corner_area[:vocab_size]
    if delay is None:
        start_area = jnp.zeros((vocab_size,), dtype)
        saturated = ratio >= 1
    else:
        group_area = corner_area[vocab_size:]
        start_area = group_area if group is None else group_area[group]
        saturated = ~possible
    share = jnp.where(saturated, 1, jnp.minimum(gain * (end_area - start_area), 1))
    return StartCurve(corners, area, survival, slope, delays, ratio, gain, start_area, share, num_children)
