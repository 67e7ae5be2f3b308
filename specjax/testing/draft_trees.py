"""Draft trees for tests and analysis."""

from __future__ import annotations

from collections.abc import Sequence

from specjax.types import DRAW_IID, NO_NODE, DraftTree


def tree_of_widths(widths: Sequence[int], draws: Sequence[str] | None = None) -> DraftTree:
    """The tree in which every node of depth d has `widths[d]` children.

    Args:
        widths: number of children at each depth.
        draws: how the children at each depth are drawn; None means i.i.d. everywhere.

    Returns:
        The tree, nodes ordered by depth.
    """
    parent = [NO_NODE]
    kinds = []
    level = [0]
    for depth, width in enumerate(widths):
        kinds += [draws[depth] if draws is not None else DRAW_IID] * len(level)
        next_level = []
        for node in level:
            for _ in range(width):
                parent.append(node)
                next_level.append(len(parent) - 1)
        level = next_level
    kinds += [DRAW_IID] * len(level)
    return DraftTree(tuple(parent), tuple(kinds))
