"""SpecTr's k-sequential selection at every token; drafts that agree with the emitted tokens stay active.

Letters: p is the draft's law, q the target's. With n candidates and beta(rho) = sum_x min(p(x), q(x)/rho), rho is the
smallest number in [1, n] with 1 - (1 - beta)^n <= rho beta. Candidates are tried in order, each accepted with
probability min(1, q(x)/(rho p(x))); after n rejections the next token follows
q - min(p, q/rho) (1 - (1 - beta)^n)/beta, normalised. Every rho that satisfies the inequality is lossless, so the
search keeps the upper end.

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023, Algorithm 2 (K-SEQ).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.types import DRAW_IID, DraftTree, Proposal
from specjax.verification.active_sets import Candidates, StepLaw, walk_active_sets
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier, register
from specjax.verification.recursive_rejection import first_accepted_log_law
from specjax.verification.rows import normalise_log_masses
from specjax.verification.trees import check_draws, depth_table

# After so many steps of Newton's method every third is a bisection; rows with NaN must end too.
_SMOOTH_SUMS = 8
_LARGEST_NUM_SUMS = 200


@dataclasses.dataclass(frozen=True)
class SpectrRule(ChoiceRule):
    """One choice a depth: the accepted candidate, or none."""

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts i.i.d. siblings."""
        check_draws(tree, "spectr", (DRAW_IID,), "recursive_rejection")

    def choice_sizes(self, tree: DraftTree) -> tuple[int, ...]:
        """The accepted place at each depth."""
        return (depth_table(tree).shape[1] + 1,) * tree.max_depth

    def decide(self, choose: Choose, proposal: Proposal, target_log_laws: Array, carry: Any) -> Outcome:
        """Walks down the tree, drawing the accepted candidate at each depth."""
        one = jnp.ones((), target_log_laws.dtype)
        return walk_active_sets(
            choose, proposal, target_log_laws, _k_sequential_step, _k_sequential_residual, Division(one, one)
        )


@flax.struct.dataclass
class Division:
    """How a step divides the target: candidates take `scale * min(p, q / rho)`, the residual is the rest.

    Attributes:
        rho: by how much acceptance is scaled down, [].
        scale: (1 - (1 - beta)^n) / beta, [].
    """

    rho: Array
    scale: Array


def _k_sequential_step(candidates: Candidates) -> StepLaw:
    target = jnp.exp(candidates.target_log_law)
    draft = jnp.exp(candidates.draft_log_law)
    count = jnp.maximum(jnp.sum(candidates.active), 1).astype(target.dtype)
    rho, miss = smallest_division(target, draft, count)
    beta = 1 - miss
    scale = jnp.where(beta > 0, -jnp.expm1(count * jnp.log(miss)) / jnp.where(beta > 0, beta, 1), 0)
    ratio = target[candidates.tokens] / (rho * jnp.maximum(draft[candidates.tokens], jnp.finfo(draft.dtype).tiny))
    accept = jnp.where(candidates.active, jnp.minimum(ratio, 1), 0)
    return StepLaw(first_accepted_log_law(accept), Division(rho, scale))


def _k_sequential_residual(division: Division, target_log_law: Array, draft_log_law: Array) -> Array:
    target, draft = jnp.exp(target_log_law), jnp.exp(draft_log_law)
    residual = jnp.maximum(target - division.scale * jnp.minimum(draft, target / division.rho), 0)
    return normalise_log_masses(jnp.log(residual), target_log_law)


def smallest_division(
    target: Float[Array, " vocab"], draft: Float[Array, " vocab"], count: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The smallest rho in [1, n] with 1 - (1 - beta)^n <= rho beta up to rounding, and 1 - beta there.

    With D = 1 - beta = sum_x (p - q/rho)_+ and E = 1 - rho beta = sum_x (q - rho p)_+ the inequality is
    n log D >= log E, where nothing cancels. Newton's method finds the crossing within a bracket whose upper end always
    satisfies it: a few sums over the row, six at the median, where bisection needs one for each binary digit.

    Args:
        target: q, [V].
        draft: p, [V].
        count: n, at least 1.

    Returns:
        rho, a few units of rounding above the smallest, and 1 - beta(rho).
    """
    dtype = target.dtype
    precision = jnp.asarray(16 * jnp.finfo(dtype).eps, dtype)
    one = jnp.ones((), dtype)

    def sums(rho: Array) -> tuple[Array, Array, Array]:
        """n log D - log E, its slope, and D."""
        above = target > rho * draft
        miss = jnp.sum(jnp.where(above, 0, draft - target / rho))
        excess = jnp.sum(jnp.where(above, target - rho * draft, 0))
        miss_slope = jnp.sum(jnp.where(above, 0, target)) / rho**2
        excess_slope = jnp.sum(jnp.where(above, draft, 0))
        difference = jnp.where(excess > 0, count * jnp.log(miss) - jnp.log(excess), jnp.inf)
        return difference, count * miss_slope / miss + excess_slope / excess, miss

    def goes_on(state: _Search) -> Array:
        wide = state.high - state.low > 2 * precision * state.high
        return wide & ~state.found & (state.round < _LARGEST_NUM_SUMS)

    def narrow(state: _Search) -> _Search:
        guess = state.guess
        difference, slope, miss = sums(guess)
        satisfied = difference >= 0
        low, high = jnp.where(satisfied, state.low, guess), jnp.where(satisfied, guess, state.high)
        root = guess - difference / slope
        # From below a little too far, so that the next guess satisfies the inequality.
        step = jnp.where(satisfied, root, root * (1 + precision))
        # Comparisons with NaN are false: a step without a slope is replaced too. Rows with few tokens have corners
        # between which Newton's method can jump for long.
        good = (step > low) & (step < high) & ((state.round < _SMOOTH_SUMS) | (state.round % 3 != 0))
        return _Search(
            low=low,
            high=high,
            miss=jnp.where(satisfied, miss, state.miss),
            guess=jnp.where(good, step, (low + high) / 2),
            found=satisfied & (guess - root <= precision * guess),
            round=state.round + 1,
        )

    upper = count.astype(dtype)
    search = _Search(low=one, high=upper, miss=sums(upper)[2], guess=one, found=jnp.bool_(False), round=jnp.int32(0))
    search = jax.lax.while_loop(goes_on, narrow, search)
    return search.high, search.miss


@flax.struct.dataclass
class _Search:
    low: Array
    high: Array
    miss: Array
    guess: Array
    found: Array
    round: Array


SPECTR = register(
    Verifier(
        "spectr",
        SpectrRule(),
        summary="SpecTr: k-sequential selection (K-SEQ) token by token",
        multi_draft=True,
        supports_trees=True,
    )
)
