"""Rotary embeddings: frequencies, scaling and rotation."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.models.config import RopeScaling
from specjax.models.rope import apply_rope, rope_frequencies

LLAMA = PUBLISHED_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]


def test_case_k9_llama3_scaling_has_the_published_ratios() -> None:
    plain = rope_frequencies(dataclasses.replace(LLAMA, rope_scaling=None))
    ratio = rope_frequencies(LLAMA) / plain
    assert ratio.shape == (64,)
    np.testing.assert_array_equal(ratio[:29], 1.0)
    np.testing.assert_allclose(ratio[29], 0.828168, atol=1e-6)
    np.testing.assert_allclose(ratio[32], 0.371122, atol=1e-6)
    np.testing.assert_allclose(ratio[35:], 0.125, rtol=1e-7)
    assert np.all(np.diff(ratio[28:36]) < 0)


def test_linear_scaling_divides_every_frequency() -> None:
    config = PUBLISHED_CONFIGS["deepseek-ai/deepseek-coder-6.7b-instruct"]
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    np.testing.assert_allclose(rope_frequencies(config), plain / 4, rtol=1e-7)
    np.testing.assert_allclose(plain[[0, 32]], [1.0, 1e5**-0.5], rtol=1e-7)


def test_rotation_turns_pairs_of_the_two_halves() -> None:
    x = np.zeros((1, 1, 3, 8), np.float32)
    x[..., 1] = 1.0  # the first half of pair 1
    frequencies = np.array([1.0, 0.5, 0.25, 0.125], np.float32)
    positions = jnp.asarray([[0, 2, 7]])
    rotated = np.asarray(apply_rope(jnp.asarray(x), positions, frequencies))[0, 0]
    angles = np.array([0.0, 1.0, 3.5], np.float32)
    expected = np.zeros((3, 8), np.float32)
    expected[:, 1], expected[:, 5] = np.cos(angles), np.sin(angles)
    np.testing.assert_allclose(rotated, expected, atol=1e-6)


def test_scores_depend_on_distance_alone() -> None:
    generator = np.random.default_rng(3)
    query, key = (jnp.asarray(generator.normal(size=(1, 1, 1, 64)), jnp.float32) for _ in range(2))
    config = dataclasses.replace(LLAMA, head_dim=64)
    frequencies = rope_frequencies(config)

    def score(query_position: int, key_position: int) -> float:
        rotated = [
            apply_rope(x, jnp.asarray([[position]]), frequencies)
            for x, position in ((query, query_position), (key, key_position))
        ]
        return float(jnp.sum(rotated[0] * rotated[1]))

    assert score(9, 4) == pytest.approx(score(1009, 1004), abs=2e-3)
    assert abs(score(9, 4) - score(9, 5)) > 0.01


def test_rotation_keeps_the_dtype() -> None:
    x = jnp.ones((2, 3, 4, 8), jnp.bfloat16)
    assert apply_rope(x, jnp.zeros((2, 4), jnp.int32), np.ones(4, np.float32)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "yarn", "factor": 2.0}, "`rope_scaling.kind` must be one of"),
        ({"kind": "linear", "factor": 0.0}, "`rope_scaling.factor` must be positive and finite; got 0.0"),
        ({"kind": "llama3", "factor": 8.0}, "`rope_scaling.low_freq_factor` must be positive"),
        (
            {
                "kind": "llama3",
                "factor": 8.0,
                "low_freq_factor": 4.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "must be above `low_freq_factor`",
        ),
    ],
)
def test_scaling_is_checked(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeScaling(**fields)
