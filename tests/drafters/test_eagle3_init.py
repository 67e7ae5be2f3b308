"""Initial parameters: random, or taken from the target."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import Eagle3Config, parameter_shapes
from specjax.heads import get_head
from specjax.models import ModelConfig, init_params

TARGET = ModelConfig(
    vocab_size=40, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=4
)


@functools.cache
def target_params():
    return init_params(jax.random.key(1), TARGET, scale=0.5)


def covariance():
    hidden = np.random.default_rng(0).standard_normal((200, 8)) * np.geomspace(3, 0.1, 8)
    return hidden.T @ hidden / len(hidden)


def init(config, **options):
    return init_drafter(jax.random.key(2), config, target_params(), TARGET, **options)


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True}])
def test_parameters_have_the_declared_shapes(switches):
    config = Eagle3Config.for_target(TARGET, rank=3, **switches)
    params = init(config, head_init="random", warm_start=False)
    head = params.pop("head")
    assert jax.tree.map(jnp.shape, params) == parameter_shapes(config)
    assert sum(leaf.size for leaf in jax.tree.leaves(head)) == get_head("low_rank").num_params(config.head)


def test_a_warm_start_copies_the_last_layer_and_passes_the_last_feature_on():
    params = init(Eagle3Config.for_target(TARGET, rank=3), head_init="random")
    source, layer = target_params()["layers"][-1], params["midlayer"]
    for name in ("o_proj", "gate_proj", "up_proj", "down_proj", "post_attention_norm"):
        np.testing.assert_array_equal(layer[name], source[name])
    for name in ("q_proj", "k_proj", "v_proj"):
        np.testing.assert_array_equal(layer[name][8:], source[name])
    np.testing.assert_array_equal(layer["hidden_norm"], source["input_norm"])
    np.testing.assert_array_equal(params["norm"], target_params()["final_norm"])
    np.testing.assert_allclose(params["fc"][16:], np.eye(8), atol=0.05)
    assert np.abs(params["fc"][:16]).max() < 0.05


def test_a_full_head_is_the_targets():
    params = init(Eagle3Config.for_target(TARGET, head_kind="full"))
    np.testing.assert_array_equal(params["head"]["kernel"], target_params()["lm_head"])


def test_the_activation_aware_head_loses_least_where_states_occur():
    config = Eagle3Config.for_target(TARGET, rank=3)
    hidden = np.random.default_rng(5).standard_normal((300, 8)) * np.geomspace(3, 0.1, 8)
    wanted = hidden @ np.asarray(target_params()["lm_head"])

    def error(**options):
        head = init(config, **options)["head"]
        logits = hidden @ np.asarray(head["down"]) @ np.asarray(head["up"])
        difference = wanted - logits
        return np.linalg.norm(difference - difference.mean(-1, keepdims=True))

    aware = error(head_init="activation_aware", covariance=covariance())
    assert aware < error(head_init="svd") < error(head_init="random")


def test_dtype_and_determinism():
    config = Eagle3Config.for_target(TARGET, rank=3)
    one, other = (init(config, head_init="svd", dtype=jnp.bfloat16) for _ in range(2))
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize(
    ("overrides", "options", "message"),
    [
        ({}, {"head_init": "pca"}, "`head_init` must be one of .*; got 'pca'"),
        ({}, {"head_init": "activation_aware"}, "`covariance` must be given .*; got None"),
        (
            {"intermediate_size": 20},
            {"head_init": "random"},
            "`intermediate_size` must be the target's 16 for a warm start; got 20",
        ),
    ],
)
def test_impossible_starts_are_named(overrides, options, message):
    with pytest.raises(ValueError, match=message):
        init(Eagle3Config.for_target(TARGET, rank=3, **overrides), **options)
