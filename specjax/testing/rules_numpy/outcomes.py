"""From a rule's law given the drafts to the law of the first iteration."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from specjax.testing.instances import Instance, Prefix

Outcomes = dict[tuple[Prefix, int], float]
"""Probability of each pair of accepted tokens and next token."""

GivenDrafts = Callable[[Instance, tuple[Prefix, ...]], Outcomes]
"""A rule: the law of its outcome for given drafts, all of one length."""


def add(outcomes: Outcomes, accepted: Prefix, next_token: int, mass: float) -> None:
    """Adds mass to an outcome."""
    if mass > 0:
        outcomes[accepted, next_token] = outcomes.get((accepted, next_token), 0.0) + mass


def first_iteration_law(rule: GivenDrafts, instance: Instance, draft_length: int, num_drafts: int) -> Outcomes:
    """Sums a rule's law over all i.i.d. drafts."""
    drafts = []
    for draft in itertools.product(range(instance.vocab_size), repeat=draft_length):
        mass = 1.0
        for i, token in enumerate(draft):
            mass *= float(instance.draft(draft[:i])[token])
        if mass > 0:
            drafts.append((draft, mass))
    total: Outcomes = {}
    for chosen in itertools.product(drafts, repeat=num_drafts):
        mass = 1.0
        for _, weight in chosen:
            mass *= weight
        for (accepted, token), share in rule(instance, tuple(draft for draft, _ in chosen)).items():
            add(total, accepted, token, mass * share)
    return total
