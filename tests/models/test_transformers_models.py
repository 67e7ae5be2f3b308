"""Live comparison with torch and transformers: random models go through files on disk, as real ones do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import huggingface
from specjax.models import KVCache, ModelConfig, compute_logits, forward

pytestmark = [
    pytest.mark.parity,
    # What the other two packages warn about is not ours to fix.
    pytest.mark.filterwarnings("ignore"),
]

NUM_TOKENS = 50
KINDS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "tied": {"tie_word_embeddings": True},
    "biases, one head for keys": {"attention_bias": True, "num_key_value_heads": 1},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 1000.0,
        }
    },
}


@pytest.fixture(scope="module")
def libraries() -> tuple[Any, Any]:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return torch, transformers


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_equal_those_of_a_saved_model(libraries: tuple[Any, Any], tmp_path: Path, kind: str, dtype: str) -> None:
    torch, transformers = libraries
    settings = {
        "vocab_size": 97,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
        "eos_token_id": [3, 5],
        **KINDS[kind],
    }
    torch.manual_seed(20)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)).eval()
    # A few shards, so that the index is real too.
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path, max_shard_size="150KB")
    assert (tmp_path / huggingface.INDEX).is_file() or dtype == "bfloat16"
    tokens = torch.randint(0, 97, (2, NUM_TOKENS))
    # The same stored weights in float32 on both sides, read again: the cast above rounded the rotary buffers too.
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(tokens, output_hidden_states=True)

    config = huggingface.read_config(tmp_path)
    params = huggingface.load_params(tmp_path, config, jnp.float32)
    ours = jax.jit(forward, static_argnames=("config", "feature_layers"))(
        params,
        config,
        jnp.asarray(tokens.numpy(), jnp.int32),
        KVCache.zeros(config, 2, NUM_TOKENS),
        jnp.zeros(2, jnp.int32),
        feature_layers=(1, 0),
    )
    logits = np.asarray(compute_logits(params, config, ours.hidden))
    expected = output.logits.numpy()
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)
    features = torch.cat([output.hidden_states[2], output.hidden_states[1]], dim=-1).numpy()
    np.testing.assert_allclose(np.asarray(ours.features), features, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_written_configurations_mean_the_same_to_transformers(libraries: tuple[Any, Any], kind: str) -> None:
    _, transformers = libraries
    original = transformers.LlamaConfig(hidden_size=64, num_attention_heads=8, **{"head_dim": 8, **KINDS[kind]})
    config = ModelConfig.from_huggingface(original.to_dict())
    again = transformers.LlamaConfig(**config.to_huggingface())
    assert ModelConfig.from_huggingface(again.to_dict()) == config
    rope = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    np.testing.assert_array_equal(rope(again).inv_freq.numpy(), rope(original).inv_freq.numpy())
