"""Corrected SpecTr-GBV: greedy multi-draft block verification of K i.i.d. chains, with nested carry-over.

Letters: p is the draft's law, q the target's as changed by the carry, Z_v = p_v/q_v along a prefix of the block. Each
chain has latent times n_L >= .. >= n_0 = T (`latent_times.py`, in the block's own units: n_i = Z_i u_i); the chain with
the smallest T is kept and accepted as far as its times stay below the second smallest T. A prefix is accepted with
probability q_v (1 - (1 - min(1, Z_v))^K), which attains the conditional-independence-coupling bound. The next token
follows q(x) (1 - min(1, Z_v p(x)/q(x)))^K, and the target of the following iterations is changed for the rest of the
block (`carry.py`). One chain is greedy block verification in law.

The acceptance rule of the article (SpecTr-GBV, arXiv 2604.25925), as it circulates in code, does not preserve the
target's law for K >= 2; this rule has the properties that the article states.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from specjax.types import DRAW_IID, DraftTree, Proposal, Verdict
from specjax.verification.base import Verifier, make_verdict, register
from specjax.verification.carry import (
    Carry,
    Levels,
    advance,
    apply_carry,
    init_carry,
    log_path_ratio,
    remaining_log_masses,
)
from specjax.verification.latent_times import Times, node_selections, propagate_times
from specjax.verification.multi_draft_block import draw_noise, node_log_ratio
from specjax.verification.rows import normalise_log_masses, sample_log_law
from specjax.verification.trees import chain_table, check_draws, draft_row


@dataclasses.dataclass(frozen=True)
class SpectrGbvRule:
    """Latent times of K chains; accepts down to the second smallest."""

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts disjoint chains of i.i.d. drafts."""
        chain_table(tree, "spectr_gbv")
        check_draws(tree, "spectr_gbv", (DRAW_IID,), "multi_draft_block")

    def init_carry(self, tree: DraftTree, vocab_size: int) -> Carry:
        """No level."""
        return init_carry(tree)

    def next_log_law(self, proposal: Proposal, laws: Array, log_z: Array, stop: Array) -> Array:
        """Law of the token after the stop node, [V]; `laws` are those that the iteration verifies against."""
        tree = proposal.tree
        residual = remaining_log_masses(laws[stop], draft_row(proposal, stop), log_z[stop], len(tree.children[0]))
        depth = jnp.asarray(tree.depth, jnp.int32)[stop]
        rejected = depth < jnp.minimum(tree.max_depth, proposal.max_depth)
        return jnp.where(rejected, normalise_log_masses(residual, laws[stop]), laws[stop])

    def next_carry(
        self, carry: Carry, levels: Levels, proposal: Proposal, target: Array, log_z: Array, stop: Array, token: Array
    ) -> Carry:
        """The carry after an iteration that stopped at `stop` and emitted `token`."""
        num_drafts = len(proposal.tree.children[0])
        return advance(carry, levels, proposal, target, stop, token, log_z[stop], num_drafts)

    def verify(self, rng_key: PRNGKeyArray, proposal: Proposal, target_log_laws: Array, carry: Any) -> Verdict:
        """See `Verifier.verify`."""
        tree = proposal.tree
        gap_key, time_key, next_key = jax.random.split(rng_key, 3)
        del rng_key
        if tree.num_nodes == 1:
            return make_verdict(tree, jnp.int32(0), sample_log_law(next_key, target_log_laws[0]), carry)
        zero = jnp.zeros((), target_log_laws.dtype)
        laws, levels = apply_carry(carry, proposal, target_log_laws, len(tree.children[0]))

        kinds = node_selections(tree, "minimum")
        log_leaf_time, child_gaps, node_gaps, _ = draw_noise((gap_key, time_key, time_key), proposal, laws, kinds, {})
        times = propagate_times(
            tree,
            kinds,
            proposal.max_depth,
            proposal.tokens,
            node_log_ratio(proposal, laws),
            log_leaf_time,
            child_gaps,
            node_gaps,
            curves={},
        )
        log_z = log_path_ratio(proposal, laws, zero)
        stop = accept_below_second(proposal, times, log_z)
        next_token = sample_log_law(next_key, self.next_log_law(proposal, laws, log_z, stop))
        carry = self.next_carry(carry, levels, proposal, target_log_laws, log_z, stop, next_token)
        return make_verdict(tree, stop, next_token, carry)


def accept_below_second(proposal: Proposal, times: Times, log_z: Array) -> Array:
    """The stop node: down the chain of the smallest root time T as long as its times stay below the second smallest T.

    Args:
        proposal: K chains of L drafts.
        times: from the recursion; the score of a chain's first node is the chain's T.
        log_z: log Z at every node, [N+1].

    Returns:
        The node, [].
    """
    chains = chain_table(proposal.tree, "spectr_gbv")
    num_drafts, length = chains.shape
    root_times = times.log_score[chains[:, 0]]
    threshold = jnp.sort(root_times)[1] if num_drafts > 1 else jnp.zeros((), log_z.dtype)
    kept = jnp.asarray(chains)[jnp.argmin(root_times)]
    exists = jnp.arange(1, length + 1, dtype=jnp.int32) <= proposal.max_depth
    below = exists & (log_z[kept] + times.log_time[kept] < threshold)
    num_accepted = jnp.sum(jnp.cumprod(below.astype(jnp.int32)))
    return jnp.where(num_accepted > 0, kept[jnp.maximum(num_accepted - 1, 0)], 0)


SPECTR_GBV = register(
    Verifier(
        "spectr_gbv",
        SpectrGbvRule(),
        summary="corrected SpecTr-GBV: greedy, several drafts, with nested carry-over",
        multi_draft=True,
        carries_state=True,
        needs_context_law=True,
    )
)
