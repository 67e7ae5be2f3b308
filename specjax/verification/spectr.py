"""SpecTr's k-sequential selection at every token; drafts that agree with the emitted tokens stay active.

Letters: p is the draft's law, q the target's. With n candidates and beta(rho) = sum_x min(p(x), q(x)/rho), rho is the
smallest number in [1, n] with 1 - (1 - beta)^n <= rho beta. Candidates are tried in order, each accepted with
probability min(1, q(x)/(rho p(x))); after n rejections the next token follows
q - min(p, q/rho) (1 - (1 - beta)^n)/beta, normalised. Every rho that satisfies the inequality is lossless, so bisection
keeps the upper end.

Sun et al., "SpecTr: Fast Speculative Decoding via Optimal Transport", NeurIPS 2023, Algorithm 2 (K-SEQ).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax.types import DRAW_IID, DraftTree, Proposal
from specjax.verification.active_sets import Candidates, StepLaw, walk_active_sets
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier, register
from specjax.verification.recursive_rejection import first_accepted_log_law
from specjax.verification.rows import normalise_log_masses
from specjax.verification.trees import check_draws, depth_table


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
        return walk_active_sets(choose, proposal, target_log_laws, _k_sequential_step)


def _k_sequential_step(candidates: Candidates) -> StepLaw:
    target = jnp.exp(candidates.target_log_law)
    draft = jnp.exp(candidates.draft_log_law)
    count = jnp.maximum(jnp.sum(candidates.active), 1).astype(target.dtype)

    def success(beta: Array) -> Array:
        """1 - (1 - beta)^n."""
        return -jnp.expm1(count * jnp.log1p(-jnp.minimum(beta, 1)))

    def shared_mass(rho: Array) -> Array:
        return jnp.sum(jnp.minimum(draft, target / rho))

    def bisect(_: Array, ends: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = ends
        middle = (low + high) / 2
        beta = shared_mass(middle)
        enough = success(beta) <= middle * beta
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    # Each step is one reduction over the row; the mantissa is used up after so many.
    num_steps = jnp.finfo(target.dtype).nmant + 1
    one = jnp.ones((), target.dtype)
    _, rho = jax.lax.fori_loop(0, num_steps, bisect, (one, count))
    beta = shared_mass(rho)
    scale = jnp.where(beta > 0, success(beta) / jnp.where(beta > 0, beta, 1), 0)
    residual = jnp.maximum(target - scale * jnp.minimum(draft, target / rho), 0)
    ratio = target[candidates.tokens] / (rho * jnp.maximum(draft[candidates.tokens], jnp.finfo(draft.dtype).tiny))
    accept = jnp.where(candidates.active, jnp.minimum(ratio, 1), 0)
    residual_log_law = normalise_log_masses(jnp.log(residual), candidates.target_log_law)
    return StepLaw(first_accepted_log_law(accept), residual_log_law)


SPECTR = register(
    Verifier(
        "spectr",
        SpectrRule(),
        summary="SpecTr: k-sequential selection (K-SEQ) token by token",
        multi_draft=True,
        supports_trees=True,
    )
)
