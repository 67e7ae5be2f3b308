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
from jaxtyping import Array, Float

from specjax.types import DraftTree, Proposal
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier, register
from specjax.verification.rows import drafted_log_ratio, log_one_minus_exp, log_positive_part, normalise_log_masses
from specjax.verification.trees import check_single_chain, draft_row, node_log_probs


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
        if length == 0:
            return Outcome(jnp.int32(0), target_log_laws[0], jnp.zeros((), target_log_laws.dtype))
        log_accept = jnp.minimum(drafted_log_ratio(*node_log_probs(proposal, target_log_laws)), 0)
        exists = jnp.arange(1, length + 1, dtype=jnp.int32) <= proposal.max_depth
        stop, log_prob = choose(0, first_failure_log_law(jnp.where(exists, log_accept, -jnp.inf)))
        target_row = target_log_laws[stop]
        residual = log_positive_part(target_row, draft_row(proposal, stop))
        rejected = stop < jnp.minimum(length, proposal.max_depth)
        next_log_law = jnp.where(rejected, normalise_log_masses(residual, target_row), target_row)
        return Outcome(stop, next_log_law, log_prob)


def first_failure_log_law(log_accept: Float[Array, " length"]) -> Float[Array, " stops"]:
    """Law of the number of successes before the first failure of independent trials.

    Args:
        log_accept: log-probability that trial i succeeds, [L].

    Returns:
        Log-probability of exactly i successes before the first failure, i = 0..L, [L+1].
    """
    zero = jnp.zeros((1,), log_accept.dtype)
    reached = jnp.concatenate([zero, jnp.cumsum(log_accept)])
    failed = jnp.concatenate([log_one_minus_exp(log_accept), zero])
    return reached + failed


TOKEN = register(
    Verifier("token", TokenRule(), summary="standard speculative sampling, token by token; the reference rule")
)
