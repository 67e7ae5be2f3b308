"""Faults that users of such systems reported, each as a named test."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.laws import LawParams, to_log_laws
from specjax.testing.draft_trees import tree_of_widths
from specjax.testing.instances import Instance, from_tables, random_instance
from specjax.types import DRAW_DETERMINISTIC, DRAW_WITHOUT_REPLACEMENT, DraftTree, Proposal, Verdict
from specjax.verification import ChoiceRule, Verifier, get_verifier, verifier_names
from specjax.verification.base import prescribed
from specjax.verification.block import BlockRule
from specjax.verification.enumerate import Enumerator
from specjax.verification.token import TokenRule

MULTI_DRAFT = [name for name in verifier_names() if get_verifier(name).multi_draft]
EVERYDAY = [name for name in verifier_names() if not get_verifier(name).experimental]

# Every rule is compiled once, for these sizes; shorter drafts are `max_depth`, smaller vocabularies zeros.
BATCH, LENGTH, VOCAB = 300, 5, 6


def log(probs: Any) -> jax.Array:
    with np.errstate(divide="ignore"):
        return jnp.log(jnp.asarray(probs, jnp.float32))


def context_free(target: Any, draft: Any) -> Instance:
    return from_tables("table", len(target), {(): np.asarray(target, float)}, {(): np.asarray(draft, float)})


def law_of_first_token(name: str, sampled: Any, claimed: Any, target: Any) -> np.ndarray:
    """Exact law of the first token when one token is drafted from `sampled` and verified as if from `claimed`."""
    rule = get_verifier(name).rule
    assert isinstance(rule, ChoiceRule)
    tree = DraftTree.chains(1, 1)
    law = np.zeros(len(target))
    for token in np.flatnonzero(sampled).tolist():
        proposal = Proposal(jnp.asarray([0, token], jnp.int32), log(claimed)[None], jnp.int32(1), tree)
        for choice in range(rule.choice_sizes(tree)[0]):
            outcome = rule.decide(prescribed(jnp.asarray([choice])), proposal, log([target, target]), ())
            mass = sampled[token] * float(jnp.exp(outcome.log_prob))
            if mass > 0 and int(outcome.stop_node) == 1:
                law[token] += mass
            elif mass > 0:
                law += mass * np.exp(np.asarray(outcome.next_log_law, np.float64))
    return law


def num_drafts_of(name: str) -> int:
    return 2 if get_verifier(name).multi_draft else 1


@functools.cache
def _batched(name: str) -> Any:
    rule = get_verifier(name)
    tree = DraftTree.chains(num_drafts_of(name), LENGTH)

    def run(rng_key: Any, tokens: Any, draft: Any, target: Any, max_depth: Any) -> Verdict:
        proposal = Proposal(tokens=tokens, draft_log_laws=draft, max_depth=max_depth, tree=tree)
        return rule.verify(rng_key, proposal, target, rule.init_carry(tree, VOCAB))

    return tree, jax.jit(jax.vmap(run))


def verify_batch(
    name: str, tokens: Any, draft: Any, target: Any, *, max_depth: Any = LENGTH, seeds: Any = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Runs BATCH requests through one compiled program a rule; laws as probabilities, broadcast to the batch.

    Returns:
        Number of accepted tokens, next tokens, first emitted tokens.
    """
    tree, run = _batched(name)
    keys = jax.vmap(jax.random.key)(jnp.asarray(np.arange(BATCH) if seeds is None else seeds, jnp.int32))
    tokens = np.broadcast_to(np.asarray(tokens, np.int32), (BATCH, tree.num_nodes))
    draft = np.broadcast_to(_logs(draft), (BATCH, len(tree.internal), VOCAB))
    target = np.broadcast_to(_logs(target), (BATCH, tree.num_nodes, VOCAB))
    depth = np.broadcast_to(np.asarray(max_depth, np.int32), (BATCH,))
    verdict = run(keys, tokens, draft, target, depth)
    accepted, following = np.asarray(verdict.num_accepted), np.asarray(verdict.next_token)
    path = np.asarray(verdict.path)
    first = np.where(accepted > 0, tokens[np.arange(BATCH), np.maximum(path[:, 1], 0)], following)
    return accepted, following, first


def _logs(probs: Any) -> np.ndarray:
    probs = np.asarray(probs, np.float64)
    with np.errstate(divide="ignore"):
        padded = np.log(np.pad(probs, [(0, 0)] * (probs.ndim - 1) + [(0, VOCAB - probs.shape[-1])]))
    return padded.astype(np.float32)


