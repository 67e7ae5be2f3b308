"""Heads on the fused kernels: same logits and draws, and decoding that does not change."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import Engine, Request, SamplingParams
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.heads import HeadConfig, fused, get_head
from specjax.sampling import lowest_argmax
from specjax.testing.tiny_models import tiny_target

CONFIGS = [HeadConfig("full", 16, 50), HeadConfig("low_rank", 16, 50, rank=4)]


@pytest.mark.parametrize("config", CONFIGS)
def test_prepared_heads_give_the_same_logits_and_draws(next_key, config):
    head = get_head(config.kind)
    params = head.init(next_key(), config)
    hidden = jax.random.normal(next_key(), (2, 3, 16), jnp.float32)
    expected = head.logits(params, hidden)
    prepared = head.prepare(params, config, num_valid_tokens=47)
    np.testing.assert_allclose(head.logits(prepared, hidden)[..., :47], expected[..., :47], atol=2e-6)
    assert bool(jnp.all(head.logits(prepared, hidden)[..., 47:] == -jnp.inf))
    rows, row_logits = hidden[0], expected[0, :, :47]
    draw = head.greedy(prepared, rows)
    np.testing.assert_array_equal(draw.token, lowest_argmax(row_logits))
    keys = jax.random.split(next_key(), 3)
    sampled = head.sample(prepared, rows, keys, 0.7)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (50,), jnp.float32))(keys)[:, :47]
    np.testing.assert_array_equal(sampled.token, lowest_argmax(row_logits / jnp.float32(0.7) + noise))


def test_parameters_stay_as_they_are_on_cpu(next_key):
    head, config = get_head("low_rank"), CONFIGS[1]
    params = head.init(next_key(), config, jnp.bfloat16)
    assert fused.prepare_for_platform(head, params, config) is params


def test_heads_that_the_kernels_do_not_know_stay_as_they_are(next_key, monkeypatch):
    monkeypatch.setattr(fused, "_kernel_serves", lambda params: True)
    head, config = get_head("low_rank"), HeadConfig("low_rank", 16, 50, rank=4, options=(("ranks", (4, 2)),))
    params = head.init(next_key(), config)
    assert fused.prepare_for_platform(head, params, config) is params


def test_the_engine_decodes_the_same_with_prepared_heads(monkeypatch):
    target = tiny_target(jax.random.key(3), vocab_size=11, num_layers=3, sharpness=2.0)
    config = Eagle3Config.for_target(target.config, head_kind="full", feature_layers=(0, 1, 2))
    params = init_drafter(jax.random.key(1), config, target.params, target.config, head_init="svd", warm_start=True)
    arguments = (target, Eagle3Drafter(config), params | {"embed_tokens": target.params["embed_tokens"]})
    request = Request("a", (3, 1, 4), SamplingParams(max_new_tokens=12))
    plain = Engine(*arguments, cache_length=24, draft_length=2)
    expected = plain.generate([request])[0]
    monkeypatch.setattr(fused, "_kernel_serves", lambda params: True)
    engine = Engine(*arguments, cache_length=24, draft_length=2)
    assert set(engine._drafter_params["head"]) == {fused.PREPARED}
    completion = engine.generate([request])[0]
    assert completion.token_ids == expected.token_ids
    assert completion.steps == expected.steps
