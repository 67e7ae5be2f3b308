"""A draft tree cut into its depths, as tables of one shape, so that one compiled round drafts any depth."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from specjax.types import DraftTree


class TreeLevels:
    """Which nodes a drafter feeds at each depth below the root, and which nodes it draws after them.

    Level i holds the nodes of depth i + 1 that have children. Every level is padded to the width W of the widest: a
    padded place feeds the root's token, is seen by nobody else and draws nothing. The place of level i's entry w is
    `i * W + w`, in the cache as in the list of laws (where the root's law stands before all of them).

    Attributes:
        num_levels: number of levels; 0 when no draft has children.
        width: W.
        num_slots: places in all levels.
    """

    def __init__(self, tree: DraftTree) -> None:
        self._tree = tree
        self._levels = [
            [node for node in tree.internal if tree.depth[node] == depth] for depth in range(1, tree.max_depth)
        ]
        self.num_levels = len(self._levels)
        self.width = max(map(len, self._levels), default=0)
        self.num_slots = self.num_levels * self.width

    @property
    def root_children(self) -> Int[Array, "children"]:
        """Children of the root."""
        return jnp.asarray(self._tree.children[0], jnp.int32)

    @functools.cached_property
    def law_places(self) -> tuple[int, ...]:
        """Where the law of each internal node stands, in the order of `tree.internal`; the root's stands first."""
        places = {0: 0}
        for index, level in enumerate(self._levels):
            places |= {node: 1 + index * self.width + place for place, node in enumerate(level)}
        return tuple(places[node] for node in self._tree.internal)

    @property
    def is_regular(self) -> bool:
        """Whether the laws stand in the order of `tree.internal` as they are; so they do for K chains."""
        return self.law_places == tuple(range(1 + self.num_slots))

    def tables(self) -> dict[str, Array]:
        """Arrays with one row a level, to scan over.

        Returns:
            `index` [levels]; `nodes` [levels, W] to feed; `sees` bool [levels, W, places]: a node's ancestors and
            itself; `children` [levels, C] to draw (the number of nodes where padded) and `places` [levels, C] of their
            parents in the level.
        """
        tree, shape = self._tree, (self.num_levels, self.width)
        drawn = [
            [(child, p) for p, node in enumerate(level) for child in tree.children[node]] for level in self._levels
        ]
        num_drawn = max(map(len, drawn), default=0)
        nodes = np.zeros(shape, np.int32)
        sees = np.zeros((*shape, self.num_slots), bool)
        children = np.full((self.num_levels, num_drawn), tree.num_nodes, np.int32)
        places = np.zeros((self.num_levels, num_drawn), np.int32)
        slots = [
            (node, index * self.width + p) for index, level in enumerate(self._levels) for p, node in enumerate(level)
        ]
        for index, level in enumerate(self._levels):
            nodes[index, : len(level)] = level
            for place, node in enumerate(level):
                sees[index, place, [slot for other, slot in slots if tree.ancestor_mask[node, other]]] = True
            for column, (child, place) in enumerate(drawn[index]):
                children[index, column], places[index, column] = child, place
        index = np.arange(self.num_levels, dtype=np.int32)
        tables = {"index": index, "nodes": nodes, "sees": sees, "children": children, "places": places}
        return {name: jnp.asarray(table) for name, table in tables.items()}
