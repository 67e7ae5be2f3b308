"""Faults that users of decoding engines reported, each as a small case."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_helpers import (
    CONFIG,
    EOS,
    MAX_DRAFT,
    SLOTS,
    VOCAB,
    engine_of,
    greedy_text,
    random_prompts,
    request,
    run_text,
    target,
    text_logits,
)

from specjax.decoding import Engine, SamplingParams
from specjax.decoding.scheduler import RunningRequest
from specjax.drafters.language_model import LanguageModelDrafter
from specjax.metrics import summarise
from specjax.models import compute_logits, forward
from specjax.testing.tiny_models import TabularDrafter, tiny_target
from specjax.testing.tiny_tokenizer import pieces_tokenizer

PROMPT = (5, 1, 7)


def with_params(**leaves) -> object:
    """The shared target with some parameters replaced."""
    return dataclasses.replace(target(), params=target().params | leaves)


def constant_target(logits) -> object:
    """A target with the same logits after every text: equal embeddings, layers without effect."""
    params = jax.tree.map(jnp.zeros_like, target().params)
    width = CONFIG.hidden_size
    # The final norm of a vector of ones is ones again (up to the epsilon of the norm).
    head = jnp.zeros((width, VOCAB), jnp.float32).at[0].set(jnp.asarray(logits, jnp.float32))
    params |= {
        "embed_tokens": jnp.ones((VOCAB, width), jnp.float32),
        "final_norm": jnp.ones(width, jnp.float32),
        "lm_head": head,
    }
    return dataclasses.replace(target(), params=params)


def always_proposes(token: int) -> dict:
    return {"logits": jnp.full((VOCAB, VOCAB), -5.0, jnp.float32).at[:, token].set(5.0)}


# --- stopping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft_length", "source"), [(5, "accepted"), (2, "bonus"), (0, "target")])
@pytest.mark.parametrize("extra", [(), (11, 12)], ids=["one id", "three ids"])
def test_case_s1_eos_inside_a_block_stops(draft_length, source, extra):
    """Every draft is accepted (the draft model is the target); the third token is declared the end."""
    prompt, tokens = prompt_with_distinct_start(3, avoid=(11, 12))
    params = {"stop_token_ids": (tokens[2], *extra), "num_speculative_tokens": draft_length}
    engine = engine_of("self")
    streamed = []
    for event in engine.stream([request("a", prompt, **params)]):
        streamed += event.token_ids
        completion = event.completion
    assert completion is not None
    assert completion.token_ids == tokens[:3] == tuple(streamed)
    assert completion.finish_reason == "stop"
    assert completion.token_sources[-1] == source
    assert sum(step.num_committed for step in completion.steps) == 3


def test_case_s1_the_models_own_eos_stops_unless_ignored():
    prompt = next(p for p in random_prompts(300, seed=3) if EOS in greedy_text(p, 12)[1:])
    tokens = greedy_text(prompt, 12)
    end = tokens.index(EOS) + 1
    engine = engine_of("self")
    stopped, ignored = engine.generate(
        [
            request("a", prompt, max_new_tokens=12, ignore_eos=False),
            request("b", prompt, max_new_tokens=12, ignore_eos=True),
        ]
    )
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[:end], "stop")
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")


def test_case_s2_tokens_after_eos_count_nowhere():
    prompt, tokens = prompt_with_distinct_start(3)
    completion = engine_of("self").generate([request("a", prompt, stop_token_ids=(tokens[2],))])[0]
    summary = summarise([completion])
    assert summary.counts.acceptance_length == 3.0
    assert summary.counts.num_accepted == summary.counts.num_drafted == 3


def prompt_with_distinct_start(count: int, avoid: tuple[int, ...] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A prompt whose first greedy tokens differ from each other, and those tokens with a few more."""
    for prompt in random_prompts(200, seed=4):
        tokens = greedy_text(prompt, 8)
        if len(set(tokens[:count])) == count and not set(tokens[:count]) & set(avoid):
            return prompt, tokens
    raise AssertionError("no prompt found")


def text_target(first: str, second: str) -> tuple[object, tuple[int, ...], tuple[int, ...]]:
    """A target with a tokenizer in which the third and fourth greedy tokens of a prompt spell two given pieces."""
    for prompt in random_prompts(300, seed=6):
        tokens = greedy_text(prompt, 8)
        if min(tokens[:4]) >= 3 and len(set(tokens[:4])) == 4:
            break
    else:
        raise AssertionError("no prompt found")
    spelling = dict(zip(range(3, VOCAB), "cdefghijkl", strict=True)) | {tokens[2]: first, tokens[3]: second}
    tokenizer = pieces_tokenizer([spelling[token] for token in range(3, VOCAB)])
    return dataclasses.replace(target(), tokenizer=tokenizer), prompt, tokens


