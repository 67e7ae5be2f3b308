"""What a comparison of verification rules measures: every rule at every K, L and temperature that it can serve."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from eval.records import PLAIN, Variant
from specjax import verification

AUTOREGRESSIVE = "autoregressive"
# The rules of the published comparisons; further registered ones are measured where they are named.
ALL_RULES = ("token", "spectr", "block", "greedy_block", "multi_draft_block", "spectr_gbv")


@dataclasses.dataclass(frozen=True)
class Configuration(Variant):
    """One rule with its numbers.

    Attributes:
        verifier: name of the rule; "autoregressive" for plain decoding.
        num_drafts: independent drafts a step, K.
    """

    verifier: str = AUTOREGRESSIVE
    num_drafts: int = 1

    @property
    def label(self) -> str:
        """Short name within a temperature: "block K=1 L=4"."""
        return self.verifier if self.is_plain else f"{self.verifier} K={self.num_drafts} L={self.draft_length}"

    @property
    def model_id(self) -> str:
        """Name in answer files: unique within a result."""
        return f"{self.label.replace(' ', '-').replace('=', '')}-T{self.temperature:g}"

    @property
    def sizes(self) -> tuple[int, int]:
        """(L, K): configurations of equal sizes share one compiled step."""
        return self.draft_length, self.num_drafts


@dataclasses.dataclass(frozen=True)
class Plan:
    """What will be measured.

    Attributes:
        configurations: plain decoding first, then by sizes, the cheapest first; within them by rule, then temperature.
        skipped: one line for each reason to leave rules out.
    """

    configurations: tuple[Configuration, ...]
    skipped: tuple[str, ...]

    def rules(self, sizes: tuple[int, int]) -> tuple[str, ...]:
        """Rules that are measured at (L, K), in order."""
        return tuple(dict.fromkeys(c.verifier for c in self.configurations if c.sizes == sizes and not c.is_plain))


def parse_verifiers(names: Sequence[str]) -> tuple[str, ...]:
    """Rules of the flag `--verifiers`: names, or "all" for those of the published comparisons.

    Raises:
        ValueError: if there is none, or one is unknown.
    """
    chosen: dict[str, None] = {}
    known = verification.verifier_names()
    for name in names:
        if name == "all":
            chosen |= dict.fromkeys(ALL_RULES)
        elif name in known:
            chosen[name] = None
        elif name != AUTOREGRESSIVE:  # always measured
            raise ValueError(f"`--verifiers` must be 'all' or among {', '.join(known)}; got {name!r}")
    if not chosen:
        raise ValueError("`--verifiers` must name at least one rule beside plain decoding")
    return tuple(chosen)


def make_plan(
    system: str,
    drafter: Any,
    verifiers: Sequence[str],
    num_drafts: Sequence[int],
    draft_lengths: Sequence[int],
    temperatures: Sequence[float],
) -> Plan:
    """Lists all configurations that a drafter can serve exactly.

    Args:
        system: name of the drafter.
        drafter: its configuration object.
        verifiers: registered names.
        num_drafts: values of K; rules for one draft are measured at K = 1 only, whether or not it is listed.
        draft_lengths: values of L.
        temperatures: of sampling.

    Returns:
        The plan.

    Raises:
        ValueError: if nothing is left to measure.
    """
    rules = [verification.get_verifier(name) for name in verifiers]
    skipped = []
    unfit = [rule.name for rule in rules if rule.needs_context_law and drafter.feature_layers]
    if unfit:
        skipped.append(
            f"{', '.join(unfit)}: exact only for a drafter whose law depends on the text alone, "
            f"and {system} reads the target's features"
        )
    if drafter.deterministic and max(num_drafts) > 1:
        skipped.append(f"K > 1: all drafts of {system} would be equal")
        num_drafts = (1,)
    rules = [rule for rule in rules if rule.name not in unfit]
    if not rules:
        raise ValueError(f"no rule is left to measure; skipped {skipped[0]}")
    configurations = [Configuration(PLAIN, 0, temperature) for temperature in temperatures]
    sizes = {(length, drafts) for length in draft_lengths for drafts in (1, *num_drafts)}
    for length, drafts in sorted(sizes, key=lambda size: (size[0] * size[1], size)):
        for rule in rules:
            if drafts in (num_drafts if rule.multi_draft else (1,)):
                configurations += [
                    Configuration(system, length, temperature, rule.name, drafts) for temperature in temperatures
                ]
    return Plan(tuple(configurations), tuple(skipped))
