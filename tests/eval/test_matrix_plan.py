"""Which configurations are measured, and which orders are judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eval.matrix_plan import ALL_RULES, Configuration, make_plan, parse_verifiers
from eval.order_check import (
    ANSWERS,
    CONTRADICTED,
    EQUAL,
    FIRST_BLOCK,
    KEPT,
    NO_MORE,
    NOT_JUDGED,
    Pair,
    compare,
    list_pairs,
)
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.ngram import NgramDrafter
from specjax.testing.tiny_models import TabularDrafter, tiny_config

TABLE = TabularDrafter(7)


def plan_of(verifiers: Any = ALL_RULES, drafter: Any = TABLE, **sizes: Any) -> Any:
    sizes = {"num_drafts": (1, 3), "draft_lengths": (4,), "temperatures": (1.0,)} | sizes
    return make_plan("table", drafter, verifiers, **sizes)


def test_all_is_the_matrix_of_the_published_comparisons() -> None:
    plan = plan_of(num_drafts=(1, 3, 5, 7), draft_lengths=(4, 8, 12), temperatures=(0.1, 0.4, 0.7, 1.0))
    # Three rules for one draft; three for several at four K; three L; four temperatures; plain at each temperature.
    assert len(plan.configurations) == (3 + 3 * 4) * 3 * 4 + 4
    assert len({configuration.model_id for configuration in plan.configurations}) == len(plan.configurations)
    assert plan.skipped == ()
    assert plan.rules((4, 1)) == ALL_RULES
    assert plan.rules((4, 7)) == ("spectr", "multi_draft_block", "spectr_gbv")


def test_plain_decoding_comes_first_and_sizes_stay_together() -> None:
    plan = plan_of(draft_lengths=(8, 4), temperatures=(0.5, 1.0))
    assert [configuration.is_plain for configuration in plan.configurations][:3] == [True, True, False]
    sizes = [configuration.sizes for configuration in plan.configurations[2:]]
    assert list(dict.fromkeys(sizes)) == [(4, 1), (8, 1), (4, 3), (8, 3)]
    assert sizes == sorted(sizes, key=lambda size: (size[0] * size[1], size))


def test_single_draft_rules_are_measured_once_whatever_k_is_asked_for() -> None:
    plan = plan_of(("block", "spectr"), num_drafts=(3,))
    assert [(c.verifier, c.num_drafts) for c in plan.configurations[1:]] == [("block", 1), ("spectr", 3)]


def test_carry_rules_are_skipped_for_a_drafter_that_reads_features() -> None:
    eagle = Eagle3Drafter(Eagle3Config.for_target(tiny_config(num_layers=4), head_kind="full"))
    plan = plan_of(drafter=eagle)
    assert plan.skipped == (
        "greedy_block, spectr_gbv: exact only for a drafter whose law depends on the text alone, and table reads the "
        "target's features",
    )
    assert {c.verifier for c in plan.configurations[1:]} == {"token", "spectr", "block", "multi_draft_block"}
    with pytest.raises(ValueError, match="no rule is left to measure; skipped greedy_block"):
        plan_of(("greedy_block",), drafter=eagle)


def test_a_deterministic_drafter_drafts_once() -> None:
    plan = plan_of(drafter=NgramDrafter(7))
    assert plan.skipped == ("K > 1: all drafts of table would be equal",)
    assert {c.num_drafts for c in plan.configurations} == {1}


def test_rules_are_named_or_all() -> None:
    assert parse_verifiers(["all"]) == ALL_RULES
    assert parse_verifiers(["autoregressive", "traversal", "all"]) == ("traversal", *ALL_RULES)
    with pytest.raises(ValueError, match=r"`--verifiers` must be 'all' or among .*token.*; got 'tokn'"):
        parse_verifiers(["token", "tokn"])
    with pytest.raises(ValueError, match="at least one rule beside plain decoding"):
        parse_verifiers(["autoregressive"])


def pairs_of(plan: Any) -> set[tuple[str, str, str, str]]:
    return {(p.first[0].label, p.relation, p.second[0].label, p.sample) for p in list_pairs(plan.configurations)}


def test_orders_are_those_that_are_proved() -> None:
    pairs = pairs_of(plan_of())
    assert ("token K=1 L=4", "<=", "block K=1 L=4", ANSWERS) in pairs
    assert ("block K=1 L=4", "<=", "multi_draft_block K=3 L=4", ANSWERS) in pairs
    assert ("multi_draft_block K=1 L=4", "<=", "multi_draft_block K=3 L=4", ANSWERS) in pairs
    assert ("block K=1 L=4", "=", "multi_draft_block K=1 L=4", ANSWERS) in pairs
    # Carries: an order in the first block alone.
    assert ("block K=1 L=4", "<=", "greedy_block K=1 L=4", FIRST_BLOCK) in pairs
    assert ("block K=1 L=4", "?", "greedy_block K=1 L=4", ANSWERS) in pairs
    assert ("multi_draft_block K=3 L=4", "<=", "spectr_gbv K=3 L=4", FIRST_BLOCK) in pairs
    # Neither is always above the other.
    assert ("spectr K=3 L=4", "?", "multi_draft_block K=3 L=4", ANSWERS) in pairs
    assert not [pair for pair in pairs if pair[1] == "<=" and pair[3] == ANSWERS and "gbv" in pair[0] + pair[2]]


def test_temperatures_are_compared_apart_and_together() -> None:
    pairs = list_pairs(plan_of(("token", "block"), temperatures=(0.5, 1.0)).configurations)
    assert [pair.temperature for pair in pairs] == [0.5, 1.0, None]
    assert [len(pair.second) for pair in pairs] == [1, 1, 2]


FIRST = Configuration("table", 4, 1.0, "token", 1)
SECOND = Configuration("table", 4, 1.0, "block", 1)


def verdict_of(first: Any, second: Any, relation: str = NO_MORE, sample: str = ANSWERS, **options: Any) -> str:
    counts = {FIRST.model_id: first, SECOND.model_id: second}
    (comparison,) = compare([Pair((FIRST,), (SECOND,), sample, relation)], counts, **options)
    return comparison.verdict


def answers(rng: Any, mean: float, num_questions: int = 10) -> dict[int, list[int]]:
    return {question: rng.poisson(mean, 12).clip(1, 5).tolist() for question in range(num_questions)}


def test_a_clear_reversal_is_contradicted_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    low, same, high = answers(rng, 1.5), answers(rng, 1.5), answers(rng, 3.5)
    assert verdict_of(low, high) == KEPT
    assert verdict_of(high, low) == CONTRADICTED
    assert verdict_of(low, same) != CONTRADICTED
    assert verdict_of(low, same, EQUAL) == KEPT
    assert verdict_of(low, high, EQUAL) == verdict_of(high, low, EQUAL) == CONTRADICTED
    assert verdict_of(high, low, "?") == NOT_JUDGED


def test_too_few_questions_are_not_judged() -> None:
    rng = np.random.default_rng(1)
    assert verdict_of(answers(rng, 3.5, 3), answers(rng, 1.0, 3)) == NOT_JUDGED
    # Only questions that both answered count.
    high, low = answers(rng, 3.5), answers(rng, 1.0)
    assert verdict_of(high, {question: low[question] for question in (0, 4, 7)}) == NOT_JUDGED


def test_the_first_block_is_the_first_target_call() -> None:
    first = {question: [1 + question % 2, 5, 5, 5] for question in range(8)}
    second = {question: [4 + question % 2, 1, 1, 1] for question in range(8)}
    assert verdict_of(first, second, sample=FIRST_BLOCK) == KEPT
    assert verdict_of(first, second, sample=ANSWERS) == CONTRADICTED


def test_right_rules_are_rarely_accused() -> None:
    """400 families of 30 equal pairs at 5 %: 20 expected, 36 is 3.7 sigma above. Literal seed."""
    rng = np.random.default_rng(3)
    accused = 0
    for _ in range(400):
        pairs, counts = [], {}
        for length in range(30):
            first, second = (Configuration("table", length, 1.0, rule, 1) for rule in ("token", "block"))
            counts |= {c.model_id: answers(rng, 2.0) for c in (first, second)}
            pairs.append(Pair((first,), (second,), ANSWERS, NO_MORE))
        accused += any(c.verdict == CONTRADICTED for c in compare(pairs, counts, false_alarm=0.05))
    assert accused < 36
