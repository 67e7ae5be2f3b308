"""What rules for one chain of drafts share: drafted log-probabilities, the stop law, the refusal of other trees."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.types import DraftTree, Proposal
from specjax.verification.rows import log_one_minus_exp


def check_single_chain(tree: DraftTree, name: str) -> None:
    """Refuses everything but one chain.

    Raises:
        ValueError: naming the rules that use several drafts.
    """
    if any(len(children) > 1 for children in tree.children):
        raise ValueError(
            f"`verifier` {name!r} uses one chain of drafts; got a tree with {len(tree.children[0])} children at its "
            "root. Use one draft, or a rule for several such as 'multi_draft_block'"
        )


def drafted_log_probs(
    proposal: Proposal, target_log_laws: Float[Array, "nodes vocab"]
) -> tuple[Float[Array, " length"], Float[Array, " length"]]:
    """Target's and draft's log-probability of each drafted token of one chain, both [L]."""
    tokens = proposal.tokens[1:, None]
    target = jnp.take_along_axis(target_log_laws[:-1], tokens, axis=1)[:, 0]
    draft = jnp.take_along_axis(proposal.draft_log_laws, tokens, axis=1)[:, 0]
    return target, draft


def first_failure_log_law(log_accept: Float[Array, " length"]) -> Float[Array, " stops"]:
    """Law of the number of successes before the first failure of independent trials.

    Args:
        log_accept: log-probability that trial i succeeds, [L].

    Returns:
        Log-probability of stopping after exactly i successes, i = 0..L, [L+1].
    """
    zero = jnp.zeros((1,), log_accept.dtype)
    reached = jnp.concatenate([zero, jnp.cumsum(log_accept)])
    failed = jnp.concatenate([log_one_minus_exp(log_accept), zero])
    return reached + failed


def exists(depth: Int[Array, "*shape"], proposal: Proposal) -> Array:
    """Whether nodes of this depth exist for this request."""
    return depth <= proposal.max_depth
