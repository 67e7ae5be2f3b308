"""Chi-squared tests of the jitted float32 rules against exact laws, for `eval.verify --empirical`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax

from specjax.testing.chi_squared import ChiSquaredResult, chi_squared_test
from specjax.testing.instances import random_instance
from specjax.testing.sampling import count_outcomes, count_sequences, sample_runs, sequence_law
from specjax.types import DraftTree
from specjax.verification import Verifier
from specjax.verification.enumerate import Enumerator

# Over all rules and both tests of a run the chance that right rules fail stays below 1e-4.
FALSE_ALARM = 1e-6


@dataclasses.dataclass(frozen=True)
class SamplingRow:
    """Both tests of one rule.

    Attributes:
        verifier: name of the rule.
        num_drafts: K.
        draft_length: L.
        sequences: the first L+2 emitted tokens, jointly, against the target's law.
        outcomes: accepted tokens and next token of the first iteration against the enumerated law.
    """

    verifier: str
    num_drafts: int
    draft_length: int
    sequences: ChiSquaredResult
    outcomes: ChiSquaredResult

    @property
    def passed(self) -> bool:
        """Whether neither test contradicts."""
        return min(self.sequences.p_value, self.outcomes.p_value) >= FALSE_ALARM


def sampling_rows(verifier: Verifier, num_runs: int, *, seed: int, draft_length: int = 2) -> Iterator[SamplingRow]:
    """Draws `num_runs` requests of L+2 tokens for K = 1 and, if the rule uses several drafts, K = 3."""
    instance = random_instance(3, 0)
    num_tokens = draft_length + 2
    for num_drafts in (1, 3) if verifier.multi_draft else (1,):
        tree = DraftTree.chains(num_drafts, draft_length)
        rng_key = jax.random.fold_in(jax.random.key(seed), num_drafts)
        draws = sample_runs(verifier, tree, instance, rng_key, num_runs=num_runs, num_tokens=num_tokens)
        exact = Enumerator(verifier, tree, instance).first_iteration_law()
        sequences = chi_squared_test(count_sequences(draws.tokens, 3), sequence_law(instance, num_tokens))
        outcomes = chi_squared_test(*count_outcomes(draws, exact))
        yield SamplingRow(verifier.name, num_drafts, draft_length, sequences, outcomes)


HEADER = (
    f"{'rule':<27}{'K':>2}{'L':>3}{'draws':>10}  {'sequences: chi2/df':>20}{'p':>9}  {'outcomes: chi2/df':>20}{'p':>9}"
)


def format_row(row: SamplingRow) -> str:
    """One line of the table."""
    cells = "".join(
        f"  {f'{result.statistic:.1f}/{result.degrees}':>20}{result.p_value:9.1e}"
        for result in (row.sequences, row.outcomes)
    )
    return f"{row.verifier:<27}{row.num_drafts:>2}{row.draft_length:>3}{row.sequences.num_draws:>10}{cells}"
