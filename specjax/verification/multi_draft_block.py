"""Multi-draft block verification of packed trees by latent times; the default for several drafts.

The recursion, the lemma behind it and the selections are in `latent_times.py`. K i.i.d. chains are the tree
(K, 1, .., 1); trees of i.i.d. children and of deterministic top-k children are the same code with other parents. With
the "minimum" selection a prefix v of K chains is accepted with probability q_v (1 - (1 - min_j Z_j)^K), min(Z_0, ..)
over the prefixes of v, Z_j = prod p/q, Z_0 = 1. One pass over both laws at the inner nodes, one row at the stop; no
residual row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from specjax.types import DRAW_DETERMINISTIC, DRAW_IID, DraftTree, Proposal, Verdict
from specjax.verification.base import Verifier, make_verdict, register
from specjax.verification.delays import INNER_SHARE, latest_start_delays
from specjax.verification.gap_draws import draw_gap_tokens
from specjax.verification.latent_times import Gaps, follow_winners, node_selections, propagate_times
from specjax.verification.rows import drafted_log_ratio, sample_log_law, sample_masses
from specjax.verification.start_curve import StartCurve, start_curve
from specjax.verification.trees import check_draws, draft_row_table, node_log_probs


@dataclasses.dataclass(frozen=True)
class MultiDraftBlockRule:
    """Latent times with one selection.

    Attributes:
        selection: "minimum", "uncapped" or "latest_start".
    """

    selection: str = "minimum"

    def check_tree(self, tree: DraftTree) -> None:
        """Accepts i.i.d. and deterministic siblings."""
        check_draws(tree, "multi_draft_block", (DRAW_IID, DRAW_DETERMINISTIC), "recursive_rejection")

    def init_carry(self, tree: DraftTree, vocab_size: int) -> Any:
        """No carry."""
        return ()

    def node_curve(self, num_children: int, is_last: Array, log_draft: Array, log_target: Array) -> StartCurve:
        """The curve of a branching node with an uncapped or delayed selection.

        Args:
            num_children: number of drafted children.
            is_last: whether all children are leaves, [].
            log_draft: the law that the children were drawn from, [V].
            log_target: the target's law, [V].

        Returns:
            The curve.
        """
        if self.selection != "latest_start":
            return start_curve(log_draft, log_target, num_children)
        share = jnp.where(is_last, 1, INNER_SHARE).astype(log_target.dtype)
        delay, group = latest_start_delays(log_draft, log_target, num_children, share)
        return start_curve(log_draft, log_target, num_children, delay, group)

    def verify(self, rng_key: PRNGKeyArray, proposal: Proposal, target_log_laws: Array, carry: Any) -> Verdict:
        """See `Verifier.verify`."""
        tree = proposal.tree
        gap_key, time_key, curve_key, bonus_key = jax.random.split(rng_key, 4)
        del rng_key
        if tree.num_nodes == 1:
            return make_verdict(tree, jnp.int32(0), sample_log_law(bonus_key, target_log_laws[0]), carry)
        kinds = node_selections(tree, self.selection)
        curves = {
            node: self.node_curve(
                len(tree.children[node]),
                is_last_level(tree, node, proposal.max_depth),
                proposal.draft_log_laws[draft_row_table(tree)[node]],
                target_log_laws[node],
            )
            for node, kind in enumerate(kinds)
            if kind in ("uncapped", "latest_start")
        }
        log_leaf_time, child_gaps, node_gaps, has_gap = draw_noise(
            (gap_key, time_key, curve_key), proposal, target_log_laws, kinds, curves
        )
        log_ratio = node_log_ratio(proposal, target_log_laws)
        times = propagate_times(
            tree, kinds, proposal.max_depth, proposal.tokens, log_ratio, log_leaf_time, child_gaps, node_gaps, curves
        )
        stop, overflowed = follow_winners(tree, proposal.max_depth, times)
        bonus = sample_log_law(bonus_key, target_log_laws[stop])
        # A residual without mass is an overflow of probability zero up to rounding: the target's law then decides.
        next_token = jnp.where(overflowed & has_gap[stop], times.gap_token[stop], bonus)
        return make_verdict(tree, stop, next_token, carry)


def is_last_level(tree: DraftTree, node: int, max_depth: Array | np.integer) -> Array:
    """Whether nothing is drafted below the children of a node, bool []."""
    branches_on = any(tree.children[child] for child in tree.children[node])
    return jnp.asarray((not branches_on) | (tree.depth[node] + 1 >= max_depth))


def node_log_ratio(proposal: Proposal, target_log_laws: Array) -> Array:
    """log rho of each node's token at its parent, 0 for the root, [N+1]; +inf where the target excludes the token."""
    log_ratio = -drafted_log_ratio(*node_log_probs(proposal, target_log_laws))
    return jnp.concatenate([jnp.zeros((1,), log_ratio.dtype), log_ratio])


