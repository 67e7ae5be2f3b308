"""Carry-over state of the greedy rules: how a stopped iteration changes the target of the next ones.

Letters: p is the draft's law, q the target's, K the number of drafts. A greedy rule stops at prefix v with the mass
that the accepted prefixes leave over. What the target still has to give at the remaining positions of that block is the
Markov law

    M(x|u) ~ q(x|u) (1 - min(1, Z_u p(x|u)/q(x|u)))^K,        Z_u = prod p/q along u, from the block's root on,

so the next iterations verify against M instead of q until the block's positions are used up. An iteration that already
ran against such a law and stops early puts another level on top: its q is the law below. Levels nest; the oldest stands
first. The construction needs p(.|u) of the *old* block at the new prefixes: the draft's law must be a function of the
tokens before the position alone (`Verifier.needs_context_law`).

K = 1 is the target modification of greedy block verification (Sun et al., ICLR 2025, Algorithm 6).
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from specjax.types import DraftTree, Proposal
from specjax.verification.rows import drafted_log_ratio, log_one_minus_exp, normalise_log_masses
from specjax.verification.trees import draft_row_table, node_log_probs, path_table


@flax.struct.dataclass
class Carry:
    """Live levels, oldest first; places without a level have `remaining` 0.

    A block of L tokens leaves at most L-1 positions and every iteration uses up one or more, so L-1 places suffice.

    Attributes:
        remaining: positions for which the level still changes the target, [L-1].
        log_z: log Z of the level at the current root, [L-1].
    """

    remaining: Int[Array, "*batch levels"]
    log_z: Float[Array, "*batch levels"]


@flax.struct.dataclass
class Levels:
    """What the levels did to one proposal; kept until the next token is known.

    Attributes:
        log_z: log Z of each level at each node, [L-1, N+1].
        log_total: logarithm of each level's normaliser at each node, 0 where the level does not act, [L-1, N+1].
        acts: whether the level changes the law at the node, [L-1, N+1].
    """

    log_z: Float[Array, "levels nodes"]
    log_total: Float[Array, "levels nodes"]
    acts: Array


def init_carry(tree: DraftTree) -> Carry:
    """No level."""
    levels = max(tree.max_depth - 1, 0)
    return Carry(remaining=jnp.zeros((levels,), jnp.int32), log_z=jnp.zeros((levels,), jnp.result_type(float)))


def log_path_ratio(proposal: Proposal, target_log_laws: Array, start: Array) -> Float[Array, " nodes"]:
    """log Z at every node, from `start` at the root: the sum of log p - log q along the path, [N+1]."""
    tree = proposal.tree
    target, draft = node_log_probs(proposal, target_log_laws)
    # Column 0 is the root's start; columns i >= 1 are the nodes' own terms.
    terms = jnp.concatenate([jnp.reshape(start, (1,)), -drafted_log_ratio(target, draft)])
    paths = path_table(tree)
    return jnp.sum(jnp.where(paths >= 0, terms[paths], 0), axis=1)


def remaining_log_masses(
    target_log_law: Float[Array, "*rows vocab"],
    draft_log_law: Float[Array, "*rows vocab"],
    log_z: Float[Array, "*rows"],
    num_drafts: int,
) -> Float[Array, "*rows vocab"]:
    """log q(x) (1 - min(1, Z p(x)/q(x)))^K: what is left of the target after the accepted mass, not normalised."""
    possible = target_log_law > -jnp.inf
    log_share = log_z[..., None] + draft_log_law - jnp.where(possible, target_log_law, 0)
    # Z is infinite only at prefixes that the target excludes, which are never accepted; 0 times infinity counts as 0.
    log_share = jnp.where(draft_log_law > -jnp.inf, log_share, -jnp.inf)
    return jnp.where(possible, target_log_law + num_drafts * log_one_minus_exp(log_share), -jnp.inf)


def apply_carry(
    carry: Carry, proposal: Proposal, target_log_laws: Float[Array, "nodes vocab"], num_drafts: int
) -> tuple[Float[Array, "nodes vocab"], Levels]:
    """The target's laws as this iteration must see them.

    Args:
        carry: from `init_carry` or `advance`.
        proposal: the drafts. Laws of internal nodes at `max_depth` are read too if a level reaches that deep.
        target_log_laws: the plain laws, [N+1, V].
        num_drafts: K.

    Returns:
        The laws to verify against, and what `advance` needs.
    """
    tree = proposal.tree
    num_levels = carry.remaining.shape[0]
    internal = np.asarray(tree.internal, np.int32)
    depth = np.asarray(tree.depth, np.int32)
    dtype = target_log_laws.dtype
    shape = (num_levels, tree.num_nodes)
    levels = Levels(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(shape, bool))
    if num_levels == 0:
        return target_log_laws, levels

    def apply(index: Array, state: tuple[Array, Levels]) -> tuple[Array, Levels]:
        laws, levels = state
        log_z = log_path_ratio(proposal, laws, carry.log_z[index].astype(dtype))
        masses = remaining_log_masses(laws[internal], proposal.draft_log_laws, log_z[internal], num_drafts)
        total = jax.nn.logsumexp(masses, axis=-1)
        acts = jnp.zeros((tree.num_nodes,), bool).at[internal].set(total > -jnp.inf)
        acts &= depth < carry.remaining[index]
        changed = normalise_log_masses(masses, laws[internal])
        laws = laws.at[internal].set(jnp.where(acts[internal, None], changed, laws[internal]))
        log_total = jnp.zeros((tree.num_nodes,), dtype).at[internal].set(total)
        return laws, Levels(
            log_z=levels.log_z.at[index].set(log_z),
            log_total=levels.log_total.at[index].set(jnp.where(acts, log_total, 0)),
            acts=levels.acts.at[index].set(acts),
        )

    # Live levels stand first, so the passes over the vocabulary are as many as there are live levels.
    num_live = jnp.sum(carry.remaining > 0)
    return jax.lax.fori_loop(0, num_live, apply, (target_log_laws, levels))


def advance(
    carry: Carry,
    levels: Levels,
    proposal: Proposal,
    target_log_laws: Float[Array, "nodes vocab"],
    stop_node: Int[Array, ""],
    next_token: Int[Array, ""],
    stop_log_z: Float[Array, ""],
    num_drafts: int,
) -> Carry:
    """The carry after an iteration.

    Args:
        carry: the carry that the iteration ran with.
        levels: from `apply_carry`.
        proposal: the drafts.
        target_log_laws: the plain laws, [N+1, V].
        stop_node: last accepted node.
        next_token: the token emitted after it.
        stop_log_z: log Z of this iteration's own block at the stop node, against the laws it verified against.
        num_drafts: K.

    Returns:
        Every level moved on by the emitted tokens, those without positions dropped, and one level for this block if it
        stopped early.
    """
    tree = proposal.tree
    num_levels = carry.remaining.shape[0]
    if num_levels == 0:
        return carry
    draft_log_prob = proposal.draft_log_laws[jnp.asarray(draft_row_table(tree))[stop_node], next_token]

    def climb(log_prob: Array, level: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        """From the law below a level to the law above it, at the stop node and the next token."""
        log_z, log_total, acts = level
        moved = log_z + draft_log_prob - log_prob
        above = log_prob + num_drafts * log_one_minus_exp(moved) - log_total
        return jnp.where(acts, above, log_prob), moved

    at_stop = (levels.log_z[:, stop_node], levels.log_total[:, stop_node], levels.acts[:, stop_node])
    top_log_prob, moved = jax.lax.scan(climb, target_log_laws[stop_node, next_token], at_stop)

    emitted = jnp.asarray(tree.depth, jnp.int32)[stop_node] + 1
    block_length = jnp.minimum(proposal.max_depth, tree.max_depth).astype(jnp.int32)
    remaining = jnp.append(carry.remaining - emitted, block_length - emitted)
    log_z = jnp.append(moved, stop_log_z + draft_log_prob - top_log_prob)
    # Z = 0 leaves the target as it is: the old block could not have drafted this token.
    live = (remaining > 0) & (log_z > -jnp.inf)
    order = jnp.argsort(~live, stable=True)[:num_levels]
    return Carry(
        remaining=jnp.where(live, remaining, 0)[order], log_z=jnp.where(live, log_z, 0).astype(carry.log_z.dtype)[order]
    )
