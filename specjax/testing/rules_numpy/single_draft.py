"""Token, block and greedy block verification of one draft, literally. p is the draft's law, q the target's."""

from __future__ import annotations

import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.testing.rules_numpy.outcomes import Outcomes, add


def token(instance: Instance, drafts: tuple[Prefix, ...]) -> Outcomes:
    """Accept each token with min(1, q/p); after the first rejection sample from (q - p)_+."""
    (draft,) = drafts
    outcomes: Outcomes = {}
    reached = 1.0
    for i, x in enumerate(draft):
        p, q = instance.draft(draft[:i]), instance.target(draft[:i])
        accept = min(1.0, q[x] / p[x])
        residual = np.maximum(q - p, 0)
        for y in np.flatnonzero(residual).tolist():
            add(outcomes, draft[:i], y, reached * (1 - accept) * residual[y] / residual.sum())
        reached *= accept
    for y, mass in enumerate(instance.target(draft)):
        add(outcomes, draft, y, reached * mass)
    return outcomes


def block(instance: Instance, drafts: tuple[Prefix, ...]) -> Outcomes:
    """Accept the longest prefix whose trial h_i succeeds, h from the clipped weights w_i."""
    return _longest_success(instance, drafts[0], clip=True)


def greedy_block(instance: Instance, drafts: tuple[Prefix, ...]) -> Outcomes:
    """The same with weights that are not clipped; the first iteration only."""
    return _longest_success(instance, drafts[0], clip=False)


def _longest_success(instance: Instance, draft: Prefix, clip: bool) -> Outcomes:
    length = len(draft)
    weights = [1.0]
    for i, x in enumerate(draft):
        weight = weights[-1] * instance.target(draft[:i])[x] / instance.draft(draft[:i])[x]
        weights.append(min(1.0, weight) if clip else weight)
    trials = [1.0]
    for i in range(1, length):
        p, q = instance.draft(draft[:i]), instance.target(draft[:i])
        mass = np.maximum(weights[i] * q - p, 0).sum()
        other = mass + 1 - weights[i]
        trials.append(1.0 if weights[i] >= 1 or other == 0 else mass / other)
    trials.append(min(1.0, weights[length]))
    if length == 0:
        trials = [1.0]
    outcomes: Outcomes = {}
    none_longer = 1.0
    for i in range(length, -1, -1):
        # Nothing is tried at 0: the empty prefix is accepted if nothing longer is.
        stop = none_longer * (trials[i] if i > 0 else 1.0)
        law = instance.target(draft[:i])
        if i < length:
            residual = np.maximum(weights[i] * law - instance.draft(draft[:i]), 0)
            law = residual / residual.sum() if residual.sum() > 0 else law
        for y, mass in enumerate(law):
            add(outcomes, draft[:i], y, stop * mass)
        none_longer *= 1 - trials[i]
    return outcomes
