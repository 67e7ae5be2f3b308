"""Composable latent times: one bottom-up recursion over a packed tree, exact for every tree, nothing carried over.

Letters: p is the draft's law, q the target's at a node, rho_c = p(c)/q(c). Every node v gets a time u_v in (0, 1) and
an output Y_v, the tokens emitted below it. A leaf has a uniform time and Y ~ q. An inner node selects one of its n
drafted children by any criterion that looks only at their tokens c and times u_c.

Lemma. If Y_c ~ q(.|c) and u_c ~ U(0, 1) are independent for each child, and A_c(r) = P(token c selected with time below
r) / q(c) is known, continuous and increasing, then with the selected child's h = A_c(u_c):
    h < 1:   Y_v = (c, Y_c) and u_v = h;
    else:    c' ~ q(c)(1 - A_c(1)), Y_v = c', u_v uniform on (A_c'(1), 1)           ("overflow")
again Y_v ~ q(.|v) and u_v ~ U(0, 1), independent. So the root's Y follows the target, whatever the tree, with selection
rules that may differ from node to node. Accepted mass of a path: q(path) * (A_1 o A_2 o ... o A_i)(1).

Selections:
    "minimum"      scores rho_c u_c; a score of 1 or more is replaced by one of a gap token c' ~ (q - p)_+, uniform on
                   (rho_c', 1); the smallest wins; A_c(r) = 1 - (1 - min(rho_c r, 1))^n. On K chains this is multi-draft
                   block verification.
    "uncapped"     scores rho_c u_c as they are (`start_curve.py`); never accepts less at any node.
    "latest_start" the same with delays (`delays.py`).
    Deterministic children: draw y ~ q and follow the child that carries it, A_c(r) = r.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from specjax.types import DRAW_DETERMINISTIC, DraftTree
from specjax.verification.rows import log_one_minus_exp
from specjax.verification.start_curve import StartCurve
from specjax.verification.trees import children_table

SELECTIONS = ("minimum", "uncapped", "latest_start")


@flax.struct.dataclass
class Gaps:
    """The tokens and uniforms that an overflow uses.

    Attributes:
        token: gap token, [M].
        log_ratio: log rho of the gap token (where the selection is "minimum"), negative, [M].
        uniform: uniform in (0, 1), [M].
    """

    token: Int[Array, " draws"]
    log_ratio: Float[Array, " draws"]
    uniform: Float[Array, " draws"]


@flax.struct.dataclass
class Times:
    """The result of the recursion.

    Attributes:
        log_time: log u of each node, [N+1].
        log_score: log score of each node as a child, gap-filled if its parent selects the "minimum", [N+1].
        winner: the selected child of each inner node, [N+1].
        overflows: whether an inner node emits a gap token, [N+1].
        gap_token: that token, [N+1].
    """

    log_time: Float[Array, " nodes"]
    log_score: Float[Array, " nodes"]
    winner: Int[Array, " nodes"]
    overflows: Bool[Array, " nodes"]
    gap_token: Int[Array, " nodes"]


def child_log_score(log_ratio: Array, log_time: Array) -> Array:
    """Log of the raw score rho_c u_c; 0 or more overflows under the "minimum"."""
    return log_ratio + log_time


def fill_gap(log_ratio: Array, uniform: Array) -> Array:
    """Log of a score uniform on (rho, 1), for a gap token with log rho = `log_ratio` < 0."""
    ratio = jnp.exp(log_ratio)
    return jnp.log(ratio + uniform * (1 - ratio))


def minimum_log_time(log_score: Array, num_children: Array) -> Array:
    """log u_v = log(1 - (1 - s)^n) from the smallest of n gap-filled scores."""
    several = log_one_minus_exp(num_children * log_one_minus_exp(log_score))
    return jnp.where(num_children == 1, log_score, several)


def gap_time(accepted_share: Array, uniform: Array) -> Array:
    """A time uniform on (A_c'(1), 1)."""
    return accepted_share + uniform * (1 - accepted_share)


def node_selections(tree: DraftTree, selection: str) -> tuple[str, ...]:
    """The selection at each node: "leaf", "membership", "minimum" or, at branching nodes, the one asked for."""
    kinds = []
    for node, children in enumerate(tree.children):
        if not children:
            kinds.append("leaf")
        elif tree.draws[node] == DRAW_DETERMINISTIC:
            kinds.append("membership")
        else:
            # With one child all selections have A_c(r) = min(rho_c r, 1).
            kinds.append("minimum" if len(children) == 1 else selection)
    return tuple(kinds)


def propagate_times(
    tree: DraftTree,
    kinds: tuple[str, ...],
    max_depth: Int[Array, ""],
    tokens: Int[Array, " nodes"],
    log_ratio: Float[Array, " nodes"],
    log_leaf_time: Float[Array, " nodes"],
    child_gaps: Gaps,
    node_gaps: Gaps,
    curves: dict[int, StartCurve],
) -> Times:
    """Runs the recursion from the leaves to the root.

    Args:
        tree: static shape.
        kinds: from `node_selections`.
        max_depth: nodes at this depth are leaves, [].
        tokens: the nodes' tokens, [N+1].
        log_ratio: log rho of each node's token at its parent, [N+1]; the root's is not read.
        log_leaf_time: log of a uniform for each node, [N+1].
        child_gaps: for each node as a child of a "minimum" node, M = N+1.
        node_gaps: for each node that selects otherwise, M = N+1.
        curves: for each node with an uncapped or delayed selection.

    Returns:
        Times, winners and overflows. Entries of leaves other than `log_time` are meaningless.
    """
    children = children_table(tree)
    is_child = jnp.asarray(children >= 0)
    is_membership = jnp.asarray([kind == "membership" for kind in kinds])
    num_children = jnp.asarray([max(len(c), 1) for c in tree.children], log_ratio.dtype)
    is_inner = jnp.asarray([kind != "leaf" for kind in kinds]) & (np.asarray(tree.depth, np.int32) < max_depth)
    rows = np.arange(tree.num_nodes)

    def update(log_time: Array) -> Times:
        """Times of all nodes from those of their children."""
        raw_score = child_log_score(log_ratio, log_time)
        child_overflows = raw_score >= 0
        log_score = jnp.where(child_overflows, fill_gap(child_gaps.log_ratio, child_gaps.uniform), raw_score)
        place = jnp.argmin(jnp.where(is_child, log_score[children], jnp.inf), axis=1)

        matches = is_child & (tokens[children] == node_gaps.token[:, None])
        place = jnp.where(is_membership, jnp.argmax(matches, axis=1), place)
        winner = jnp.asarray(children)[rows, place]
        overflows = jnp.where(is_membership, ~jnp.any(matches, axis=1), child_overflows[winner])
        gap_token = jnp.where(is_membership, node_gaps.token, child_gaps.token[winner])
        membership_time = jnp.where(overflows, jnp.log(node_gaps.uniform), log_time[winner])
        new_log_time = jnp.where(is_membership, membership_time, minimum_log_time(log_score[winner], num_children))
        for node, curve in curves.items():
            of_node = np.asarray(tree.children[node], np.int32)
            scores = curve.scores(tokens[of_node], log_time[of_node])
            best = jnp.argmin(scores)
            time = curve.node_time(tokens[of_node][best], scores[best])
            node_overflows = time >= 1
            share = curve.share[node_gaps.token[node]]
            time = jnp.where(node_overflows, gap_time(share, node_gaps.uniform[node]), time)
            winner = winner.at[node].set(jnp.asarray(of_node)[best])
            overflows = overflows.at[node].set(node_overflows)
            gap_token = gap_token.at[node].set(node_gaps.token[node])
            new_log_time = new_log_time.at[node].set(jnp.log(time))
        return Times(jnp.where(is_inner, new_log_time, log_leaf_time), log_score, winner, overflows, gap_token)

    # Nodes i levels above the deepest leaves are final after i rounds.
    log_time = jax.lax.fori_loop(0, tree.max_depth, lambda _, times: update(times).log_time, log_leaf_time)
    return update(log_time)


def follow_winners(tree: DraftTree, max_depth: Array, times: Times) -> tuple[Array, Array]:
    """Walks from the root along the winners to the first overflow or leaf.

    Returns:
        The stop node, and whether it overflowed, so that its gap token is emitted; after a leaf the target's law is.
    """
    can_go_on = jnp.asarray([bool(c) for c in tree.children]) & (np.asarray(tree.depth, np.int32) < max_depth)

    def step(_: Array, node: Array) -> Array:
        return jnp.where(can_go_on[node] & ~times.overflows[node], times.winner[node], node).astype(jnp.int32)

    stop = jax.lax.fori_loop(0, tree.max_depth, step, jnp.int32(0))
    return stop, can_go_on[stop]
