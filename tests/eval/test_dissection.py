"""A step in parts commits what the engine's step commits, and heads can be taken away from a drafter."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.dissection import DECIDE, EXTEND, PROPOSE, TARGET, StepParts, _split, time_steps
from eval.head_timing import NO_HEAD, time_heads_alone, with_full_head, without_head
from specjax.decoding import Engine, LawParams, Request, SamplingParams
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.testing.tiny_models import tiny_target

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(jax.random.key(5), num_layers=1)


@pytest.fixture(scope="module")
def eagle(target: Any) -> tuple[Eagle3Drafter, dict[str, Any]]:
    config = Eagle3Config.for_target(target.config, head_kind="low_rank", rank=4)
    params = init_drafter(jax.random.key(6), config, target.params, target.config, head_init="svd", warm_start=True)
    return Eagle3Drafter(config), {**params, "embed_tokens": target.params["embed_tokens"]}


def tokens_of_parts(parts: StepParts, target: Any, drafter_params: Any, num_tokens: int) -> list[int]:
    state = parts.start(target.params, drafter_params, PROMPT, 1, 40)
    laws = LawParams.greedy(1)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        draft_keys, verify_keys = _split(state.rng_keys, state.length)
        proposal, drafter_state = parts.propose(drafter_params, state.drafter_state, draft_keys, state.last_token, laws)
        logits, features, cache = parts.verify_forward(target.params, state.cache, proposal.tokens, state.length)
        committed, count, last, length = parts.decide(verify_keys, proposal, logits, laws, state.length)
        drafter_state = parts.extend(drafter_params, drafter_state, committed, features, count)
        tokens += np.asarray(committed[0, : int(count[0])]).tolist()
        state = dataclasses.replace(state, cache=cache, drafter_state=drafter_state, last_token=last, length=length)
    return tokens[:num_tokens]


def test_parts_commit_the_engine_s_tokens(target: Any, eagle: tuple[Eagle3Drafter, dict[str, Any]]) -> None:
    drafter, params = eagle
    engine = Engine(target, cache_length=40, draft_length=0)
    request = Request("a", PROMPT, SamplingParams(max_new_tokens=24))
    expected = list(engine.generate([request])[0].token_ids)
    assert tokens_of_parts(StepParts(target.config, drafter, 2), target, params, 24) == expected


def test_every_part_and_rival_is_timed(target: Any, eagle: tuple[Eagle3Drafter, dict[str, Any]]) -> None:
    drafter, params = eagle
    timings = time_steps(
        StepParts(target.config, drafter, 2),
        target.params,
        params,
        PROMPT,
        num_steps=4,
        cache_length=40,
        rivals={
            "none": without_head(drafter, params),
            "full": with_full_head(drafter, params, target.params["lm_head"]),
        },
    )
    assert set(timings) == {PROPOSE, TARGET, DECIDE, EXTEND, "none", "full"}
    assert all(len(timing.samples) == 4 and timing.median > 0 for timing in timings.values())
    plain = time_steps(StepParts(target.config, None, 0), target.params, None, PROMPT, num_steps=4, cache_length=40)
    assert set(plain) == {TARGET, DECIDE}


def test_steps_must_fit(target: Any) -> None:
    with pytest.raises(ValueError, match="`cache_length` must be at least 35"):
        time_steps(StepParts(target.config, None, 4), target.params, None, PROMPT, num_steps=4, cache_length=34)
    with pytest.raises(ValueError, match="at least two tokens"):
        time_steps(StepParts(target.config, None, 0), target.params, None, (1,), num_steps=1, cache_length=34)


def test_a_head_that_is_not_there_still_depends_on_the_hidden_state(
    eagle: tuple[Eagle3Drafter, dict[str, Any]],
) -> None:
    drafter, params = without_head(*eagle)
    assert drafter.config.head.kind == NO_HEAD
    from specjax.drafters.eagle3_layer import compute_logits

    width, vocab = drafter.config.hidden_size, drafter.config.vocab_size
    hidden = jax.random.normal(jax.random.key(1), (2, 1, width), jnp.float32)
    logits = compute_logits(params, drafter.config, hidden)
    assert logits.shape == (2, 1, vocab)
    assert float(jnp.abs(logits[0] - logits[1]).max()) > 0
    assert len(set(np.asarray(logits[0, 0]).tolist())) == vocab
    # Twice is as good as once, and the original keeps its head.
    without_head(*eagle)
    assert eagle[0].config.head.kind == "low_rank"


def test_full_head_takes_the_place_of_a_low_rank_one(target: Any, eagle: tuple[Eagle3Drafter, dict[str, Any]]) -> None:
    drafter, params = with_full_head(*eagle, target.params["lm_head"])
    assert drafter.config.head.kind == "full"
    assert params["head"]["kernel"].shape == (target.config.hidden_size, target.config.vocab_size)
    timings = time_heads_alone(
        {"slim": (eagle[0].config.head, eagle[1]["head"]), "full": (drafter.config.head, params["head"])},
        rounds=3,
        buffer_bytes=4096,
    )
    assert set(timings) == {"slim", "full"}
