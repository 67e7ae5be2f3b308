"""Heads: configuration, logits, and what a call costs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.heads import HeadConfig, get_head, register_head

CONFIGS = [HeadConfig("full", 16, 50), HeadConfig("low_rank", 16, 50, rank=4), HeadConfig("low_rank", 16, 50)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_logits_equal_the_merged_matrix(next_key, config, dtype):
    head = get_head(config.kind)
    params = head.init(next_key(), config, dtype)
    hidden = jax.random.normal(next_key(), (2, 3, 16), jnp.float32)
    logits = head.logits(params, hidden)
    assert logits.dtype == jnp.float32
    assert logits.shape == (2, 3, 50)
    merged = np.asarray(head.merged_weight(params), np.float64)
    assert merged.shape == (50, 16)
    tolerance = 2e-6 if dtype == jnp.float32 else 0.15
    np.testing.assert_allclose(logits, np.asarray(hidden, np.float64) @ merged.T, atol=tolerance)


@pytest.mark.parametrize("config", CONFIGS)
def test_project_then_output_matrix_are_the_logits(next_key, config):
    head = get_head(config.kind)
    params = head.init(next_key(), config)
    hidden = jax.random.normal(next_key(), (5, 16), jnp.float32)
    projected = head.project(params, hidden)
    assert projected.shape == (5, config.inner_size)
    np.testing.assert_allclose(projected @ head.output_matrix(params), head.logits(params, hidden), atol=2e-6)


@pytest.mark.parametrize("config", CONFIGS)
def test_parameter_count_is_that_of_the_arrays(next_key, config):
    head = get_head(config.kind)
    params = head.init(next_key(), config)
    assert head.num_params(config) == sum(leaf.size for leaf in jax.tree.leaves(params))
    assert head.bytes_per_call(config, jnp.bfloat16) == 2 * head.num_params(config)
    assert head.flops(config, 3) == 6 * head.num_params(config)


def test_logits_start_with_the_scale_of_the_hidden_state(next_key):
    hidden = jax.random.normal(next_key(), (64, 256), jnp.float32)
    for config in (HeadConfig("full", 256, 512), HeadConfig("low_rank", 256, 512)):
        head = get_head(config.kind)
        logits = head.logits(head.init(next_key(), config), hidden)
        assert 0.8 < float(jnp.std(logits)) < 1.25


def test_rank_defaults_to_an_eighth_of_the_width():
    assert HeadConfig("low_rank", 576, 49152).rank == 72
    assert HeadConfig("low_rank", 4, 10).rank == 1
    assert HeadConfig("low_rank", 576, 49152) == HeadConfig("low_rank", 576, 49152, rank=72)


def test_slimspec_byte_ratio_of_llama():
    full = HeadConfig("full", 4096, 128256)
    slim = HeadConfig("low_rank", 4096, 128256)
    ratio = get_head("low_rank").bytes_per_call(slim, jnp.bfloat16) / get_head("full").bytes_per_call(
        full, jnp.bfloat16
    )
    assert ratio == pytest.approx(0.129, abs=5e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "wide"}, r"`kind` of a head must be one of .*'full', .*'low_rank', .*got 'wide'"),
        ({"kind": "full", "rank": 4}, "`rank` must be None for the full head; got 4"),
        ({"kind": "low_rank", "rank": 0}, r"`rank` must be in \[1, hidden_size=16\]; got 0"),
        ({"kind": "low_rank", "rank": 17}, r"`rank` must be in \[1, hidden_size=16\]; got 17"),
        ({"kind": "full", "vocab_size": 0}, "`vocab_size` must be at least 1; got 0"),
    ],
)
def test_impossible_configurations_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        HeadConfig(**{"hidden_size": 16, "vocab_size": 50, **arguments})


def test_a_name_can_be_registered_once():
    with pytest.raises(ValueError, match="'full' is already registered"):
        register_head("full", get_head("full"))
