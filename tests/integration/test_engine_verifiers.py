"""Every rule on the engine, with a language model that drafts one or three chains: exact output, separate carries."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verifier_grid import assert_rules_equal_plain_decoding, engines_of, plain_answers, requests_of, rules_for

from eval.divergence import next_logits
from specjax.decoding import Engine, Request, SamplingParams
from specjax.decoding import state as state_lib
from specjax.drafters.language_model import LanguageModelDrafter
from specjax.testing.tiny_models import TinyTarget, tiny_target

VOCAB = 13
CACHE = 48
NUM_TOKENS = 20
GREEDY = {"max_new_tokens": NUM_TOKENS}
# Every test in the normal selection runs on these sizes, so that one step is compiled for each K. Requests choose their
# draft length; the drafter of `self_params` is of the same shape as the other one.
SIZES = {"draft_length": 7, "num_slots": 8, "cache_length": CACHE}


@functools.cache
def target() -> TinyTarget:
    return tiny_target(jax.random.key(0), vocab_size=VOCAB, num_layers=3)


def drafter() -> tuple[LanguageModelDrafter, dict]:
    """The target with its middle layer silenced: drafts that are often right and often wrong."""
    layers = list(target().params["layers"])
    layers[1] = layers[1] | {name: jnp.zeros_like(layers[1][name]) for name in ("o_proj", "down_proj")}
    return LanguageModelDrafter(target().config), target().params | {"layers": layers}


def self_drafter() -> tuple[LanguageModelDrafter, dict]:
    """The target itself."""
    return LanguageModelDrafter(target().config), target().params


@functools.cache
def prompts() -> list[tuple[int, ...]]:
    generator = np.random.default_rng(1)
    return [tuple(generator.integers(0, VOCAB, size).tolist()) for size in (1, 4, 9, 16)]


@functools.cache
def plain() -> list[tuple[int, ...]]:
    return plain_answers(target(), prompts(), cache_length=CACHE, **GREEDY)


def compare(num_drafts: int, lengths: tuple[int | None, ...] = (None,), **sizes: int) -> dict:
    sizes = {"num_drafts": num_drafts, **SIZES, **sizes}
    return assert_rules_equal_plain_decoding(
        target(), drafter(), prompts(), plain(), sizes=sizes, lengths=lengths, **GREEDY
    )


def test_all_registered_rules_are_here():
    assert {"token", "spectr", "block", "greedy_block", "multi_draft_block", "spectr_gbv"} <= set(rules_for(1))
    assert set(rules_for(3)) == set(rules_for(1)) - {"token", "block", "greedy_block"}


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_greedy_output_equals_plain_decoding(num_drafts):
    """Draft lengths 1, 4 and 7 side by side in one batch of eight."""
    answers = compare(num_drafts, (1, 4, 7))
    for rule, completions in answers.items():
        assert {max(step.num_drafted for step in c.steps) for c in completions} == {1, 4, 7}, rule
        # Rules that only ever rejected would be exact as well.
        assert sum(step.num_accepted for c in completions for step in c.steps) > 0, rule
        assert any(step.num_accepted < step.num_drafted for c in completions for step in c.steps), rule


def test_greedy_output_equals_plain_decoding_at_batch_one():
    sizes = {"num_drafts": 3, "draft_length": 4, "num_slots": 1, "cache_length": CACHE}
    engine = Engine(target(), *drafter(), verifier="spectr_gbv", **sizes)
    completions = engine.generate(requests_of(prompts(), (None,), **GREEDY))
    assert [completion.token_ids for completion in completions] == plain()


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("draft_length", [1, 4, 7])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_greedy_output_for_each_compiled_size(num_drafts, draft_length, num_slots):
    compare(num_drafts, draft_length=draft_length, num_slots=num_slots)


# --- carries --------------------------------------------------------------------------------------------------------

CARRIES = [("greedy_block", 1), ("spectr_gbv", 1), ("spectr_gbv", 3)]


def carry_engine(verifier: str, num_drafts: int) -> Engine:
    return dict(engines_of(target(), drafter(), num_drafts=num_drafts, **SIZES))[verifier]


def sampled_requests(count: int = 24) -> list[Request]:
    """Three times as many as there are slots; stop tokens end them inside of blocks, while carries are alive."""
    params = {"temperature": 1.0, "max_new_tokens": NUM_TOKENS, "stop_token_ids": (3, 5, 8, 12)}
    return [Request(str(n), prompts()[n % 4], SamplingParams(seed=n, **params)) for n in range(count)]


def tokens_of(engine: Engine, requests: list[Request]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in engine.generate(requests)]


@functools.cache
def answers_alone(verifier: str, num_drafts: int) -> list[tuple[int, ...]]:
    """Each request in an engine that never served another one."""
    return [tokens_of(carry_engine(verifier, num_drafts), [request])[0] for request in sampled_requests()]


@pytest.mark.parametrize(("verifier", "num_drafts"), CARRIES)
def test_a_refilled_slot_starts_without_a_carry(verifier, num_drafts):
    engine = carry_engine(verifier, num_drafts)
    together = tokens_of(engine, sampled_requests())
    assert together == answers_alone(verifier, num_drafts)
    # The next run takes over the engine's state, whatever was left in it.
    assert tokens_of(engine, sampled_requests()) == together


@pytest.mark.parametrize(("verifier", "num_drafts"), CARRIES)
def test_an_inherited_carry_would_be_noticed(verifier, num_drafts, monkeypatch):
    """The same requests in an engine whose refill forgets the carry: the test above would fail."""

    def insert_without_carry(state, row, slot):
        row = row.replace(carry=jax.tree.map(lambda leaf: leaf[:1], state.carry))
        return state_lib.insert_row(state, row, slot).replace(carry=state.carry)

    engine = carry_engine(verifier, num_drafts)
    monkeypatch.setattr(engine._program, "insert", jax.jit(insert_without_carry))
    assert tokens_of(engine, sampled_requests()) != answers_alone(verifier, num_drafts)


@pytest.mark.parametrize(("verifier", "num_drafts"), CARRIES)
def test_neighbours_do_not_move_a_rows_carry(verifier, num_drafts):
    """Other rows stop, accept and carry at other positions; the order of requests does not matter either."""
    backwards = tokens_of(carry_engine(verifier, num_drafts), sampled_requests()[::-1])[::-1]
    assert backwards == answers_alone(verifier, num_drafts)


# --- cases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_case_k13_exact_counts_for_every_rule(num_drafts):
    """Full acceptance with one place left, and blocks that reach behind the last place."""
    requests = [Request(str(n), prompts()[1], SamplingParams(max_new_tokens=n)) for n in (0, 1, 2, 3, 7, 8)]
    for rule, engine in engines_of(target(), drafter(), num_drafts=num_drafts, **SIZES):
        for request, completion in zip(requests, engine.generate(requests), strict=True):
            assert completion.token_ids == plain()[1][: request.params.max_new_tokens], rule
            assert completion.finish_reason == "length"


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_case_k14_rows_without_drafts_beside_rows_with_drafts(num_drafts):
    for completions in compare(num_drafts, (0, 7)).values():
        assert all(step.num_drafted == 0 for c in completions[:4] for step in c.steps)
        assert any(step.num_drafted == 7 for c in completions[4:] for step in c.steps)


@pytest.mark.parametrize("num_drafts", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_l13_the_target_as_its_own_drafter_accepts_all(num_drafts, temperature):
    """Whatever the rule; of several drafts one is kept whole."""
    requests = [
        Request(str(n), prompt, SamplingParams(temperature=temperature, seed=n, max_new_tokens=24))
        for n, prompt in enumerate(prompts())
    ]
    for rule, engine in engines_of(target(), self_drafter(), num_drafts=num_drafts, **SIZES):
        for completion in engine.generate(requests):
            assert [(s.num_accepted, s.num_committed) for s in completion.steps] == [(7, 8)] * 3, rule


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_case_s1_s2_the_end_inside_a_block_stops_every_rule(num_drafts):
    """The third greedy token is declared the end; nothing behind it is emitted or counted."""
    place = next(n for n, tokens in enumerate(plain()) if len(set(tokens[:3])) == 3)
    expected = plain()[place][:3]
    params = SamplingParams(max_new_tokens=NUM_TOKENS, stop_token_ids=expected[2:])
    for rule, engine in engines_of(target(), self_drafter(), num_drafts=num_drafts, **SIZES):
        completion = engine.generate([Request("a", prompts()[place], params)])[0]
        assert completion.token_ids == expected, rule
        assert completion.finish_reason == "stop"
        assert [(s.num_drafted, s.num_accepted, s.num_committed) for s in completion.steps] == [(3, 3, 3)]


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_case_l15_seeds_decide_for_every_rule(num_drafts):
    def run(engine: Engine, temperature: float, seed: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=12)
        return tokens_of(engine, [Request("a", prompts()[2], params)])[0]

    for rule, engine in engines_of(target(), drafter(), num_drafts=num_drafts, **SIZES):
        assert {run(engine, 0.0, seed) for seed in range(3)} == {plain()[2][:12]}, rule
        first, second, again = (run(engine, 1.0, seed) for seed in (0, 1, 0))
        assert first == again != second, rule


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_case_s8_s11_truncation_binds_every_rule(num_drafts):
    """At top_k = 1 sampling is greedy; at top_k = 2 no third token appears, though untruncated drafts would hold it."""
    requests = [
        Request(f"{top_k} {seed}", prompts()[1], SamplingParams(1.5, top_k=top_k, seed=seed, max_new_tokens=12))
        for top_k in (1, 2, VOCAB + 1)
        for seed in range(4)
    ]
    best_two = functools.cache(lambda text: set(np.argsort(-next_logits(target(), text), kind="stable")[:2].tolist()))
    for rule, engine in engines_of(target(), drafter(), num_drafts=num_drafts, **SIZES):
        for request, tokens in zip(requests, tokens_of(engine, requests), strict=True):
            if request.params.top_k == 1:
                assert tokens == plain()[1][:12], rule
            if request.params.top_k == 2:
                for place, token in enumerate(tokens):
                    assert token in best_two((*request.prompt_ids, *tokens[:place])), rule
