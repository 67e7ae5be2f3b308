"""Pytrees that cross rooms: draft trees, proposals and verdicts.

A *law* is a float32 log-probability vector over the target's full vocabulary, after temperature and
truncation: the distribution that tokens are really drawn from. Laws, never logits, meet at a verifier.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import flax.struct
import numpy as np
from jaxtyping import Array, Float, Int

NO_NODE = -1

DRAW_IID = "iid"
DRAW_WITHOUT_REPLACEMENT = "without_replacement"
DRAW_DETERMINISTIC = "deterministic"
DRAWS = (DRAW_IID, DRAW_WITHOUT_REPLACEMENT, DRAW_DETERMINISTIC)


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Static shape of one packed proposal: node 0 is the last committed token, the others are drafts.

    Attributes:
        parent: for each node its parent's index; `parent[0]` is -1 and `parent[i] < i` elsewhere.
        draws: for each node how its children are drawn: "iid", "without_replacement" or
            "deterministic". Leaves carry "iid".

    Raises:
        ValueError: if the parents are not topologically ordered or a draw kind is unknown.
    """

    parent: tuple[int, ...]
    draws: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.parent or self.parent[0] != NO_NODE:
            raise ValueError(f"`parent` must start with -1 for the root; got {self.parent!r}")
        for node, parent in enumerate(self.parent[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"`parent[{node}]` must be in [0, {node}); got {parent}")
        if not self.draws:
            object.__setattr__(self, "draws", (DRAW_IID,) * len(self.parent))
        if len(self.draws) != len(self.parent):
            raise ValueError(f"`draws` must have one entry a node ({len(self.parent)}); got {len(self.draws)}")
        for draw in self.draws:
            if draw not in DRAWS:
                raise ValueError(f"`draws` must be among {DRAWS}; got {draw!r}")

    @classmethod
    def chains(cls, num_drafts: int, draft_length: int, draw: str = DRAW_IID) -> DraftTree:
        """K chains of L tokens: the tree (K, 1, ..., 1).

        Nodes are ordered by depth, then by chain: the node of chain k at depth i >= 1 has index
        `1 + (i - 1) * num_drafts + k`. Length 0 is the tree with only a root (plain decoding).
        """
        if num_drafts < 1:
            raise ValueError(f"`num_drafts` must be at least 1; got {num_drafts}")
        if draft_length < 0:
            raise ValueError(f"`draft_length` must be at least 0; got {draft_length}")
        parent = [NO_NODE]
        for depth in range(1, draft_length + 1):
            for chain in range(num_drafts):
                parent.append(0 if depth == 1 else 1 + (depth - 2) * num_drafts + chain)
        return cls(tuple(parent), (draw,) * len(parent))

    @property
    def num_nodes(self) -> int:
        """Number of nodes, root included: the number of queries in one target forward."""
        return len(self.parent)

    @functools.cached_property
    def depth(self) -> tuple[int, ...]:
        """Depth of each node; the root has depth 0."""
        depth = [0]
        for parent in self.parent[1:]:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @property
    def max_depth(self) -> int:
        """Longest draft, in tokens."""
        return max(self.depth)

    @functools.cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For each node the indices of its children, in order."""
        children: list[list[int]] = [[] for _ in self.parent]
        for node, parent in enumerate(self.parent[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(c) for c in children)

    @functools.cached_property
    def internal(self) -> tuple[int, ...]:
        """Nodes that have children, in order: the nodes that need a draft law."""
        return tuple(node for node, children in enumerate(self.children) if children)

    @functools.cached_property
    def ancestor_mask(self) -> np.ndarray:
        """Bool [num_nodes, num_nodes]: entry (t, j) is true iff j is t or an ancestor of t."""
        mask = np.eye(self.num_nodes, dtype=bool)
        for node, parent in enumerate(self.parent[1:], start=1):
            mask[node] |= mask[parent]
        return mask


@flax.struct.dataclass
class Proposal:
    """What a drafter hands to a verifier, for one request (batch it with `vmap`).

    Attributes:
        tree: static shape of the packed tree with N+1 nodes.
        tokens: token of each node, [N+1]; `tokens[0]` is the last committed token.
        draft_log_laws: law that the children of each internal node were drawn from, in the order of
            `tree.internal`, [num_internal, V]. Deterministic drafts carry one-hot laws (0 and -inf).
        max_depth: nodes deeper than this do not exist for this request, []. 0 means plain decoding.
    """

    tokens: Int[Array, "*batch nodes"]
    draft_log_laws: Float[Array, "*batch internal vocab"]
    max_depth: Int[Array, "*batch"]
    tree: DraftTree = flax.struct.field(pytree_node=False)


@flax.struct.dataclass
class Verdict:
    """What a verifier decided, for one request.

    Attributes:
        path: accepted nodes from the root on, [max_depth + 1]; `path[0]` is 0, unused places are -1.
        num_accepted: number of accepted draft tokens, [].
        next_token: recovered token after a rejection, bonus token after full acceptance, [].
        carry: the verifier's state for this request's next iteration (an empty tuple if it has none).
    """

    path: Int[Array, "*batch depth"]
    num_accepted: Int[Array, "*batch"]
    next_token: Int[Array, "*batch"]
    carry: Any = ()
