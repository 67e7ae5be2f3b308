"""The engine at work: equality with plain decoding, independence of rows, limits, errors, streaming."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest
from engine_helpers import MAX_DRAFT, VOCAB, engine_of, greedy_text, random_prompts, request

from specjax.decoding import Request, SamplingParams
from specjax.testing.tiny_models import tiny_target


@pytest.mark.parametrize(
    "kind", ["plain", "tabular", pytest.param("greedy_tabular", marks=pytest.mark.slow), "ngram", "self"]
)
def test_greedy_output_equals_recomputation(kind):
    """Draft lengths 0 to 8 side by side in one batch, against decoding without cache or engine."""
    prompts = random_prompts(18)
    lengths = [index % (MAX_DRAFT[kind] + 1) for index in range(len(prompts))]
    requests = [
        request(str(index), prompt, max_new_tokens=20, num_speculative_tokens=length)
        for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    completions = engine_of(kind).generate(requests)
    for prompt, length, completion in zip(prompts, lengths, completions, strict=True):
        assert completion.token_ids == greedy_text(prompt, 20), (prompt, length)
        assert completion.finish_reason == "length"
        assert max(step.num_drafted for step in completion.steps) <= length
        assert sum(step.num_committed for step in completion.steps) == 20
        assert len(completion.token_sources) == 20


@pytest.mark.parametrize("kind", ["tabular", pytest.param("ngram", marks=pytest.mark.slow)])
def test_greedy_output_equals_recomputation_at_batch_one(kind):
    prompts = random_prompts(6, seed=1)
    engine = engine_of(kind, num_slots=1)
    requests = [request(str(index), prompt, max_new_tokens=24) for index, prompt in enumerate(prompts)]
    for prompt, completion in zip(prompts, engine.generate(requests), strict=True):
        assert completion.token_ids == greedy_text(prompt, 24)


@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("draft_length", range(1, 9))
def test_greedy_output_for_each_compiled_draft_length(draft_length, num_slots):
    prompts = random_prompts(12, seed=draft_length)
    requests = [request(str(index), prompt, max_new_tokens=32) for index, prompt in enumerate(prompts)]
    engine = engine_of("tabular", num_slots=num_slots, draft_length=draft_length)
    for prompt, completion in zip(prompts, engine.generate(requests), strict=True):
        assert completion.token_ids == greedy_text(prompt, 32)


def mixed_requests(count: int = 18) -> list[Request]:
    """Different laws, seeds, limits and draft lengths."""
    settings = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 4},
        {},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1, "num_speculative_tokens": 2},
        {"temperature": 1.0, "num_speculative_tokens": 0},
    ]
    prompts = random_prompts(count, seed=5)
    return [
        request(str(i), prompt, seed=100 + i, max_new_tokens=5 + 3 * (i % 5), **settings[i % len(settings)])
        for i, prompt in enumerate(prompts)
    ]


def test_rows_do_not_influence_each_other():
    requests = mixed_requests()
    together = engine_of("tabular").generate(requests)
    engine = engine_of("tabular", num_slots=1)
    alone = [engine.generate([one])[0] for one in requests]
    backwards = engine_of("tabular").generate(requests[::-1])[::-1]
    for a, b, c in zip(together, alone, backwards, strict=True):
        assert a.token_ids == b.token_ids == c.token_ids
        assert a.steps == b.steps == c.steps
        assert a.token_sources == b.token_sources == c.token_sources


def test_case_m4_speculating_plain_and_empty_rows():
    prompts = random_prompts(3, seed=8)
    requests = [
        request("spec a", prompts[0], max_new_tokens=12),
        request("plain", prompts[1], max_new_tokens=12, num_speculative_tokens=0),
        request("spec b", prompts[2], max_new_tokens=12, num_speculative_tokens=3),
    ]
    completions = engine_of("tabular").generate(requests)
    assert [completion.request_id for completion in completions] == ["spec a", "plain", "spec b"]
    for prompt, completion in zip(prompts, completions, strict=True):
        assert completion.token_ids == greedy_text(prompt, 12)
    assert all(step.num_drafted == 0 for step in completions[1].steps)
    assert set(completions[1].token_sources) == {"target"}
    # Rows without a request are no steps: 12 tokens take 12 target calls for the plain row.
    assert len(completions[1].steps) == 12
    assert len(completions[0].steps) <= 12


@pytest.mark.parametrize(
    "settings",
    [{"overlap": True}, {"steps_per_call": 3}, {"steps_per_call": 3, "overlap": True}],
    ids=["overlap", "three steps", "both"],
)
def test_ways_of_running_the_loop_give_the_same_output(settings):
    requests = mixed_requests()
    expected = engine_of("tabular").generate(requests)
    actual = engine_of("tabular", **settings).generate(requests)
    for a, b in zip(expected, actual, strict=True):
        assert (a.token_ids, a.steps, a.finish_reason) == (b.token_ids, b.steps, b.finish_reason)


def test_case_l15_seeds():
    prompt = (3, 1, 4)
    engine = engine_of("tabular")

    def run(seed: int, temperature: float) -> tuple[int, ...]:
        params = {"seed": seed, "temperature": temperature, "max_new_tokens": 20}
        return engine.generate([request("a", prompt, **params)])[0].token_ids

    assert len({run(seed, 0.0) for seed in range(5)}) == 1
    outputs = [run(seed, 1.0) for seed in range(5)]
    assert len(set(outputs)) == 5
    assert [run(seed, 1.0) for seed in range(5)] == outputs


def test_a_seed_is_the_same_in_any_position_of_a_run():
    engine = engine_of("tabular")
    one = request("x", (1, 2, 3), temperature=1.0, seed=7, max_new_tokens=15)
    others = mixed_requests(10)
    first = engine.generate([one, *others])[0]
    last = engine.generate([*others, one])[-1]
    assert first.token_ids == last.token_ids


def test_a_prompt_may_be_fed_in_pieces():
    prompts = [tuple(np.random.default_rng(i).integers(0, VOCAB, 40).tolist()) for i in range(3)]
    requests = [request(str(i), prompt, max_new_tokens=8) for i, prompt in enumerate(prompts)]
    whole = engine_of("self").generate(requests)
    pieces = engine_of("self", prefill_chunk=7).generate(requests)
    for prompt, a, b in zip(prompts, whole, pieces, strict=True):
        assert a.token_ids == b.token_ids == greedy_text(prompt, 8)
        assert a.steps == b.steps


def test_nothing_is_compiled_again():
    engine = engine_of("tabular")
    engine.generate(mixed_requests())
    count = engine.compile_count
    engine.generate([request(str(i), p, temperature=0.5) for i, p in enumerate(random_prompts(20, seed=77))])
    other = engine_of("tabular")
    other.generate(mixed_requests(4))
    assert engine.compile_count == other.compile_count == count


def test_draft_lengths_and_numbers_of_drafts_share_the_prefill():
    first, second = engine_of("self", draft_length=2), engine_of("self", draft_length=3)
    requests = [request(str(i), prompt, max_new_tokens=6) for i, prompt in enumerate(random_prompts(4))]
    expected = first.generate(requests)
    counts = dict(first._program.prompts.trace_counts)
    completions = second.generate(requests)
    assert second._program is not first._program
    assert dict(second._program.prompts.trace_counts) == counts
    assert counts["start"] >= 1
    assert [c.token_ids for c in completions] == [c.token_ids for c in expected]


def test_streams_carry_what_completions_say():
    requests = mixed_requests()
    tokens: dict[str, list[int]] = {one.id: [] for one in requests}
    sources: dict[str, list[str]] = {one.id: [] for one in requests}
    completions = {}
    for event in engine_of("tabular").stream(requests):
        assert event.request_id not in completions
        tokens[event.request_id] += event.token_ids
        sources[event.request_id] += event.token_sources
        if event.completion is not None:
            completions[event.request_id] = event.completion
    for one in requests:
        assert tuple(tokens[one.id]) == completions[one.id].token_ids
        assert tuple(sources[one.id]) == completions[one.id].token_sources


def test_on_tokens_sees_all_tokens():
    seen: dict[str, list[int]] = {}
    requests = mixed_requests(5)
    completions = engine_of("tabular").generate(
        requests, on_tokens=lambda name, tokens, text: seen.setdefault(name, []).extend(tokens)
    )
    assert {completion.request_id: list(completion.token_ids) for completion in completions} == seen


def test_an_abandoned_stream_leaves_a_usable_engine():
    engine = engine_of("tabular")
    requests = mixed_requests()
    expected = engine.generate(requests)
    next(engine.stream(requests))
    again = engine.generate(requests)
    assert [a.token_ids for a in expected] == [b.token_ids for b in again]


def test_a_failing_callback_leaves_a_usable_engine():
    engine = engine_of("tabular")
    requests = mixed_requests(4)
    expected = engine.generate(requests)

    def fail(name: str, tokens: list[int], text: str) -> None:
        raise KeyError(name)

    with pytest.raises(KeyError):
        engine.generate(requests, on_tokens=fail)
    assert [a.token_ids for a in engine.generate(requests)] == [b.token_ids for b in expected]


def test_sources_tell_where_tokens_come_from():
    completions = engine_of("tabular").generate(mixed_requests())
    for completion in completions:
        place = 0
        for step in completion.steps:
            sources = completion.token_sources[place : place + step.num_committed]
            place += step.num_committed
            assert sources[: step.num_accepted] == ("accepted",) * step.num_accepted
            if step.num_drafted == 0:
                assert sources == ("target",)
            elif step.num_committed > step.num_accepted:
                expected = "bonus" if step.num_accepted == step.num_drafted else "recovered"
                assert sources[-1] == expected
        assert place == len(completion.token_ids)
    seen = {source for completion in completions for source in completion.token_sources}
    assert seen == {"accepted", "recovered", "bonus", "target"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request("bad", ()), "`prompt_ids` must have at least one token; got none"),
        (Request("bad", (1, VOCAB)), "`prompt_ids` must be in [0, 13), the target's vocabulary; got 13"),
        (Request("bad", (1, -1)), "`prompt_ids` must be in [0, 13), the target's vocabulary; got -1"),
        (Request("bad", (1,) * 49), "`prompt_ids` must fit into the context of 48 tokens; got 49"),
        (
            Request("bad", (1,), SamplingParams(num_speculative_tokens=9)),
            "`num_speculative_tokens` must be at most the engine's draft length 8; got 9",
        ),
        (
            Request("bad", (1,), SamplingParams(stop_token_ids=(13,))),
            "`stop_token_ids` must be in [0, 13), the target's vocabulary; got 13",
        ),
        (
            Request("bad", (1,), SamplingParams(stop_token_ids=tuple(range(1, 9)))),
            "`stop_token_ids` and the model's own must be at most 8; got 9",
        ),
        (
            Request("bad", (1,), SamplingParams(stop_strings=("a",))),
            "`stop_strings` must be empty for a target without a tokenizer",
        ),
    ],
)
def test_a_request_that_cannot_be_served_fails_alone(bad, message):
    good = [request("a", (1, 2), max_new_tokens=6), request("b", (3,), max_new_tokens=6)]
    first, failed, second = engine_of("tabular").generate([good[0], bad, good[1]])
    assert failed.finish_reason == f"error: {message}"
    assert failed.failed
    assert failed.token_ids == ()
    assert first.token_ids == greedy_text((1, 2), 6)
    assert second.token_ids == greedy_text((3,), 6)


def test_equal_ids_are_refused():
    with pytest.raises(ValueError, match=re.escape("`id` of requests must be unique; got 'a' twice")):
        engine_of("tabular").generate([request("a", (1,)), request("a", (2,))])


def test_no_requests_give_no_completions():
    assert engine_of("tabular").generate([]) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_slots": 0}, "`num_slots` must be an integer of at least 1; got 0"),
        ({"cache_length": 0}, "`cache_length` must be an integer of at least 1; got 0"),
        ({"cache_length": 65}, "`cache_length` must be at most the target's context of 64 tokens; got 65"),
        ({"draft_length": -1}, "`draft_length` must be an integer of at least 0; got -1"),
        ({"draft_length": 48}, "`draft_length` must be below `cache_length` (48); got 48"),
        ({"draft_length": 100000}, "`draft_length` must be below `cache_length` (48); got 100000"),
        ({"num_drafts": 0}, "`num_drafts` must be an integer of at least 1; got 0"),
        ({"num_drafts": 2}, "`verifier` 'token' uses one chain of drafts"),
        ({"verifier": "unheard_of"}, "`verifier` must be one of"),
    ],
)
def test_bad_engine_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        engine_of("tabular", **settings)


def test_a_deterministic_drafter_has_one_draft():
    with pytest.raises(ValueError, match="`num_drafts` must be 1 for the deterministic drafter 'ngram'"):
        engine_of("ngram", num_drafts=2, verifier="token")


def test_two_targets_of_one_shape_share_programs_but_not_parameters():
    other = tiny_target(jax.random.key(9), vocab_size=VOCAB, eos_token_ids=(0,))
    ours = engine_of("tabular").generate([request("a", (1, 2), max_new_tokens=10)])[0]
    theirs = engine_of("tabular", target=other).generate([request("a", (1, 2), max_new_tokens=10)])[0]
    assert ours.token_ids == greedy_text((1, 2), 10)
    assert theirs.token_ids == greedy_text((1, 2), 10, other.params)
    assert ours.token_ids != theirs.token_ids


def test_statistics_add_up():
    engine = engine_of("tabular")
    completions = engine.generate(mixed_requests())
    run = engine.last_run
    assert run.num_calls >= max(len(completion.steps) for completion in completions)
    assert min(run.prefill_seconds, run.step_seconds, run.host_seconds) > 0
    for completion in completions:
        assert 0 < completion.prefill_seconds < completion.seconds
