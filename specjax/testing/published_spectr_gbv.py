"""SpecTr-GBV's acceptance rule as it circulates. NOT lossless for two or more drafts; for analysis only.

Letters: p is the draft's law, q the target's, Z_v = p_v/q_v, f(v) = q_v (1 - (1 - min(1, Z_v))^K) the mass with which
the article wants prefix v accepted. Drafts are tried in order, each from the depth below the best so far, with
    h(v) = (f(v) - sum_x f(vx)) / (1 - (1 - p_v)^K - sum_x f(vx)),    at the last depth f(v) / (1 - (1 - p_v)^K);
the last success is kept, prefixes that were rejected before are skipped (but for the last token), a full block ends the
search. The denominator is the probability that v is drafted and nothing below it accepted. It forgets that a node of
another draft may have been accepted before v is tried, so v is accepted less often than the residual assumes.

The verifier here is not registered and cannot be chosen for decoding; the lossless rule is `spectr_gbv`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from specjax.types import DraftTree, Proposal
from specjax.verification.base import ChoiceRule, Choose, Outcome, Verifier
from specjax.verification.carry import log_path_ratio, remaining_log_masses
from specjax.verification.rows import log_one_minus_exp, normalise_log_masses
from specjax.verification.trees import chain_table, draft_row, draft_row_table, node_log_probs, path_table


@dataclasses.dataclass(frozen=True)
class PublishedSpectrGbvRule(ChoiceRule):
    """One trial for each drafted node, in order of the drafts."""

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts disjoint chains."""
        chain_table(tree, "published_spectr_gbv")

    def choice_sizes(self, tree: DraftTree) -> tuple[int, ...]:
        """Reject or accept at each node."""
        return (2,) * (tree.num_nodes - 1)

    def decide(self, choose: Choose, proposal: Proposal, target_log_laws: Array, carry: Any) -> Outcome:
        """Runs the trials."""
        tree = proposal.tree
        dtype = target_log_laws.dtype
        chains = chain_table(tree, "published_spectr_gbv")
        num_drafts, length = chains.shape
        log_accept, log_reject, log_z = self._trials(proposal, target_log_laws, num_drafts)
        path = path_table(tree)
        path_tokens = jnp.where(path >= 0, proposal.tokens[path], -1).at[:, 0].set(0)

        best_depth = jnp.int32(0)
        best_node = jnp.int32(0)
        rejected = jnp.zeros((tree.num_nodes,), bool)
        log_prob = jnp.zeros((), dtype)
        for chain in range(num_drafts):
            start = best_depth
            full = best_depth == length
            for position in range(1, length + 1):
                node = int(chains[chain, position - 1])
                same = jnp.all(path_tokens == path_tokens[node], axis=1)
                known = jnp.any(same & rejected) & (position < length)
                tried = ~full & ~known & (position > start)
                trial = jnp.stack([log_reject[node], log_accept[node]])
                choice, log_choice = choose(node - 1, jnp.where(tried, trial, jnp.asarray([0, -jnp.inf], dtype)))
                log_prob += log_choice
                success = tried & (choice == 1)
                rejected = rejected.at[node].set(tried & (choice == 0))
                best_depth = jnp.where(success, position, best_depth)
                best_node = jnp.where(success, node, best_node)
        row = target_log_laws[best_node]
        residual = normalise_log_masses(
            remaining_log_masses(row, draft_row(proposal, best_node), log_z[best_node], num_drafts), row
        )
        return Outcome(best_node, jnp.where(best_depth == length, row, residual), log_prob)

    def _trials(self, proposal: Proposal, target_log_laws: Array, num_drafts: int) -> tuple[Array, Array, Array]:
        """log h, log (1 - h) and log Z of every node, [N+1] each."""
        tree = proposal.tree
        log_z = log_path_ratio(proposal, target_log_laws, jnp.zeros((), target_log_laws.dtype))
        target, draft = node_log_probs(proposal, target_log_laws)
        path = path_table(tree)

        def joint(log_probs: Array) -> Array:
            own = jnp.concatenate([jnp.zeros((1,), log_probs.dtype), log_probs])
            return jnp.sum(jnp.where(path >= 0, own[path], 0), axis=1)

        log_target, log_draft = joint(target), joint(draft)

        def share(log_ratio: Array) -> Array:
            """1 - (1 - min(1, Z))^K."""
            return jnp.exp(log_one_minus_exp(num_drafts * log_one_minus_exp(log_ratio)))

        wanted = jnp.exp(log_target) * share(log_z)
        drafted = jnp.exp(log_one_minus_exp(num_drafts * log_one_minus_exp(log_draft)))
        rows = proposal.draft_log_laws[draft_row_table(tree)]
        possible = target_log_laws > -jnp.inf
        ratio = log_z[:, None] + rows - jnp.where(possible, target_log_laws, 0)
        ratio = jnp.where(rows > -jnp.inf, ratio, -jnp.inf)
        below = jnp.sum(jnp.where(possible, jnp.exp(log_target[:, None] + target_log_laws) * share(ratio), 0), axis=1)
        is_leaf = jnp.asarray([not children for children in tree.children])
        below = jnp.where(is_leaf, 0, below)
        tried = drafted - below
        accept = jnp.clip(jnp.where(tried > 0, (wanted - below) / jnp.where(tried > 0, tried, 1), 1), 0, 1)
        return jnp.log(accept), jnp.log1p(-accept), log_z


PUBLISHED_SPECTR_GBV = Verifier(
    "published_spectr_gbv",
    PublishedSpectrGbvRule(),
    summary="SpecTr-GBV's rule as it circulates; NOT lossless for several drafts, for analysis only",
    multi_draft=True,
    lossless=False,
)
