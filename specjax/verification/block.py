"""Block verification of one chain: the drafts are accepted or rejected as a whole, nothing is carried over.

Letters: p is the draft's law, q the target's. Position i survives with weight w_i = min(1, w_{i-1} q(x_i)/p(x_i)); the
accepted length is the largest i whose trial of probability h_i = S_i / (S_i + 1 - w_i) succeeds, where
S_i = sum_x (w_i q(x|x^i) - p(x|x^i))_+ and h_L = w_L. The next token follows (w q - p)_+ at the stop, q after full
acceptance. Never worse than `token`, and optimal among the rules for one draft that carry nothing over.

Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025, Algorithm 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.types import DraftTree, Proposal
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier, register
from specjax.verification.block_weights import block_log_weights, last_success_log_law, residual_acceptance
from specjax.verification.rows import (
    drafted_log_ratio,
    log_one_minus_exp,
    log_positive_part,
    normalise_log_masses,
    positive_part_mass,
)
from specjax.verification.trees import check_single_chain, draft_row, node_log_probs


@dataclasses.dataclass(frozen=True)
class BlockRule(ChoiceRule):
    """One choice: the number of accepted tokens."""

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts one chain."""
        check_single_chain(tree, "block")

    def choice_sizes(self, tree: DraftTree) -> tuple[int, ...]:
        """The stop depth."""
        return (tree.num_nodes,)

    def decide(self, choose: Choose, proposal: Proposal, target_log_laws: Array, carry: Any) -> Outcome:
        """Draws the number of accepted tokens from its law given the drafts."""
        length = proposal.tree.num_nodes - 1
        zero = jnp.zeros((), target_log_laws.dtype)
        if length == 0:
            return Outcome(jnp.int32(0), target_log_laws[0], zero)
        log_weight = block_log_weights(drafted_log_ratio(*node_log_probs(proposal, target_log_laws)), zero)
        log_accept, log_reject = block_trials(proposal, target_log_laws, log_weight)
        position = jnp.arange(1, length + 1, dtype=jnp.int32)
        stop, log_prob = choose(0, last_success_log_law(log_accept, log_reject, position <= proposal.max_depth))
        target_row = target_log_laws[stop]
        stop_weight = jnp.concatenate([zero[None], log_weight])[stop]
        residual = log_positive_part(stop_weight + target_row, draft_row(proposal, stop))
        rejected = stop < jnp.minimum(length, proposal.max_depth)
        next_log_law = jnp.where(rejected, normalise_log_masses(residual, target_row), target_row)
        return Outcome(stop, next_log_law, log_prob)


def block_trials(proposal: Proposal, target_log_laws: Array, log_weight: Array) -> tuple[Array, Array]:
    """log h_i and log (1 - h_i) of one chain for i = 1..L; h is the weight itself at the last existing position.

    Args:
        proposal: one chain of L >= 1 drafts.
        target_log_laws: the target's laws, [L+1, V].
        log_weight: log w_1 .. log w_L, none above 0, [L].

    Returns:
        The two logarithms, [L] each.
    """
    length = log_weight.shape[0]
    rows = np.arange(1, length)
    inner = positive_part_mass(log_weight[:-1], target_log_laws, proposal.draft_log_laws, rows, rows)
    residual_mass = jnp.concatenate([inner, jnp.zeros_like(log_weight[:1])])
    is_last = jnp.arange(1, length + 1, dtype=jnp.int32) == jnp.minimum(length, proposal.max_depth)
    log_accept, log_reject = residual_acceptance(log_weight, residual_mass)
    log_accept = jnp.where(is_last, log_weight, log_accept)
    return log_accept, jnp.where(is_last, log_one_minus_exp(log_weight), log_reject)


BLOCK = register(Verifier("block", BlockRule(), summary="block verification of one draft; the default for one draft"))
