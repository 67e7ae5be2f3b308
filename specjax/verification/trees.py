"""Static tables of a draft tree, and the drafted tokens' log-probabilities gathered from the laws."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from specjax.types import NO_NODE, DraftTree, Proposal


def path_table(tree: DraftTree) -> np.ndarray:
    """For each node the path from the root to it, padded with -1, int32 [N+1, max_depth+1]."""
    table = np.full((tree.num_nodes, tree.max_depth + 1), NO_NODE, np.int32)
    for node, depth in enumerate(tree.depth):
        step = node
        for position in range(depth, -1, -1):
            table[node, position] = step
            step = tree.parent[step]
    return table


def children_table(tree: DraftTree) -> np.ndarray:
    """For each node its children in order, padded with -1, int32 [N+1, largest number of children]."""
    width = max(len(children) for children in tree.children)
    table = np.full((tree.num_nodes, width), NO_NODE, np.int32)
    for node, children in enumerate(tree.children):
        table[node, : len(children)] = children
    return table


def depth_table(tree: DraftTree) -> np.ndarray:
    """For each depth from 1 on its nodes, siblings together, padded with -1, int32 [max_depth, largest width]."""
    levels = [
        sorted((n for n in range(tree.num_nodes) if tree.depth[n] == depth), key=lambda n: (tree.parent[n], n))
        for depth in range(1, tree.max_depth + 1)
    ]
    table = np.full((tree.max_depth, max(map(len, levels), default=0)), NO_NODE, np.int32)
    for level, nodes in enumerate(levels):
        table[level, : len(nodes)] = nodes
    return table


def draft_row_table(tree: DraftTree) -> np.ndarray:
    """For each node its row in `Proposal.draft_log_laws`, 0 for leaves (which have none), int32 [N+1]."""
    table = np.zeros((tree.num_nodes,), np.int32)
    table[list(tree.internal)] = np.arange(len(tree.internal))
    return table


def chain_table(tree: DraftTree, name: str) -> np.ndarray:
    """The nodes of K disjoint chains of equal length, int32 [K, L].

    Raises:
        ValueError: for other trees; the message names the rule.
    """
    roots = tree.children[0]
    chains = []
    for root in roots:
        chain = [root]
        while tree.children[chain[-1]]:
            chain.append(tree.children[chain[-1]][0])
        chains.append(chain)
    if sum(map(len, chains)) != tree.num_nodes - 1 or len(set(map(len, chains))) > 1:
        raise ValueError(
            f"`verifier` {name!r} uses disjoint chains of one length; got a tree with parents {tree.parent}. "
            "Use 'multi_draft_block' for other trees"
        )
    return np.asarray(chains, np.int32).reshape(len(roots), tree.max_depth)


def check_single_chain(tree: DraftTree, name: str) -> None:
    """Refuses everything but one chain.

    Raises:
        ValueError: naming the rule and one that uses several drafts.
    """
    if any(len(children) > 1 for children in tree.children):
        raise ValueError(
            f"`verifier` {name!r} uses one chain of drafts; got a tree with parents {tree.parent}. "
            "Draft once (`num_drafts` = 1), or use a rule for several drafts such as 'multi_draft_block'"
        )


def check_draws(tree: DraftTree, name: str, allowed: tuple[str, ...], alternative: str) -> None:
    """Refuses nodes with several children that were drawn in a way the rule does not know.

    Raises:
        ValueError: naming the rule, the draw and an alternative.
    """
    for node, children in enumerate(tree.children):
        if len(children) > 1 and tree.draws[node] not in allowed:
            raise ValueError(
                f"`verifier` {name!r} needs siblings drawn by one of {allowed}; got {tree.draws[node]!r} at node "
                f"{node}. Use {alternative!r}"
            )


def node_log_probs(
    proposal: Proposal, target_log_laws: Float[Array, "nodes vocab"]
) -> tuple[Float[Array, " drafted"], Float[Array, " drafted"]]:
    """Target's and draft's log-probability of each drafted token given its parent, both [N]; entry i is node i+1."""
    tree = proposal.tree
    parents = np.asarray(tree.parent[1:], np.int32)
    tokens = proposal.tokens[1:]
    target = target_log_laws[parents, tokens]
    draft = proposal.draft_log_laws[draft_row_table(tree)[parents], tokens]
    return target, draft


def draft_row(proposal: Proposal, node: Array) -> Float[Array, " vocab"]:
    """The law that the children of `node` were drawn from, [V]; the tree must have drafts. Meaningless at leaves."""
    return proposal.draft_log_laws[jnp.asarray(draft_row_table(proposal.tree))[node]]
