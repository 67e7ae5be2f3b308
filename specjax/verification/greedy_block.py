"""Greedy block verification of one chain: accepts as much as any rule can in one iteration, and carries the rest over.

Letters: p is the draft's law, q the target's as changed by the carry. With w_i = q(x^i)/p(x^i) along the whole prefix,
not clipped, position i is accepted with h_i = 1 if w_i >= 1, else A_i / (A_i + 1 - w_i), A_i = sum_x (w_i q - p)_+, and
h_L = min(1, w_L); the accepted length is the largest i whose trial succeeds. The next token follows (w q - p)_+ at the
stop, and the target of the following iterations is changed for the rest of the block (`carry.py`). A prefix v is
accepted with probability min(p_v, q_v), the largest possible; but the changed targets are further from the draft, and
over several iterations the rule often needs more target calls than `block`.

Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025, Algorithms 5 and 6, with the change of the
target nested over iterations.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from specjax.types import DraftTree, Proposal
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier, register
from specjax.verification.block import block_trials
from specjax.verification.block_weights import last_success_log_law
from specjax.verification.carry import Carry, advance, apply_carry, init_carry, log_path_ratio, remaining_log_masses
from specjax.verification.rows import normalise_log_masses
from specjax.verification.trees import check_single_chain, draft_row


@dataclasses.dataclass(frozen=True)
class GreedyBlockRule(ChoiceRule):
    """One choice: the number of accepted tokens."""

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts one chain."""
        check_single_chain(tree, "greedy_block")

    def init_carry(self, tree: DraftTree, vocab_size: int) -> Carry:
        """No level."""
        return init_carry(tree)

    def choice_sizes(self, tree: DraftTree) -> tuple[int, ...]:
        """The stop depth."""
        return (tree.num_nodes,)

    def decide(self, choose: Choose, proposal: Proposal, target_log_laws: Array, carry: Carry) -> Outcome:
        """Draws the number of accepted tokens from its law given the drafts."""
        length = proposal.tree.num_nodes - 1
        zero = jnp.zeros((), target_log_laws.dtype)
        if length == 0:
            return Outcome(jnp.int32(0), target_log_laws[0], zero)
        laws, levels = apply_carry(carry, proposal, target_log_laws, num_drafts=1)
        log_z = log_path_ratio(proposal, laws, zero)
        log_accept, log_reject = block_trials(proposal, laws, jnp.minimum(-log_z[1:], 0))
        position = jnp.arange(1, length + 1, dtype=jnp.int32)
        stop, log_prob = choose(0, last_success_log_law(log_accept, log_reject, position <= proposal.max_depth))
        residual = remaining_log_masses(laws[stop], draft_row(proposal, stop), log_z[stop], num_drafts=1)
        rejected = stop < jnp.minimum(length, proposal.max_depth)
        next_log_law = jnp.where(rejected, normalise_log_masses(residual, laws[stop]), laws[stop])
        return Outcome(stop, next_log_law, log_prob, (levels, target_log_laws, log_z))

    def advance_carry(self, carry: Carry, proposal: Proposal, outcome: Outcome, next_token: Array) -> Any:
        """Moves the levels on and adds one if the block stopped early."""
        if proposal.tree.num_nodes == 1:
            return carry
        levels, target_log_laws, log_z = outcome.working
        stop = outcome.stop_node
        return advance(carry, levels, proposal, target_log_laws, stop, next_token, log_z[stop], num_drafts=1)


GREEDY_BLOCK = register(
    Verifier(
        "greedy_block",
        GreedyBlockRule(),
        summary="greedy block verification of one draft, with nested carry-over",
        carries_state=True,
        needs_context_law=True,
    )
)
