"""Closed forms of the latent-time rules on K chains: first-iteration laws. p is the draft's law, q the target's."""

from __future__ import annotations

import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.testing.rules_numpy.outcomes import Outcomes, add


def multi_draft_block(instance: Instance, draft_length: int, num_drafts: int) -> Outcomes:
    """A(v) = q_v (1 - (1 - m)^K) with m the smallest Z on the way; the rest of A(v) q(x|v) is emitted at v."""
    outcomes: Outcomes = {}

    def walk(prefix: Prefix, joint: float, z: float, smallest: float) -> None:
        q = instance.target(prefix)
        mass = joint * (1 - (1 - smallest) ** num_drafts)
        if len(prefix) == draft_length:
            for y in range(instance.vocab_size):
                add(outcomes, prefix, y, mass * q[y])
            return
        p = instance.draft(prefix)
        for x in np.flatnonzero(q).tolist():
            child_z = z * p[x] / q[x]
            below = min(smallest, child_z)
            add(outcomes, prefix, x, joint * q[x] * ((1 - below) ** num_drafts - (1 - smallest) ** num_drafts))
            walk((*prefix, x), joint * q[x], child_z, below)

    walk((), 1.0, 1.0, 1.0)
    return outcomes


def spectr_gbv(instance: Instance, draft_length: int, num_drafts: int) -> Outcomes:
    """A(v) = q_v (1 - (1 - min(1, Z_v))^K); at v the next token follows q (1 - min(1, Z p/q))^K."""
    outcomes: Outcomes = {}

    def accepted(joint: float, z: float) -> float:
        return joint * (1 - (1 - min(1.0, z)) ** num_drafts)

    def walk(prefix: Prefix, joint: float, z: float) -> None:
        q = instance.target(prefix)
        if len(prefix) == draft_length:
            for y in range(instance.vocab_size):
                add(outcomes, prefix, y, accepted(joint, z) * q[y])
            return
        p = instance.draft(prefix)
        support = np.flatnonzero(q).tolist()
        ratio = {x: z * p[x] / q[x] for x in support}
        stop = accepted(joint, z) - sum(accepted(joint * q[x], ratio[x]) for x in support)
        residual = {x: q[x] * (1 - min(1.0, ratio[x])) ** num_drafts for x in support}
        total = sum(residual.values())
        for x in support:
            if total > 0:
                add(outcomes, prefix, x, stop * residual[x] / total)
            walk((*prefix, x), joint * q[x], ratio[x])

    walk((), 1.0, 1.0)
    return outcomes