def random_laws(seed: int, name: str) -> np.ndarray:
    """A law for each depth, the same for all nodes of the depth: rules that merge drafts need that."""
    tree, _ = _batched(name)
    rows = np.random.default_rng(seed).dirichlet(np.ones(VOCAB), size=LENGTH + 1)
    return rows[list(tree.depth)]


def test_case_l1_processed_draft_laws_reach_the_verifier() -> None:
    logits = jnp.log(jnp.asarray([[[0.5, 0.3, 0.15, 0.05], [0.4, 0.3, 0.2, 0.1]]], jnp.float32))
    params = LawParams(jnp.ones(1), jnp.full(1, 2, jnp.int32), jnp.ones(1), jnp.zeros(1))
    target, draft = np.exp(np.asarray(to_log_laws(logits, params)[0], np.float64))
    np.testing.assert_allclose(law_of_first_token("token", draft, draft, target), [0.625, 0.375, 0, 0], atol=1e-6)
    raw = [0.4, 0.3, 0.2, 0.1]
    np.testing.assert_allclose(law_of_first_token("token", draft, raw, target), [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_case_l2_greedy_drafts_have_one_hot_laws() -> None:
    target, soft = [0.3, 0.5, 0.2], [0.6, 0.3, 0.1]
    always_zero = [1.0, 0.0, 0.0]
    np.testing.assert_allclose(law_of_first_token("token", always_zero, always_zero, target), target, atol=1e-6)
    biased = law_of_first_token("token", always_zero, soft, target)
    np.testing.assert_allclose(biased, [0.5, 1 / 3, 1 / 6], atol=1e-6)
    # At temperature 0 the target is one-hot too and the wrong draft is never emitted.
    np.testing.assert_allclose(law_of_first_token("token", always_zero, always_zero, [0.0, 1.0, 0.0]), [0, 1, 0])


@pytest.mark.parametrize("num_drafts", [1, 2])
def test_case_l3_stochastic_drafts_use_their_law(num_drafts: int) -> None:
    instance = context_free([0.3, 0.5, 0.2], [0.6, 0.3, 0.1])
    for name in EVERYDAY if num_drafts == 1 else [name for name in EVERYDAY if name in MULTI_DRAFT]:
        law = Enumerator(get_verifier(name), DraftTree.chains(num_drafts, 1), instance).emitted_law(1)
        np.testing.assert_allclose([law[token,] for token in range(3)], [0.3, 0.5, 0.2], atol=1e-12)


def test_case_l3_a_residual_that_ignores_the_draft_law_is_noticed() -> None:
    class MasksTheDraft(TokenRule):
        """After a rejection only masks the drafted token, as is right for drafts that were not drawn."""

        def decide(self, choose: Any, proposal: Proposal, target_log_laws: Any, carry: Any) -> Any:
            outcome = super().decide(choose, proposal, target_log_laws, carry)
            masked = jax.nn.log_softmax(target_log_laws[0].at[proposal.tokens[1]].set(-jnp.inf))
            return outcome.replace(next_log_law=jnp.where(outcome.stop_node == 0, masked, outcome.next_log_law))

    verifier = Verifier("masks", MasksTheDraft(), "residual without the draft's law", lossless=False)
    tree, target = DraftTree.chains(1, 1), [0.3, 0.5, 0.2]
    assert Enumerator(verifier, tree, context_free(target, [0.6, 0.3, 0.1])).law_error(1) > 0.01
    # It is right where the draft is not drawn.
    assert Enumerator(verifier, tree, context_free(target, [1.0, 0.0, 0.0])).law_error(1) <= 1e-12


def test_case_l4_deterministic_candidates_follow_the_membership_rule() -> None:
    instance = context_free([0.3, 0.5, 0.2], [0.6, 0.3, 0.1])
    tree = tree_of_widths((2,), (DRAW_DETERMINISTIC,))
    law = Enumerator(get_verifier("multi_draft_block"), tree, instance).first_iteration_law()
    accepted = {token: sum(m for (prefix, _), m in law.items() if prefix == (token,)) for token in range(3)}
    # Candidate 0 with .3, then candidate 1 with .7 * 5/7; token 2 is what is left.
    assert accepted == pytest.approx({0: 0.3, 1: 0.5, 2: 0.0}, abs=1e-12)
    assert law[(), 2] == pytest.approx(0.2, abs=1e-12)


@pytest.mark.parametrize("num_drafts", [2, 3])
def test_case_l4_drawn_candidates_are_exact_with_duplicates_and_zeros(num_drafts: int) -> None:
    # The draft never proposes token 3, the target never emits token 2.
    instance = context_free([0.4, 0.3, 0.0, 0.3], [0.5, 0.2, 0.3, 0.0])
    for name in (name for name in EVERYDAY if name in MULTI_DRAFT):
        assert Enumerator(get_verifier(name), DraftTree.chains(num_drafts, 1), instance).law_error(2) <= 1e-12, name
    distinct = tree_of_widths((num_drafts,), (DRAW_WITHOUT_REPLACEMENT,))
    assert Enumerator(get_verifier("recursive_rejection"), distinct, instance).law_error(2) <= 1e-12


def test_case_l5_block_verification_gains_and_stays_exact() -> None:
    instance = context_free([1 / 3, 2 / 3], [2 / 3, 1 / 3])
    for name, expected in (("token", 10 / 9), ("block", 11 / 9), ("greedy_block", 12 / 9)):
        enumerator = Enumerator(get_verifier(name), DraftTree.chains(1, 2), instance)
        assert enumerator.expected_accepted() == pytest.approx(expected, abs=1e-12)
        assert enumerator.law_error(3) <= 1e-12


def test_case_l6_a_missing_draft_law_counted_as_one_is_noticed() -> None:
    class WithoutLaws(BlockRule):
        """Multiplies the target's probabilities as if every draft had been certain, over the whole vocabulary."""

        def decide(self, choose: Any, proposal: Proposal, target_log_laws: Any, carry: Any) -> Any:
            ones = jnp.zeros_like(proposal.draft_log_laws)
            return super().decide(choose, proposal.replace(draft_log_laws=ones), target_log_laws, carry)

    verifier = Verifier("without_laws", WithoutLaws(), "reads no draft law", lossless=False)
    base = random_instance(3, 2)
    one_hot = Instance("prompt_lookup", 3, base.target, lambda prefix: np.eye(3)[(sum(prefix) + len(prefix)) % 3])
    assert Enumerator(verifier, DraftTree.chains(1, 2), one_hot).law_error(2) > 0.01


def test_case_l6_one_hot_drafts_make_block_and_token_rules_equal() -> None:
    base = random_instance(3, 2)
    one_hot = Instance("prompt_lookup", 3, base.target, lambda prefix: np.eye(3)[(sum(prefix) + len(prefix)) % 3])
    tree = DraftTree.chains(1, 2)
    token, block = (Enumerator(get_verifier(name), tree, one_hot) for name in ("token", "block"))
    assert block.expected_accepted() == pytest.approx(token.expected_accepted(), abs=1e-12)
    first, second = token.first_iteration_law(), block.first_iteration_law()
    assert max(abs(first.get(key, 0) - second.get(key, 0)) for key in {*first, *second}) <= 1e-12
    assert block.law_error(4) <= 1e-12


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_l8_no_key_is_used_twice(name: str) -> None:
    tree = DraftTree.chains(num_drafts_of(name), 1)
    laws = jnp.log(jnp.full((tree.num_nodes, 4), 0.25))
    proposal = Proposal(jnp.zeros(tree.num_nodes, jnp.int32), laws[: len(tree.internal)], jnp.int32(1), tree)
    carry = get_verifier(name).init_carry(tree, 4)
    with jax.debug_key_reuse(True):
        jax.jit(get_verifier(name).verify)(jax.random.key(1), proposal, laws, carry)


def test_case_l8_a_key_shared_with_the_draft_is_caught() -> None:
    laws = jnp.log(jnp.full((2, 4), 0.25))

    def shares_its_key(rng_key: jax.Array) -> Verdict:
        token = jax.random.categorical(rng_key, laws[0]).astype(jnp.int32)
        proposal = Proposal(jnp.stack([jnp.int32(0), token]), laws[:1], jnp.int32(1), DraftTree.chains(1, 1))
        return get_verifier("token").verify(rng_key, proposal, laws, ())

    with jax.debug_key_reuse(True), pytest.raises(jax.errors.KeyReuseError):
        jax.jit(shares_its_key)(jax.random.key(2))


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_l11_temperature_acts_on_the_speculative_path(name: str) -> None:
    # A right rule misses one of the three tokens in all requests with probability 3 (2/3)^300 < 1e-50.
    _, _, first = verify_batch(name, 0, np.eye(3)[0], np.full(3, 1 / 3), max_depth=1)
    assert set(first.tolist()) == {0, 1, 2}


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_l13_the_target_as_its_own_draft_is_accepted_whole(name: str) -> None:
    tree, _ = _batched(name)
    rng = np.random.default_rng(13)
    soft = random_laws(13, name)
    greedy = np.eye(VOCAB)[np.argmax(soft, axis=-1)]
    for laws in (soft, greedy):
        tokens = np.zeros((BATCH, tree.num_nodes), np.int32)
        for node in range(1, tree.num_nodes):
            tokens[:, node] = rng.choice(VOCAB, size=BATCH, p=laws[tree.parent[node]])
        depths = np.arange(BATCH) % LENGTH + 1
        accepted, _, _ = verify_batch(name, tokens, laws[list(tree.internal)], laws, max_depth=depths)
        assert (accepted == depths).all()


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_l15_seeds_decide_at_temperature_one_and_only_there(name: str) -> None:
    tree, _ = _batched(name)
    draft, soft = random_laws(1, name), random_laws(2, name)
    greedy = np.eye(VOCAB)[np.argmax(soft, axis=-1)]
    tokens = np.arange(tree.num_nodes) % VOCAB
    rows = draft[list(tree.internal)]
    accepted, following, _ = verify_batch(name, tokens, rows, greedy)
    assert len({*zip(accepted.tolist(), following.tolist(), strict=True)}) == 1
    accepted, following, _ = verify_batch(name, tokens, rows, soft)
    assert len({*zip(accepted.tolist(), following.tolist(), strict=True)}) > 1
    again, next_again, _ = verify_batch(name, tokens, rows, soft)
    assert (accepted == again).all()
    assert (following == next_again).all()
    # The same seed gives the same row wherever it stands in the batch.
    seeds = np.arange(BATCH)[::-1]
    turned, next_turned, _ = verify_batch(name, tokens, rows, soft, seeds=seeds)
    assert (turned[::-1] == accepted).all()
    assert (next_turned[::-1] == following).all()


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_l18_ties_go_to_the_lowest_index(name: str) -> None:
    logits = jnp.asarray([[[2.0, 2.0, 1.0]]], jnp.float32)
    target = np.exp(np.asarray(to_log_laws(logits, LawParams.greedy(1))[0, 0]))
    for drafted, expected in ((0, 1), (1, 0)):
        accepted, following, first = verify_batch(name, drafted, np.eye(3)[drafted], target, max_depth=1)
        assert (accepted == expected).all()
        # Either way the first token is 0; after the accepted 0 comes the bonus, 0 again.
        assert (first == 0).all()
        assert (following == 0).all()


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_s10_rows_that_are_no_laws_never_give_an_impossible_id(name: str) -> None:
    tree, _ = _batched(name)
    soft = random_laws(10, name)
    tokens = np.arange(tree.num_nodes) % VOCAB
    rows = soft[list(tree.internal)]
    for broken in (np.full(VOCAB, np.nan), np.zeros(VOCAB), np.eye(VOCAB)[3]):
        for depth in (0, 1):
            target = np.where((np.asarray(tree.depth) == depth)[:, None], broken, soft)
            accepted, following, first = verify_batch(name, tokens, rows, target)
            assert ((following >= 0) & (following < VOCAB)).all()
            assert ((accepted >= 0) & (accepted <= LENGTH)).all()
            if broken[3] == 1 and depth == 0:
                # A row with a single finite entry decides.
                assert (first == 3).all()


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_s11_a_masked_token_is_never_accepted(name: str) -> None:
    # The draft always proposes a token that the target excludes, and nothing that the target allows.
    accepted, following, _ = verify_batch(name, 0, np.eye(3)[0], [0.0, 0.25, 0.75])
    assert (accepted == 0).all()
    assert set(following.tolist()) == {1, 2}


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_s11_a_drafted_token_without_draft_probability_divides_by_nothing(name: str) -> None:
    # Token 1 was drafted although its probability under the draft's law is zero, as after an underflow.
    accepted, following, first = verify_batch(name, 1, [0.5, 0.0, 0.5], [0.0, 1.0, 0.0])
    assert (first == 1).all()
    assert (following == 1).all()
    assert ((accepted >= 0) & (accepted <= LENGTH)).all()


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_s11_an_empty_residual_is_never_drawn_from(name: str) -> None:
    # Draft and target agree, so there is no residual; a token that both exclude would be the sign of a draw from one.
    law = [0.2, 0.0, 0.8]
    for token in (0, 2):
        accepted, following, _ = verify_batch(name, token, law, law)
        assert (accepted == LENGTH).all()
        assert set(following.tolist()) == {0, 2}


@pytest.mark.parametrize("name", EVERYDAY)
def test_case_k14_empty_drafts_are_plain_sampling(name: str) -> None:
    target = random_laws(14, name)
    target[0] = 1 / VOCAB
    depths = np.arange(BATCH) % 3
    tree, _ = _batched(name)
    accepted, following, _ = verify_batch(name, 2, target[list(tree.internal)], target, max_depth=depths)
    assert (accepted <= depths).all()
    # A right rule misses one of the six tokens with probability below 6 (5/6)^100 = 7e-8.
    assert set(following[depths == 0].tolist()) == set(range(VOCAB))
