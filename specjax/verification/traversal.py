"""Traversal verification of K disjoint chains: chain after chain, each from its leaf upwards.

Letters: p is the draft's law, q the target's. Chain k starts from the root's residual law r_k (r_1 = q) with weight
w_1 = min(1, r_k(x_1)/p(x_1)) and is verified like a block below that; if nothing of it is accepted, the root's residual
becomes r_{k+1} ~ (r_k - p)_+ and the next chain is tried. One chain is block verification.

Weng et al., "Traversal Verification for Speculative Tree Decoding", 2025, for trees that branch at the root only.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.types import DRAW_IID, DraftTree, Proposal
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier, register
from specjax.verification.block_weights import block_log_weights, last_success_log_law, residual_acceptance
from specjax.verification.rows import (
    drafted_log_ratio,
    log_one_minus_exp,
    log_positive_part,
    normalise_log_masses,
    positive_part_mass,
)
from specjax.verification.trees import chain_table, check_draws, draft_row, draft_row_table, node_log_probs


@dataclasses.dataclass(frozen=True)
class TraversalRule(ChoiceRule):
    """One choice: the stop node."""

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts disjoint chains of i.i.d. drafts."""
        chain_table(tree, "traversal")
        check_draws(tree, "traversal", (DRAW_IID,), "multi_draft_block")

    def choice_sizes(self, tree: DraftTree) -> tuple[int, ...]:
        """The stop node."""
        return (tree.num_nodes,)

    def decide(self, choose: Choose, proposal: Proposal, target_log_laws: Array, carry: Any) -> Outcome:
        """Draws the stop node from its law given the drafts."""
        tree = proposal.tree
        dtype = target_log_laws.dtype
        if tree.num_nodes == 1:
            return Outcome(jnp.int32(0), target_log_laws[0], jnp.zeros((), dtype))
        chains = chain_table(tree, "traversal")
        num_chains, length = chains.shape
        position = jnp.arange(1, length + 1, dtype=jnp.int32)

        first_weight, residuals = _root_residuals(proposal, target_log_laws[0], chains[:, 0])
        target, draft = node_log_probs(proposal, target_log_laws)
        deeper_ratio = drafted_log_ratio(target, draft)[chains[:, 1:] - 1]
        deeper_weight = block_log_weights(deeper_ratio, first_weight)
        log_weight = jnp.concatenate([first_weight[:, None], deeper_weight], axis=1)

        inner = chains[:, :-1]
        inner_mass = positive_part_mass(
            log_weight[:, :-1], target_log_laws, proposal.draft_log_laws, inner, draft_row_table(tree)[inner]
        )
        residual_mass = jnp.concatenate([inner_mass, jnp.zeros((num_chains, 1), dtype)], axis=1)
        log_accept, log_reject = residual_acceptance(log_weight, residual_mass)
        is_last = position == jnp.minimum(length, proposal.max_depth)
        log_accept = jnp.where(is_last, log_weight, log_accept)
        log_reject = jnp.where(is_last, log_one_minus_exp(log_weight), log_reject)

        within = last_success_log_law(log_accept, log_reject, position <= proposal.max_depth)
        rejected = jnp.cumsum(within[:, 0])
        tried = jnp.concatenate([jnp.zeros((1,), dtype), rejected[:-1]])
        by_node = jnp.zeros((tree.num_nodes,), dtype).at[0].set(rejected[-1])
        by_node = by_node.at[chains].set(tried[:, None] + within[:, 1:])
        stop, log_prob = choose(0, by_node)

        weights = jnp.zeros((tree.num_nodes,), dtype).at[chains].set(log_weight)
        target_row = target_log_laws[stop]
        residual = log_positive_part(weights[stop] + target_row, draft_row(proposal, stop))
        depth = jnp.asarray(tree.depth, jnp.int32)[stop]
        has_children = depth < jnp.minimum(length, proposal.max_depth)
        next_log_law = jnp.where(has_children, normalise_log_masses(residual, target_row), target_row)
        at_root = (stop == 0) & has_children
        return Outcome(stop, jnp.where(at_root, residuals, next_log_law), log_prob)


def _root_residuals(proposal: Proposal, root_log_law: Array, first_nodes: np.ndarray) -> tuple[Array, Array]:
    """log w_1 of each chain [K], and the log residual law at the root after all chains are rejected [V].

    All residuals have one form, r_k = (q - c_k p)_+ / m_k: taking p away once more adds m_k to c_k. So a chain costs
    one sum over the row.
    """
    target, draft = jnp.exp(root_log_law), jnp.exp(proposal.draft_log_laws[0])

    def step(residual: tuple[Array, Array], token: Array) -> tuple[tuple[Array, Array], Array]:
        taken, mass = residual
        log_left = jnp.log(jnp.maximum(target[token] - taken * draft[token], 0) / mass)
        log_weight = jnp.minimum(drafted_log_ratio(log_left, proposal.draft_log_laws[0, token]), 0)
        next_taken = taken + mass
        next_mass = jnp.sum(jnp.maximum(target - next_taken * draft, 0))
        # Without any mass left the chain cannot be rejected.
        empty = next_mass <= 0
        return (jnp.where(empty, taken, next_taken), jnp.where(empty, mass, next_mass)), log_weight

    one = jnp.ones((), target.dtype)
    (taken, _), weights = jax.lax.scan(step, (0 * one, one), proposal.tokens[first_nodes])
    residual = jnp.log(jnp.maximum(target - taken * draft, 0))
    return weights, normalise_log_masses(residual, root_log_law)


TRAVERSAL = register(
    Verifier(
        "traversal",
        TraversalRule(),
        summary="traversal verification of K disjoint chains (Weng et al.)",
        multi_draft=True,
    )
)
