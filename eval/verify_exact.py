"""Rows of exact values for `eval.verify`: law error, expected accepted tokens, bounds, expected target calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from specjax.testing.instances import Instance, edge_instances, padded_vocabulary, random_instance
from specjax.types import DraftTree
from specjax.verification import Verifier
from specjax.verification.bounds import cic_bound, optimum
from specjax.verification.enumerate import Enumerator

# All instances share one vocabulary size, so that each rule is compiled once a shape; the rest is probability zero.
_PADDED_SIZE = 4
_CALL_TOKENS = 6


@dataclasses.dataclass(frozen=True)
class Job:
    """One instance, K drafts of L tokens."""

    instance: Instance
    draft_length: int
    num_drafts: int


@dataclasses.dataclass(frozen=True)
class ExactRow:
    """Exact values of a rule on a job.

    Attributes:
        verifier: name of the rule.
        job: what it ran on.
        num_tokens: length of the sequences whose law was compared.
        law_error: largest |probability - target's probability| over them.
        expected_accepted: accepted draft tokens of the first iteration.
        target_calls: expected iterations for 6 tokens; None where it was not asked for.
    """

    verifier: str
    job: Job
    num_tokens: int
    law_error: float
    expected_accepted: float
    target_calls: float | None


def default_jobs() -> list[Job]:
    """The jobs of `--all`: every K and L up to 3 where it is cheap, all edge instances."""
    small, medium, large = random_instance(2, 0), random_instance(3, 0), random_instance(4, 0)
    jobs = [Job(small, length, drafts) for drafts in (1, 2, 3) for length in (1, 2, 3) if drafts * length < 9]
    jobs += [Job(medium, length, drafts) for length, drafts in ((1, 2), (1, 3), (2, 1), (2, 2))]
    jobs += [Job(large, length, drafts) for length, drafts in ((1, 2), (2, 1))]
    for vocab_size in (2, 3):
        for instance in edge_instances(vocab_size).values():
            jobs += [Job(instance, 2, drafts) for drafts in (1, 2)]
    return jobs


def exact_rows(verifier: Verifier, jobs: list[Job]) -> Iterator[ExactRow]:
    """Exact values of a rule; rules for one draft run on the jobs with K = 1 only."""
    for job in jobs:
        if job.num_drafts > 1 and not verifier.multi_draft:
            continue
        tree = DraftTree.chains(job.num_drafts, job.draft_length)
        enumerator = Enumerator(verifier, tree, padded_vocabulary(job.instance, _PADDED_SIZE))
        num_tokens = job.draft_length + 2
        calls = enumerator.expected_target_calls(_CALL_TOKENS) if job.instance.vocab_size == 2 else None
        yield ExactRow(
            verifier.name,
            job,
            num_tokens,
            enumerator.law_error(num_tokens),
            enumerator.expected_accepted(),
            calls,
        )


@dataclasses.dataclass(frozen=True)
class Bounds:
    """CIC bound and optima over all couplings, None where they cannot be computed."""

    cic: float
    no_carry: float | None
    carry: float | None


class BoundTable:
    """Bounds of jobs, each computed once."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int, int], Bounds] = {}

    def __getitem__(self, job: Job) -> Bounds:
        key = (job.instance.name, job.draft_length, job.num_drafts)
        if key not in self._known:
            cic = cic_bound(job.instance, job.draft_length, job.num_drafts)
            try:
                optima = [
                    optimum(job.instance, job.draft_length, job.num_drafts, with_carry=carry) for carry in (False, True)
                ]
            except (ImportError, ValueError):
                # SciPy is missing, or the program too large.
                optima = [None, None]
            self._known[key] = Bounds(cic, *optima)
        return self._known[key]


def format_row(row: ExactRow, bounds: Bounds) -> str:
    """One line of the table."""
    optima = [f"{value:9.6f}" if value is not None else "        -" for value in (bounds.no_carry, bounds.carry)]
    calls = f"{row.target_calls:9.6f}" if row.target_calls is not None else "        -"
    job = row.job
    return (
        f"{row.verifier:<27}{job.instance.name:<20}{job.instance.vocab_size:>2}{job.draft_length:>3}"
        f"{job.num_drafts:>3}{row.num_tokens:>3}  {row.law_error:8.1e}  {row.expected_accepted:9.6f}  "
        f"{bounds.cic:9.6f}  {optima[0]}  {optima[1]}  {calls}"
    )


HEADER = (
    f"{'rule':<27}{'instance':<20}{'V':>2}{'L':>3}{'K':>3}{'N':>3}  {'error':>8}  {'accepted':>9}  {'CIC':>9}  "
    f"{'LP':>9}  {'LP carry':>9}  {'calls(6)':>9}"
)
LEGEND = (
    "error: largest |P - target| over all sequences of N emitted tokens; accepted: expected accepted draft tokens\n"
    "of a fresh iteration; CIC: conditional-independence bound; LP: optimum over all couplings without and with\n"
    "carry-over; calls(6): expected target calls for 6 tokens"
)