@pytest.mark.parametrize("draft_length", [0, 1, 3, 5])
@pytest.mark.parametrize("overlap", [False, True])
def test_case_s4_stop_string_across_tokens_of_one_block(draft_length, overlap):
    spoken, prompt, tokens = text_target("xa", "bz")
    engine = engine_of("self", target=spoken, overlap=overlap)
    params = {"stop_strings": ("ab",), "num_speculative_tokens": draft_length, "max_new_tokens": 20}
    pieces = []
    completion = engine.generate(
        [request("a", prompt, **params)], on_tokens=lambda name, new, text: pieces.append((new, text))
    )[0]
    assert completion.finish_reason == "stop"
    # As when decoding one token at a time: the ids end with the token that completed the string ...
    assert completion.token_ids == tokens[:4]
    # ... and the text ends before it.
    assert completion.text == spoken.tokenizer.decode(tokens[:2]) + "x"
    assert "".join(text for _, text in pieces) == completion.text
    assert [token for new, _ in pieces for token in new] == list(completion.token_ids)
    # What was discarded is in no count.
    assert sum(step.num_committed for step in completion.steps) == len(completion.token_sources) == 4
    assert sum(step.num_accepted for step in completion.steps) <= 4


def test_case_s4_what_follows_in_the_slot_is_not_disturbed():
    spoken, prompt, tokens = text_target("xa", "bz")
    engine = engine_of("self", target=spoken)
    stopping = [request(f"stop {n}", prompt, stop_strings=("ab",), max_new_tokens=20) for n in range(SLOTS)]
    following = [request(f"go {n}", PROMPT, temperature=1.0, seed=n, max_new_tokens=10) for n in range(SLOTS)]
    completions = engine.generate(stopping + following)
    alone = engine.generate(following)
    assert {completion.token_ids for completion in completions[:SLOTS]} == {tokens[:4]}
    assert [a.token_ids for a in completions[SLOTS:]] == [b.token_ids for b in alone]


