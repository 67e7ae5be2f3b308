"""Exact laws of verification rules on small instances, computed through the functions that decode.

Nothing is sampled: drafts are enumerated with their probabilities, a rule's own draws are prescribed or integrated, and
everything runs in float64. A new rule that derives from `ChoiceRule` is enumerable as it stands.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.types import DraftTree
from specjax.verification.base import ChoiceRule, Verifier
from specjax.verification.emissions import Emission
from specjax.verification.enumerate_choices import choice_iteration
from specjax.verification.enumerate_gbv import gbv_iteration
from specjax.verification.enumerate_times import times_iteration
from specjax.verification.multi_draft_block import MultiDraftBlockRule
from specjax.verification.spectr_gbv import SpectrGbvRule


@dataclasses.dataclass
class Enumerator:
    """Exact laws of one rule on one instance.

    Attributes:
        verifier: the rule; registered or not.
        tree: shape of every proposal.
        instance: the laws.
        max_depth: nodes deeper than this do not exist; None means the whole tree.

    Raises:
        ValueError: if the rule cannot use the tree, or `max_depth` is not in it.
    """

    verifier: Verifier
    tree: DraftTree
    instance: Instance
    max_depth: int | None = None

    def __post_init__(self) -> None:
        self.verifier.check_tree(self.tree)
        if self.max_depth is not None and not 0 <= self.max_depth <= self.tree.max_depth:
            raise ValueError(f"`max_depth` must be in [0, {self.tree.max_depth}]; got {self.max_depth}")
        self._known: dict[tuple, list[Emission]] = {}

    def initial_carry(self) -> Any:
        """The carry of a fresh request, in float64."""
        with jax.enable_x64(True):
            return self.verifier.init_carry(self.tree, self.instance.vocab_size)

    def iteration(self, context: Prefix = (), carry: Any = None) -> list[Emission]:
        """What one iteration emits after `context`.

        Args:
            context: committed tokens.
            carry: the carry before it; None for a fresh request.

        Returns:
            Emissions with their exact probabilities.

        Raises:
            ValueError: if the rule offers no way to be enumerated.
        """
        carry = self.initial_carry() if carry is None else carry
        key = (context, *(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(carry)))
        if key in self._known:
            return self._known[key]
        depth = self.tree.max_depth if self.max_depth is None else self.max_depth
        rule = self.verifier.rule
        with jax.enable_x64(True):
            if isinstance(rule, ChoiceRule):
                emissions = choice_iteration(rule, self.tree, self.instance, context, carry, depth)
            elif isinstance(rule, MultiDraftBlockRule):
                emissions = times_iteration(rule, self.tree, self.instance, context, depth)
            elif isinstance(rule, SpectrGbvRule):
                emissions = gbv_iteration(rule, self.tree, self.instance, context, carry, depth)
            else:
                raise ValueError(f"`verifier` {self.verifier.name!r} must derive from ChoiceRule to be enumerated")
        self._known[key] = emissions
        return emissions

    def first_iteration_law(self) -> dict[tuple[Prefix, int], float]:
        """Joint law of accepted tokens and next token of a fresh request's first iteration."""
        law: dict[tuple[Prefix, int], float] = {}
        for emission in self.iteration():
            key = (emission.accepted, emission.next_token)
            law[key] = law.get(key, 0.0) + emission.probability
        return law

    def expected_accepted(self) -> float:
        """Expected number of accepted draft tokens in the first iteration, bonus and recovered tokens not counted."""
        return sum(emission.probability * len(emission.accepted) for emission in self.iteration())

    def emitted_law(self, num_tokens: int) -> dict[Prefix, float]:
        """Law of the first `num_tokens` emitted tokens, over as many iterations as that takes."""
        law: dict[Prefix, float] = {}

        def follow(context: Prefix, carry: Any, probability: float) -> None:
            if len(context) >= num_tokens:
                key = context[:num_tokens]
                law[key] = law.get(key, 0.0) + probability
                return
            for emission in self.iteration(context, carry):
                follow((*context, *emission.tokens), emission.carry, probability * emission.probability)

        follow((), None, 1.0)
        return law

    def law_error(self, num_tokens: int) -> float:
        """Largest |P(tokens) - target's probability| over all sequences of `num_tokens` tokens."""
        law = self.emitted_law(num_tokens)
        target = self.instance.target_joint(num_tokens)
        return max(abs(law.get(tokens, 0.0) - target.get(tokens, 0.0)) for tokens in {*law, *target})

    def expected_target_calls(self, num_tokens: int) -> float:
        """Expected number of iterations until at least `num_tokens` tokens are emitted."""
        known: dict[Prefix, float] = {}

        def follow(context: Prefix, carry: Any) -> float:
            if len(context) >= num_tokens:
                return 0.0
            if not self.verifier.carries_state and context in known:
                return known[context]
            calls = 1.0
            for emission in self.iteration(context, carry):
                calls += emission.probability * follow((*context, *emission.tokens), emission.carry)
            known[context] = calls
            return calls

        return follow((), None)
