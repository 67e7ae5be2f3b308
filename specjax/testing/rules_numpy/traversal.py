"""Traversal verification, by its recursion over nodes. p is the draft's law, q the target's."""

from __future__ import annotations

import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.testing.rules_numpy.outcomes import Outcomes, add


def traversal(instance: Instance, drafts: tuple[Prefix, ...]) -> Outcomes:
    """Chains below the root are tried one after the other, each from its leaf upwards."""
    outcomes: Outcomes = {}

    def visit(prefix: Prefix, chains: list[Prefix], weight: float, law: np.ndarray, reached: float) -> float:
        """Tries the subtree of a node; returns the probability that nothing of it is accepted."""
        p = instance.draft(prefix) if chains and chains[0] else None
        for chain in chains:
            if not chain or p is None:
                continue
            child_weight = min(1.0, weight * law[chain[0]] / p[chain[0]])
            child = (*prefix, chain[0])
            reached = visit(child, [chain[1:]], child_weight, instance.target(child), reached)
            residual = np.maximum(weight * law - p, 0)
            mass = residual.sum()
            law = residual / mass if mass > 0 else law
            weight = mass / (mass + 1 - weight) if mass + 1 - weight > 0 else 1.0
        for y, share in enumerate(law):
            add(outcomes, prefix, y, reached * weight * share)
        return reached * (1 - weight)

    visit((), list(drafts), 1.0, instance.target(()), 1.0)
    return outcomes