def test_text_is_that_of_the_tokenizer():
    spoken, prompt, tokens = text_target("xa", "bz")
    completion = engine_of("self", target=spoken).generate([request("a", prompt, max_new_tokens=8)])[0]
    assert completion.token_ids == tokens[:8]
    assert completion.text == spoken.tokenizer.decode(tokens[:8])


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_length", [5, 1, 0])
def test_case_k7_context_end(draft_length):
    """Context 16, draft length 5: the last tokens are exact, and a prompt that is too long fails alone."""
    engine = engine_of("tabular", cache_length=16, draft_length=5, num_slots=4)
    prompts = [(n, 3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3) for n in range(7)]
    lengths = [13, 15, 16, 17, 10, 1, 14]
    requests = [
        request(str(length), prompt[:length], max_new_tokens=10, num_speculative_tokens=draft_length)
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    completions = dict(zip(lengths, engine.generate(requests), strict=True))
    for one in requests:
        length = len(one.prompt_ids)
        completion = completions[length]
        if length == 17:
            assert completion.finish_reason == "error: `prompt_ids` must fit into the context of 16 tokens; got 17"
            continue
        count = min(10, 16 - length)
        assert completion.token_ids == greedy_text(one.prompt_ids, count)
        assert completion.finish_reason == ("length" if count == 10 else "context")
    assert len(completions[13].token_ids) == 3
    assert len(completions[15].token_ids) == 1
    assert completions[16].steps == ()


def test_case_k7_nothing_is_written_outside_the_context():
    """The neighbours' caches and every committed slot are what a fresh run gives, up to the last position."""
    engine = engine_of("tabular", cache_length=16, draft_length=5, num_slots=4)
    requests = [request(str(n), (n + 1,) * 9, temperature=1.0, seed=n, max_new_tokens=100) for n in range(4)]
    completions = engine.generate(requests)
    for slot, completion in enumerate(completions):
        text = completion.prompt_ids + completion.token_ids
        assert len(text) == 16
        assert completion.finish_reason == "context"
        for mine, fresh in zip(jax.tree.leaves(engine._state.cache), run_text(text)[1], strict=True):
            np.testing.assert_allclose(mine[slot, :, :15], fresh[:, :15], atol=1e-5)


def test_case_k8_a_draft_model_with_a_shorter_context_is_refused():
    short = dataclasses.replace(CONFIG, max_position_embeddings=8)
    message = r"`max_position_embeddings` of the drafter must cover the longest text \(32 tokens\); got 8"
    with pytest.raises(ValueError, match=message):
        Engine(target(), LanguageModelDrafter(short), target().params, cache_length=32)
    Engine(target(), LanguageModelDrafter(short), target().params, cache_length=8)


@pytest.mark.parametrize("kind", ["tabular", "self", "ngram"])
def test_case_k13_exact_counts(kind):
    longest = MAX_DRAFT[kind]
    counts = [0, 1, 2, longest, longest + 1]
    requests = [request(str(count), PROMPT, max_new_tokens=count) for count in counts]
    engine = engine_of(kind)
    for count, completion in zip(counts, engine.generate(requests), strict=True):
        assert completion.token_ids == greedy_text(PROMPT, count)
        assert completion.finish_reason == "length"
    assert engine.generate(requests[:1])[0].token_ids == ()
    assert engine.last_run.num_calls == 0
    assert engine.last_run.prefill_seconds == 0
    with pytest.raises(ValueError, match="`max_new_tokens` must be at least 0; got -1"):
        SamplingParams(max_new_tokens=-1)


@pytest.mark.parametrize("lengths", [(0, 0, 0), (0, 3, 1), (1, 1, 1)])
def test_case_k14_empty_and_short_drafts(lengths):
    prompts = [(1, 2, 3, 4, 6), (1, 2, 1, 2, 1, 2), (7, 7, 7)]
    requests = [
        request(str(n), prompt, max_new_tokens=15, num_speculative_tokens=length)
        for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    for prompt, completion in zip(prompts, engine_of("ngram").generate(requests), strict=True):
        assert completion.token_ids == greedy_text(prompt, 15)


def test_case_k14_nothing_found_is_a_plain_step():
    tokens = greedy_text((1, 2, 3), 3)
    prompt = next(p for p in random_prompts(100, seed=9) if len({*p, greedy_text(p, 1)[0]}) == len(p) + 1)
    completion = engine_of("ngram").generate([request("a", prompt, max_new_tokens=1)])[0]
    assert completion.token_sources == ("target",)
    assert [(s.num_drafted, s.num_accepted, s.num_committed) for s in completion.steps] == [(0, 0, 1)]
    assert len(tokens) == 3


# --- caches and positions -------------------------------------------------------------------------------------------


def states_of(engine: Engine, one, num_steps: int):
    """The engine's state after the prefill and after each of some steps, and the text committed by then."""
    program, params = engine._program, (engine._target.params, engine._drafter_params)
    running = RunningRequest(one, None)
    state = engine._fill(program.empty(SLOTS, jnp.float32), 0, running)
    text = list(one.prompt_ids)
    yield jax.tree.map(jnp.copy, state), tuple(text)
    for _ in range(num_steps):
        state, outputs = program.step(*params, state)
        row = np.asarray(outputs)[0, 0].tolist()
        text += row[: row[engine.tree.max_depth + 1]]
        yield jax.tree.map(jnp.copy, state), tuple(text)


@jax.jit
def next_draft_logits(params, drafter_state):
    """What the drafter would draft from next, for the first row."""
    pending, cache, length = drafter_state.pending, drafter_state.cache, drafter_state.length
    output = forward(params, CONFIG, pending[:, None], cache, length)
    return compute_logits(params, CONFIG, output.hidden)[0, 0]


@pytest.fixture(scope="module")
def other_model() -> dict:
    """A draft model that is not the target: acceptance varies."""
    return tiny_target(jax.random.key(21), vocab_size=VOCAB, sharpness=1.0, eos_token_ids=(EOS,)).params


@pytest.mark.parametrize("prompt", [(4,), (4, 4, 2, 8, 1, 0, 3)], ids=["one token", "seven tokens"])
def test_case_k1_k2_drafter_state_is_that_of_a_fresh_run(prompt, other_model):
    """After every acceptance pattern: contiguous positions, no missing bonus token, equal draft logits."""
    engine = engine_of("self", drafter_params=other_model)
    patterns = set()
    for seed in range(4):
        one = request("a", prompt, temperature=1.3, seed=seed, max_new_tokens=40)
        before = len(prompt)
        for state, text in states_of(engine, one, 6):
            patterns.add(len(text) - before)
            before = len(text)
            drafter_state = state.drafter_state
            assert int(state.length[0]) == int(drafter_state.length[0]) == len(text) - 1
            assert int(state.last_token[0]) == int(drafter_state.pending[0]) == text[-1]
            # Keys are rotated by their positions, so equal keys are equal positions.
            logits, rows = run_text(text, other_model)
            for mine, fresh in zip(jax.tree.leaves(drafter_state.cache), rows, strict=True):
                np.testing.assert_allclose(mine[0, :, : len(text) - 1], fresh[:, :-1], atol=1e-5)
            np.testing.assert_allclose(next_draft_logits(other_model, drafter_state), logits[-1], atol=1e-4)
    assert {0, 1, 2, 3} <= patterns


def test_case_k2_target_cache_is_that_of_a_fresh_run():
    engine = engine_of("tabular")
    for seed in range(3):
        for state, text in states_of(engine, request("a", PROMPT, temperature=1.0, seed=seed), 6):
            length = len(text) - 1
            assert int(state.length[0]) == length
            for mine, fresh in zip(jax.tree.leaves(state.cache), run_text(text)[1], strict=True):
                np.testing.assert_allclose(mine[0, :, :length], fresh[:, :length], atol=1e-5)


# --- laws and losslessness ------------------------------------------------------------------------------------------


def test_case_l11_the_temperature_acts_on_the_speculative_path():
    flat = constant_target(np.where(np.arange(VOCAB) < 3, 2.0, -2.0))
    engine = engine_of("tabular", target=flat, drafter_params=always_proposes(1))
    requests = [
        request(str(seed), PROMPT, temperature=1.0, top_k=3, seed=seed, max_new_tokens=1, num_speculative_tokens=0)
        for seed in range(40)
    ] + [request(str(seed), PROMPT, temperature=1.0, top_k=3, seed=seed, max_new_tokens=3) for seed in range(40, 300)]
    completions = engine.generate(requests)
    assert {token for completion in completions for token in completion.token_ids} == {0, 1, 2}
    firsts = np.bincount([completion.token_ids[0] for completion in completions[40:]], minlength=3)
    # Uniform over three: 260 draws give 87 each; 50 is 4.8 sigma away.
    assert firsts.min() > 50


@pytest.mark.parametrize("draft_length", range(1, 6))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_l13_the_target_as_its_own_drafter_accepts_all(draft_length, temperature):
    count = 3 * (draft_length + 1)
    requests = [
        request(
            str(n), prompt, temperature=temperature, seed=n, max_new_tokens=count, num_speculative_tokens=draft_length
        )
        for n, prompt in enumerate(random_prompts(8, seed=12))
    ]
    for completion in engine_of("self").generate(requests):
        assert [(s.num_drafted, s.num_accepted, s.num_committed) for s in completion.steps] == [
            (draft_length, draft_length, draft_length + 1)
        ] * 3


@pytest.mark.parametrize(("proposed", "accepted"), [(0, True), (1, False)])
def test_case_l18_exact_ties_emit_the_lowest_index(proposed, accepted):
    tied = constant_target([2.0, 2.0] + [1.0] * (VOCAB - 2))
    logits = text_logits(PROMPT, tied.params)
    assert (logits[:, 0] == logits[:, 1]).all()
    engine = engine_of("tabular", target=tied, drafter_params=always_proposes(proposed))
    completion = engine.generate([request("a", PROMPT, max_new_tokens=9)])[0]
    assert completion.token_ids == (0,) * 9
    assert {step.num_accepted == step.num_drafted for step in completion.steps if step.num_drafted} == {accepted}


def test_case_s8_top_k_of_one_is_greedy():
    requests = [
        request(str(n), PROMPT, temperature=1.5, top_k=top_k, seed=n, max_new_tokens=12)
        for n, top_k in enumerate([1, 0, VOCAB, VOCAB + 1, 10**6])
    ]
    first, *others = engine_of("tabular").generate(requests)
    assert first.token_ids == greedy_text(PROMPT, 12)
    same_seed = [
        request(str(top_k), PROMPT, temperature=1.5, top_k=top_k, seed=4, max_new_tokens=12)
        for top_k in (0, VOCAB, VOCAB + 1, 10**6)
    ]
    assert len({completion.token_ids for completion in engine_of("tabular").generate(same_seed)}) == 1
    assert not any(completion.failed for completion in others)


def test_case_s10_a_row_without_finite_logits_fails_alone():
    """Feeding token 9 gives NaN: rows that meet it end with an error, and keep what came before."""
    broken = with_params(embed_tokens=target().params["embed_tokens"].at[9].set(jnp.nan))
    clean = next(p for p in random_prompts(200, seed=2) if 9 not in p and 9 not in greedy_text(p, 10)[:-1])
    meets = next(p for p in random_prompts(500, seed=3) if 9 not in p and 9 in greedy_text(p, 8)[1:7])
    for temperature in (0.0, 1.0):
        requests = [
            request("in prompt", (1, 9, 2), temperature=temperature),
            request("clean", clean, max_new_tokens=10),
            request("meets", meets, max_new_tokens=30),
        ]
        prompt, unharmed, met = engine_of("tabular", target=broken).generate(requests)
        assert prompt.finish_reason == "error: the target's logits are not finite"
        assert prompt.token_ids == ()
        assert unharmed.token_ids == greedy_text(clean, 10)
        assert met.failed
        tokens = greedy_text(meets, 8)
        assert met.token_ids == tokens[: tokens.index(9) + 1]
        assert all(step.num_committed > 0 for step in met.steps)


@pytest.mark.parametrize("batch", range(1, 9))
def test_case_l16_float32_is_exact_for_every_width_and_batch(batch):
    """Blocks of 1 to 9 tokens, one to eight rows at work: widths change the kernels, never the text."""
    prompts = random_prompts(batch, seed=40 + batch)
    requests = [
        request(f"{n} {length}", prompt, max_new_tokens=12, num_speculative_tokens=length)
        for length in range(9)
        for n, prompt in enumerate(prompts)
    ]
    engine = engine_of("tabular")
    for length in range(9):
        alike = [one for one in requests if one.params.num_speculative_tokens == length]
        for one, completion in zip(alike, engine.generate(alike), strict=True):
            assert completion.token_ids == greedy_text(one.prompt_ids, 12), one.id


@pytest.mark.slow
@pytest.mark.parametrize("draft_length", [2, 8])
def test_case_l16_bfloat16_differs_only_at_near_ties(draft_length):
    """In bfloat16 the width of a block may flip an argmax, but only where the two best logits are close."""
    half = tiny_target(jax.random.key(0), vocab_size=VOCAB, eos_token_ids=(EOS,), dtype=jnp.bfloat16)
    prompts = random_prompts(16, seed=1)
    requests = [request(str(n), prompt, max_new_tokens=24) for n, prompt in enumerate(prompts)]
    plain = engine_of("plain", target=half).generate(requests)
    fast = engine_of("tabular", target=half, draft_length=draft_length).generate(requests)
    num_equal = 0
    for a, b in zip(plain, fast, strict=True):
        if a.token_ids == b.token_ids:
            num_equal += 1
            continue
        place = next(i for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)) if x != y)
        logits = text_logits(a.prompt_ids + a.token_ids[:place], half.params)[-1]
        best, second = np.sort(logits)[::-1][:2]
        # bfloat16 keeps 8 bits: a few roundings of logits of size 4 to 8 move them by up to 0.1.
        assert best - second < 0.2, (a.request_id, place, best - second)
    assert num_equal >= 8


