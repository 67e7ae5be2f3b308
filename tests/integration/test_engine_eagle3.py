"""The engine with an EAGLE-3 drafter: exact output, and a drafter state that is always that of a fresh run."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Engine, LawParams, Request, SamplingParams
from specjax.decoding.scheduler import RunningRequest
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.models import KVCache, forward
from specjax.testing.chi_squared import assert_follows_law
from specjax.testing.tiny_models import TinyTarget, exact_joint_law, tiny_target
from specjax.types import DraftTree

VOCAB = 11
PROMPTS = [(1,), (3, 1, 4, 1, 5), (9, 2, 6, 5, 3, 5, 8, 9, 7), (2, 7, 1, 8, 2, 8)]


@functools.cache
def target() -> TinyTarget:
    return tiny_target(jax.random.key(3), vocab_size=VOCAB, num_layers=3, sharpness=2.0)


@functools.cache
def drafter() -> tuple[Eagle3Drafter, dict]:
    config = Eagle3Config.for_target(target().config, head_kind="full", feature_layers=(0, 1, 2))
    params = init_drafter(jax.random.key(1), config, target().params, target().config, head_init="svd", warm_start=True)
    return Eagle3Drafter(config), params | {"embed_tokens": target().params["embed_tokens"]}


def engine_of(*, num_drafts: int = 1, verifier: str = "token", num_slots: int = 2, **settings) -> Engine:
    settings = {"cache_length": 40, "draft_length": 3} | settings
    return Engine(target(), *drafter(), num_slots=num_slots, num_drafts=num_drafts, verifier=verifier, **settings)


def requests_of(**params) -> list[Request]:
    return [Request(str(n), prompt, SamplingParams(**params)) for n, prompt in enumerate(PROMPTS)]


@functools.cache
def plain_tokens() -> list[tuple[int, ...]]:
    engine = Engine(target(), num_slots=2, cache_length=40)
    return [completion.token_ids for completion in engine.generate(requests_of(max_new_tokens=50))]


@pytest.mark.parametrize(("num_drafts", "verifier"), [(1, "token"), (2, "multi_draft_block")])
def test_greedy_output_equals_plain_decoding(num_drafts, verifier):
    """Up to the end of the context, with drafts that are sometimes accepted."""
    completions = engine_of(num_drafts=num_drafts, verifier=verifier).generate(requests_of(max_new_tokens=50))
    assert [completion.token_ids for completion in completions] == plain_tokens()
    assert {completion.finish_reason for completion in completions} == {"context"}
    assert sum(step.num_accepted for completion in completions for step in completion.steps) > 0


@pytest.mark.parametrize(("num_drafts", "verifier"), [(1, "token"), (2, "multi_draft_block")])
def test_case_k2_k3_drafter_state_comes_from_the_targets_features(num_drafts, verifier):
    """After every acceptance pattern, with one chain and with two packed chains."""
    engine = engine_of(num_drafts=num_drafts, verifier=verifier)
    eagle, params = drafter()

    @jax.jit
    def fresh_state(tokens, count):
        cache = KVCache.zeros(target().config, 1, tokens.shape[1])
        layers = eagle.feature_layers
        zero = jnp.zeros(1, jnp.int32)
        features = forward(target().params, target().config, tokens, cache, zero, feature_layers=layers).features
        state = eagle.init_state(1, 64, DraftTree.chains(1, 1))
        following = jnp.roll(tokens, -1, axis=1)
        return eagle.extend(params, state, tokens=following, features=features, count=count)

    patterns = set()
    for seed in range(3):
        one = Request("a", PROMPTS[1], SamplingParams(temperature=1.0, seed=seed, max_new_tokens=30))
        state = engine._fill(engine._program.empty(2, jnp.float32), 1, RunningRequest(one, None))
        text = list(one.prompt_ids)
        for _ in range(6):
            state, outputs = engine._program.step(target().params, params, state)
            row = np.asarray(outputs)[0, 1].tolist()
            count = row[engine.tree.max_depth + 1]
            patterns.add(count)
            text += row[:count]
            padded = np.zeros((1, 48), np.int32)
            padded[0, : len(text)] = text
            fresh = fresh_state(padded, jnp.asarray([len(text) - 1], jnp.int32))
            mine = state.drafter_state
            length = len(text) - 1
            assert int(mine.length[1]) == int(fresh.length[0]) == length
            np.testing.assert_allclose(mine.keys[1, :, :length], fresh.keys[0, :, :length], atol=1e-4)
            np.testing.assert_allclose(mine.values[1, :, :length], fresh.values[0, :, :length], atol=1e-4)
            np.testing.assert_allclose(mine.hidden[1], fresh.hidden[0], atol=1e-4)
    assert len(patterns) >= 3


@pytest.mark.slow
@pytest.mark.parametrize(("num_drafts", "verifier"), [(1, "token"), (2, "multi_draft_block")])
def test_two_tokens_follow_the_target(num_drafts, verifier):
    """Chi-squared, false alarms 1e-6; seeds are literal so that the verdict never changes."""
    law = LawParams(
        temperature=jnp.ones(1, jnp.float32),
        top_k=jnp.zeros(1, jnp.int32),
        top_p=jnp.ones(1, jnp.float32),
        min_p=jnp.zeros(1, jnp.float32),
    )
    engine = engine_of(num_drafts=num_drafts, verifier=verifier, num_slots=64, cache_length=12, draft_length=2)
    requests = [
        Request(str(seed), PROMPTS[1], SamplingParams(temperature=1.0, seed=seed, max_new_tokens=2))
        for seed in range(20_000)
    ]
    counts = np.zeros((VOCAB, VOCAB), np.int64)
    for completion in engine.generate(requests):
        counts[completion.token_ids] += 1
    assert_follows_law(counts, exact_joint_law(target(), PROMPTS[1], 2, law))


@pytest.mark.parametrize(
    ("num_drafts", "verifier", "advice"), [(1, "greedy_block", "block"), (2, "spectr_gbv", "multi_draft_block")]
)
def test_rules_with_a_carry_are_refused_with_the_best_rule_without_one(num_drafts, verifier, advice):
    with pytest.raises(ValueError, match=f"'{verifier}' is exact only for .* use '{advice}'$"):
        engine_of(num_drafts=num_drafts, verifier=verifier)
