"""The engine with heads that cannot draft every token: greedy output is the target's, sampled output has its law."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Engine, LawParams, Request, SamplingParams
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.heads import HeadSource, get_head
from specjax.testing.chi_squared import assert_follows_law
from specjax.testing.tiny_models import TinyTarget, exact_joint_law, tiny_target

VOCAB = 11
PROMPTS = [(1,), (3, 1, 4, 1, 5), (2, 7, 1, 8, 2, 8)]
OPTIONS = {
    "vocab_trim": {"rows": 5},
    "spec_vocab": {"candidates": 3},
    "dyna_spec": {"groups": 4, "active": 3, "decay": 0.5, "least": 1, "width": 4},
}


@functools.cache
def target() -> TinyTarget:
    return tiny_target(jax.random.key(3), vocab_size=VOCAB, num_layers=3, sharpness=2.0)


def drafter(kind: str):
    config = Eagle3Config.for_target(
        target().config, head_kind=kind, head_options=OPTIONS.get(kind), feature_layers=(0, 1, 2)
    )
    source = HeadSource(answer_counts=np.arange(VOCAB, dtype=np.int64))
    base = drafter("full")[1] if get_head(kind).needs_base else None
    params = init_drafter(
        jax.random.key(1), config, target().params, target().config, head_init="svd", source=source, base=base
    )
    return Eagle3Drafter(config), params | {"embed_tokens": target().params["embed_tokens"]}


@functools.cache
def plain_tokens() -> list[tuple[int, ...]]:
    engine = Engine(target(), num_slots=2, cache_length=40)
    return [completion.token_ids for completion in engine.generate(requests())]


def requests() -> list[Request]:
    return [Request(str(n), prompt, SamplingParams(max_new_tokens=24)) for n, prompt in enumerate(PROMPTS)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_greedy_output_equals_plain_decoding(kind):
    engine = Engine(target(), *drafter(kind), num_slots=2, cache_length=40, draft_length=3)
    completions = engine.generate(requests())
    assert [completion.token_ids for completion in completions] == plain_tokens()
    assert sum(step.num_accepted for completion in completions for step in completion.steps) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(OPTIONS))
def test_sampled_output_follows_the_targets_law(kind):
    """Tokens without a draft probability must still come with the target's own. Chi-squared, false alarms 1e-6; seeds
    are literal so that the verdict never changes."""
    one = {"temperature": jnp.ones(1, jnp.float32), "top_k": jnp.zeros(1, jnp.int32)}
    law = LawParams(**one, top_p=jnp.ones(1, jnp.float32), min_p=jnp.zeros(1, jnp.float32))
    engine = Engine(target(), *drafter(kind), num_slots=64, cache_length=12, draft_length=2)
    sampled = [
        Request(str(seed), PROMPTS[1], SamplingParams(temperature=1.0, seed=seed, max_new_tokens=2))
        for seed in range(8_000)
    ]
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for completion in engine.generate(sampled):
        counts[completion.token_ids] += 1
    assert_follows_law(counts, exact_joint_law(target(), PROMPTS[1], 2, law))