def draw_noise(
    rng_keys: tuple[PRNGKeyArray, PRNGKeyArray, PRNGKeyArray],
    proposal: Proposal,
    target_log_laws: Array,
    kinds: tuple[str, ...],
    curves: dict[int, StartCurve],
) -> tuple[Array, Gaps, Gaps, Array]:
    """All randomness of the recursion except the bonus token.

    Args:
        rng_keys: keys for gap tokens, for times, and for gap tokens of nodes with curves; consumed.
        proposal: the drafts.
        target_log_laws: [N+1, V].
        kinds: from `node_selections`.
        curves: for the nodes with an uncapped or delayed selection.

    Returns:
        Log leaf times [N+1]; gaps of nodes as children; gaps of nodes that do not select the "minimum"; and for each
        node whether its residual has mass [N+1].
    """
    gap_key, time_key, curve_key = rng_keys
    tree = proposal.tree
    dtype = target_log_laws.dtype
    parents = np.asarray(tree.parent)
    row_table = draft_row_table(tree)
    internal = np.asarray(tree.internal)
    membership = np.asarray([node for node, kind in enumerate(kinds) if kind == "membership"], np.int32)
    uses_draft = np.asarray([kinds[node] != "membership" for node in internal])
    # One draw for each node as a child (the root's is not used), then one for each membership node.
    row_of_draw = np.concatenate([row_table[np.maximum(parents, 0)], row_table[membership]]).astype(np.int32)
    drawn, row_has_mass = draw_gap_tokens(
        gap_key,
        target_log_laws,
        proposal.draft_log_laws,
        target_row=internal,
        uses_draft=uses_draft,
        row_of_draw=row_of_draw,
    )

    child_token = drawn[: tree.num_nodes]
    child_rows = row_of_draw[: tree.num_nodes]
    child_log_ratio = (
        proposal.draft_log_laws[child_rows, child_token] - target_log_laws[internal[child_rows], child_token]
    )
    node_token = jnp.zeros((tree.num_nodes,), jnp.int32).at[membership].set(drawn[tree.num_nodes :])
    has_gap = row_has_mass[row_table]
    for node, curve in curves.items():
        masses = jnp.exp(target_log_laws[node]) * (1 - curve.share)
        node_token = node_token.at[node].set(sample_masses(jax.random.fold_in(curve_key, node), masses))
        has_gap = has_gap.at[node].set(jnp.any(masses > 0))

    uniforms = jax.random.uniform(time_key, (3, tree.num_nodes), dtype, minval=jnp.finfo(dtype).tiny)
    child_gaps = Gaps(child_token, jnp.minimum(child_log_ratio, 0), uniforms[1])
    node_gaps = Gaps(node_token, jnp.zeros_like(uniforms[2]), uniforms[2])
    return jnp.log(uniforms[0]), child_gaps, node_gaps, has_gap


MULTI_DRAFT_BLOCK = register(
    Verifier(
        "multi_draft_block",
        MultiDraftBlockRule(),
        summary="multi-draft block verification by latent times; the default for several drafts",
        multi_draft=True,
        supports_trees=True,
    )
)
MULTI_DRAFT_BLOCK_UNCAPPED = register(
    Verifier(
        "multi_draft_block_uncapped",
        MultiDraftBlockRule("uncapped"),
        summary="the same with uncapped scores: never accepts less at any node, sorts one row a branching node",
        multi_draft=True,
        supports_trees=True,
    )
)
MULTI_DRAFT_BLOCK_LATE = register(
    Verifier(
        "multi_draft_block_late",
        MultiDraftBlockRule("latest_start"),
        summary="the same with latest-start delays (experimental): closes about half of the gap to the optimum",
        multi_draft=True,
        supports_trees=True,
        experimental=True,
    )
)
