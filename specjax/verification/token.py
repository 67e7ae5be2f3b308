"""Standard speculative sampling of one chain, token by token.

Letters: p is the draft's law, q the target's. Drafted tokens are accepted in order with probability min(1, q(x)/p(x));
after the first rejection the next token is drawn from (q - p)_+, normalised, after full acceptance from q.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", ICML 2023, Algorithm 1; Chen et al.,
"Accelerating Large Language Model Decoding with Speculative Sampling", 2023, Algorithm 2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from specjax.types import DraftTree, Proposal
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier, register
from specjax.verification.chains import check_single_chain, drafted_log_probs, exists, first_failure_log_law
from specjax.verification.rows import drafted_log_ratio, log_positive_part, normalise_log_masses


@dataclasses.dataclass(frozen=True)
class TokenRule(ChoiceRule):
    """One choice: the number of accepted tokens."""

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts one chain."""
        check_single_chain(tree, "token")

    def choice_sizes(self, tree: DraftTree) -> tuple[int, ...]:
        """The stop depth."""
        return (tree.num_nodes,)

    def decide(self, choose: Choose, proposal: Proposal, target_log_laws: Array, carry: Any) -> Outcome:
        """Draws the number of accepted tokens from its law given the drafts."""
        length = proposal.tree.num_nodes - 1
        log_target, log_draft = drafted_log_probs(proposal, target_log_laws)
        log_accept = jnp.minimum(drafted_log_ratio(log_target, log_draft), 0)
        log_accept = jnp.where(exists(jnp.arange(1, length + 1), proposal), log_accept, -jnp.inf)
        stop, log_prob = choose(0, first_failure_log_law(log_accept))
        target_row = target_log_laws[stop]
        if length == 0:
            return Outcome(stop, target_row, log_prob)
        residual = log_positive_part(target_row, proposal.draft_log_laws[jnp.minimum(stop, length - 1)])
        rejected = stop < jnp.minimum(length, proposal.max_depth)
        next_log_law = jnp.where(rejected, normalise_log_masses(residual, target_row), target_row)
        return Outcome(stop, next_log_law, log_prob)


TOKEN = register(
    Verifier("token", TokenRule(), summary="standard speculative sampling, token by token; the reference rule")
)