def test_drafts_that_the_law_excludes_are_never_emitted():
    """The drafter always proposes a token outside the target's top-k."""
    requests = [request(str(n), PROMPT, temperature=1.0, top_k=2, seed=n, max_new_tokens=16) for n in range(8)]
    completions = engine_of("tabular", drafter_params=always_proposes(7)).generate(requests)
    for completion in completions:
        text = completion.prompt_ids + completion.token_ids
        logits = text_logits(text)
        for place in range(len(completion.prompt_ids), len(text)):
            best_two = np.argsort(-logits[place - 1], kind="stable")[:2]
            assert text[place] in best_two


@pytest.mark.slow
def test_padded_ids_are_never_emitted():
    padded = tiny_target(jax.random.key(4), vocab_size=16, num_valid_tokens=13)
    drafter = TabularDrafter(16)
    engine = Engine(padded, drafter, {"logits": jnp.zeros((16, 16), jnp.float32)}, cache_length=24, draft_length=3)
    requests = [request(str(n), (1, 2), temperature=3.0, seed=n, max_new_tokens=20) for n in range(10)]
    for completion in engine.generate(requests):
        assert max(completion.token_ids) < 13
    refused = engine.generate([request("a", (14,))])[0]
    assert refused.finish_reason == "error: `prompt_ids` must be in [0, 13), the target's vocabulary; got 14"
