"""Recursive rejection sampling: siblings are tried one after the other against the residual of those before.

Letters: p is the draft's law, q the target's. With r_1 = q, candidate k is accepted with probability
min(1, r_k(x_k)/p_k(x_k)); otherwise r_{k+1} ~ (r_k - p_k)_+. For i.i.d. siblings p_k = p; for siblings drawn without
replacement p_{k+1} is p_k without x_k, renormalised. Drafts that agree with the accepted token stay in the game.

Miao et al., "SpecInfer", ASPLOS 2024, Algorithm 2 (with replacement); Jeon et al., "Recursive Speculative Decoding",
2024 (without).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax.types import DRAW_IID, DRAW_WITHOUT_REPLACEMENT, DraftTree, Proposal
from specjax.verification.active_sets import Candidates, StepLaw, walk_active_sets
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier, register
from specjax.verification.rows import log_one_minus_exp
from specjax.verification.trees import check_draws, depth_table


@dataclasses.dataclass(frozen=True)
class RecursiveRejectionRule(ChoiceRule):
    """One choice a depth: the accepted candidate, or none."""

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts siblings drawn i.i.d. or without replacement."""
        check_draws(tree, "recursive_rejection", (DRAW_IID, DRAW_WITHOUT_REPLACEMENT), "multi_draft_block")

    def choice_sizes(self, tree: DraftTree) -> tuple[int, ...]:
        """The accepted place at each depth."""
        return (depth_table(tree).shape[1] + 1,) * tree.max_depth

    def decide(self, choose: Choose, proposal: Proposal, target_log_laws: Array, carry: Any) -> Outcome:
        """Walks down the tree, drawing the accepted candidate at each depth."""
        some_distinct = DRAW_WITHOUT_REPLACEMENT in proposal.tree.draws
        return walk_active_sets(
            choose,
            proposal,
            target_log_laws,
            lambda candidates: _recursive_rejection_step(candidates, some_distinct),
            lambda residual, target_log_law, draft_log_law: jnp.log(residual),
            jnp.zeros_like(target_log_laws[0]),
        )


def _recursive_rejection_step(candidates: Candidates, some_distinct: bool) -> StepLaw:
    """Law of the accepted place, and the residual; `some_distinct` says that the tree has distinct siblings at all."""
    target = jnp.exp(candidates.target_log_law)
    draft = jnp.exp(candidates.draft_log_law)

    def step(state: tuple[Array, Array], place: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
        residual, remaining = state
        token, active, new_group, distinct = place
        remaining = jnp.where(new_group, draft, remaining)
        accept = jnp.minimum(residual[token] / jnp.maximum(remaining[token], jnp.finfo(draft.dtype).tiny), 1)
        after = jnp.maximum(residual - remaining, 0)
        mass = jnp.sum(after)
        after = jnp.where(mass > 0, after / jnp.where(mass > 0, mass, 1), residual)
        if some_distinct:
            without = remaining.at[token].set(0)
            left = jnp.sum(without)
            next_remaining = jnp.where(left > 0, without / jnp.where(left > 0, left, 1), remaining)
            remaining = jnp.where(active & distinct, next_remaining, remaining)
        residual = jnp.where(active, after, residual)
        return (residual, remaining), jnp.where(active, accept, 0)

    (residual, _), accept = jax.lax.scan(
        step, (target, draft), (candidates.tokens, candidates.active, candidates.new_group, candidates.distinct)
    )
    return StepLaw(first_accepted_log_law(accept), residual)


def first_accepted_log_law(accept: Array) -> Array:
    """Law of the first success among independent trials, failure of all at the end, [W] -> [W+1]."""
    log_accept = jnp.log(accept)
    failed = jnp.cumsum(log_one_minus_exp(log_accept))
    zero = jnp.zeros((1,), accept.dtype)
    return jnp.concatenate([zero, failed]) + jnp.concatenate([log_accept, zero])


RECURSIVE_REJECTION = register(
    Verifier(
        "recursive_rejection",
        RecursiveRejectionRule(),
        summary="recursive rejection of siblings (SpecInfer), with or without replacement",
        multi_draft=True,
        supports_trees=True,
    )
)
