"""Logits and features against golden files of transformers (see make_golden.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.llama_names import build_params, check_tensors
from specjax.models import KVCache, ModelConfig, compute_logits, forward

FOLDER = Path(__file__).parent / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))


def read_golden(name: str) -> tuple[ModelConfig, Any, dict[str, np.ndarray]]:
    config = ModelConfig.from_huggingface(json.loads((FOLDER / f"{name}.json").read_text()))
    with np.load(FOLDER / f"{name}.npz") as file:
        golden = dict(file)
    weights = {key.removeprefix("weight:"): value for key, value in golden.items() if key.startswith("weight:")}
    check_tensors(name, config, {key: value.shape for key, value in weights.items()})
    return config, build_params(config, weights.__getitem__, jnp.float32), golden


def run(config: ModelConfig, params: Any, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cache = KVCache.zeros(config, tokens.shape[0], tokens.shape[1] + 3)
    start = jnp.zeros(tokens.shape[0], jnp.int32)
    output = jax.jit(forward, static_argnames=("config", "feature_layers"))(
        params, config, jnp.asarray(tokens), cache, start, feature_layers=(0,)
    )
    return np.asarray(compute_logits(params, config, output.hidden)), np.asarray(output.features)


def test_there_is_a_golden_file_for_every_kind() -> None:
    assert NAMES == ["attention_bias", "default_rope", "linear_rope", "llama3_rope", "one_kv_head", "tied"]


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_features_equal_transformers(name: str) -> None:
    config, params, golden = read_golden(name)
    logits, features = run(config, params, golden["tokens"])
    # The models' logits have a standard deviation of about 1.6; float32 sums of 40 terms keep 1e-5 of that.
    np.testing.assert_allclose(logits, golden["logits"], atol=3e-5, rtol=0)
    np.testing.assert_allclose(features, golden["features"], atol=3e-5, rtol=0)


@pytest.mark.parametrize("name", ["llama3_rope", "linear_rope"])
def test_golden_logits_notice_lost_scaling(name: str) -> None:
    """Case K9's symptom: without its scaling, a model is right at position 0 and wrong ever more later."""
    _, params, golden = read_golden(name)
    fields = json.loads((FOLDER / f"{name}.json").read_text()) | {"rope_scaling": None}
    logits, _ = run(ModelConfig.from_huggingface(fields), params, golden["tokens"])
    error = np.abs(logits - golden["logits"]).max(axis=(0, 2))
    assert error[0] < 3e-5
    assert error[20:].max() > 0.05
