"""Whether measured block efficiencies keep the order that theory gives the rules.

From one text and one pair of laws, an iteration accepts on average: token <= block <= multi_draft_block, the latter
growing with K; block <= greedy_block <= spectr_gbv, growing with K; multi_draft_block <= spectr_gbv at equal K. With
one draft, spectr is token in law, multi_draft_block and traversal are block, and spectr_gbv is greedy_block. Samples:

- `answers`: block efficiency over whole answers, for rules without a carry. Each of their iterations verifies against
  the plain target, so the order of one iteration is expected of all of them.
- `first block`: tokens of each answer's first target call, for rules with a carry. Their later iterations verify
  against a changed target, and what they gain in one they may lose in the next: no order of whole answers is known.

Each pair is compared at each temperature, and over all of them together: what holds at each holds for the sums, and
the sums are known better. Pairs without a theorem (spectr against the block rules, more drafts for spectr, carries over
whole answers) are measured and never judged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from eval.matrix_plan import Configuration
from eval.ratio_intervals import difference_interval
from specjax.metrics import Interval

ANSWERS = "answers"
FIRST_BLOCK = "first block"
NO_MORE = "<="
EQUAL = "="
NO_THEOREM = "?"

KEPT = "kept"
WITHIN_INTERVAL = "within interval"
CONTRADICTED = "contradicted"
NOT_JUDGED = "not judged"

# Probability that a right implementation is accused of anything in one run.
FAMILY_FALSE_ALARM = 0.01
# An interval from fewer questions rests on its assumptions alone.
FEWEST_QUESTIONS = 4

AnswerCounts = Mapping[str | int, Sequence[int]]
"""For each question the tokens that each target call committed."""

_Key = tuple[str, int]  # rule and K


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two rules with their K at one L, at one temperature or several, and what theory says about them.

    Attributes:
        first: the one that may not be above, at each temperature.
        second: the other, at the same temperatures.
        sample: "answers" or "first block".
        relation: "<=", "=" or "?" where there is no theorem.
    """

    first: tuple[Configuration, ...]
    second: tuple[Configuration, ...]
    sample: str
    relation: str

    @property
    def temperature(self) -> float | None:
        """The temperature; None for several together."""
        return self.first[0].temperature if len(self.first) == 1 else None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A pair as measured.

    Attributes:
        pair: what was compared.
        difference: second minus first, in tokens per target call; the interval has the level of the whole family.
        num_questions: units.
        verdict: "kept", "within interval" (on the wrong side of the order, but not significantly), "contradicted", or
            "not judged" without a theorem or with too few questions.
    """

    pair: Pair
    difference: Interval
    num_questions: int
    verdict: str


def list_pairs(configurations: Sequence[Configuration]) -> list[Pair]:
    """All pairs of measured configurations about which something is known or worth knowing."""
    by_case: dict[tuple[int, float], dict[_Key, Configuration]] = {}
    for configuration in configurations:
        if not configuration.is_plain:
            case = by_case.setdefault((configuration.draft_length, configuration.temperature), {})
            case[configuration.verifier, configuration.num_drafts] = configuration
    pairs: list[Pair] = []
    for length in dict.fromkeys(length for length, _ in by_case):
        cases = [measured for (own, _), measured in by_case.items() if own == length]
        for measured in [[case] for case in cases] + ([cases] if len(cases) > 1 else []):
            for first, second, sample, relation in _known_pairs(measured[0]):
                if all(first in case and second in case for case in measured):
                    members = [tuple(case[key] for case in measured) for key in (first, second)]
                    pairs.append(Pair(members[0], members[1], sample, relation))
    return pairs


def _known_pairs(measured: Mapping[_Key, Configuration]) -> Iterator[tuple[_Key, _Key, str, str]]:
    several = sorted({drafts for _, drafts in measured if drafts > 1})
    steps = list(zip([1, *several], several, strict=False))
    token, block, greedy = ("token", 1), ("block", 1), ("greedy_block", 1)
    yield token, block, ANSWERS, NO_MORE
    yield token, ("spectr", 1), ANSWERS, EQUAL
    for name in ("multi_draft_block", "multi_draft_block_uncapped", "traversal"):
        yield block, (name, 1), ANSWERS, EQUAL
    yield block, greedy, FIRST_BLOCK, NO_MORE
    yield block, greedy, ANSWERS, NO_THEOREM
    yield greedy, ("spectr_gbv", 1), ANSWERS, EQUAL
    for drafts in several:
        blocks = ("multi_draft_block", drafts)
        yield block, blocks, ANSWERS, NO_MORE
        yield blocks, ("multi_draft_block_uncapped", drafts), ANSWERS, NO_MORE
        yield blocks, ("spectr_gbv", drafts), FIRST_BLOCK, NO_MORE
        yield blocks, ("spectr_gbv", drafts), ANSWERS, NO_THEOREM
        yield ("spectr", drafts), blocks, ANSWERS, NO_THEOREM
    for fewer, more in steps:
        yield ("multi_draft_block", fewer), ("multi_draft_block", more), ANSWERS, NO_MORE
        yield ("spectr_gbv", fewer), ("spectr_gbv", more), FIRST_BLOCK, NO_MORE
        yield ("spectr_gbv", fewer), ("spectr_gbv", more), ANSWERS, NO_THEOREM
        yield ("spectr", fewer), ("spectr", more), ANSWERS, NO_THEOREM


def compare(
    pairs: Sequence[Pair],
    counts: Mapping[str, AnswerCounts],
    *,
    false_alarm: float = FAMILY_FALSE_ALARM,
) -> list[Comparison]:
    """Judges all pairs, so that right rules are accused with probability `false_alarm` at most, all pairs together.

    Each of the m judged pairs gets the level `false_alarm / m` (Bonferroni): one-sided where theory gives an order,
    two-sided where it gives equality. Intervals are Student's over questions (`ratio_intervals`), paired by question.

    Args:
        pairs: from `list_pairs`.
        counts: by `Configuration.model_id`, what each answer's target calls committed.
        false_alarm: of the whole family.

    Returns:
        One comparison a pair, in order.
    """
    judged = max(sum(pair.relation != NO_THEOREM for pair in pairs), 1)
    comparisons = []
    for pair in pairs:
        members = [[counts[configuration.model_id] for configuration in side] for side in (pair.first, pair.second)]
        runs = [*members[0], *members[1]]
        shared = [question for question in runs[0] if all(run.get(question) for run in runs)]
        share = false_alarm / judged
        level = 1 - (share if pair.relation == EQUAL else 2 * share)
        first, second = (_sums(side, shared, pair.sample) for side in members)
        difference = difference_interval(first, second, level=level)
        enough = len(shared) >= FEWEST_QUESTIONS
        verdict = _verdict(pair, difference) if enough else NOT_JUDGED
        comparisons.append(Comparison(pair, difference, len(shared), verdict))
    return comparisons


def _sums(runs: Sequence[AnswerCounts], questions: Sequence[str | int], sample: str) -> tuple[list[int], list[int]]:
    """Tokens and target calls of each question, over all runs."""
    calls = [[run[question][:1] if sample == FIRST_BLOCK else run[question] for run in runs] for question in questions]
    return [sum(map(sum, answers)) for answers in calls], [sum(map(len, answers)) for answers in calls]


def _verdict(pair: Pair, difference: Interval) -> str:
    if pair.relation == NO_THEOREM:
        return NOT_JUDGED
    outside = difference.high < 0 or (pair.relation == EQUAL and difference.low > 0)
    if outside:
        return CONTRADICTED
    return KEPT if pair.relation == EQUAL or difference.value >= 0 else WITHIN_INTERVAL
