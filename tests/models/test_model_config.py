"""Configurations: reading, writing and refusing."""

from __future__ import annotations

import pytest

from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.models import ModelConfig, RopeScaling

MINIMAL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED_CONFIGS))
def test_configurations_survive_the_json_form(name: str) -> None:
    config = PUBLISHED_CONFIGS[name]
    fields = config.to_huggingface()
    assert ModelConfig.from_huggingface(fields, num_valid_tokens=config.num_valid_tokens) == config


def test_absent_fields_have_the_formats_defaults() -> None:
    config = ModelConfig.from_huggingface(MINIMAL)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert (config.rope_theta, config.rope_scaling, config.rms_norm_eps) == (10000.0, None, 1e-6)
    assert (config.tie_word_embeddings, config.bos_token_id, config.eos_token_ids) == (False, None, ())


@pytest.mark.parametrize("kind_field", ["type", "rope_type"])
def test_rope_scaling_is_read_by_both_of_its_names(kind_field: str) -> None:
    config = ModelConfig.from_huggingface(MINIMAL | {"rope_scaling": {kind_field: "linear", "factor": 4}})
    assert config.rope_scaling == RopeScaling("linear", 4.0)


def test_rope_parameters_hold_base_and_scaling() -> None:
    parameters = {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = ModelConfig.from_huggingface(MINIMAL | {"rope_parameters": parameters})
    assert config.rope_theta == 500000.0
    assert config.rope_scaling == RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)


def test_eos_may_be_a_list() -> None:
    assert ModelConfig.from_huggingface(MINIMAL | {"eos_token_id": [3, 7]}).eos_token_ids == (3, 7)
    assert ModelConfig.from_huggingface(MINIMAL | {"eos_token_id": 3}).eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "`model_type` must be one of .*'mamba'"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu'.*'gelu'"),
        ({"mlp_bias": True}, "`mlp_bias` must be false"),
        ({"vocab_size": None}, "lacks `vocab_size`"),
        ({"vocab_size": 0}, "`vocab_size` must be a positive integer; got 0"),
        ({"hidden_size": "32"}, "`hidden_size` must be a positive integer; got '32'"),
        ({"hidden_size": 34}, "`hidden_size` must be a multiple of `num_attention_heads`"),
        ({"num_key_value_heads": 3}, "`num_kv_heads` must divide `num_heads`; got 3 and 4"),
        ({"head_dim": 7}, "`head_dim` must be even"),
        ({"rope_theta": -1.0}, "`rope_theta` must be positive and finite; got -1.0"),
        ({"rope_theta": float("inf")}, "`rope_theta` must be positive and finite; got inf"),
        ({"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be positive and finite; got nan"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling must be one of .*'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "must have a `factor`"),
        ({"eos_token_id": 100}, r"`eos_token_ids` must be in \[0, vocab_size = 100\); got 100"),
        ({"bos_token_id": -2}, "`bos_token_id` must be in .*; got -2"),
    ],
)
def test_what_cannot_be_is_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_huggingface(MINIMAL | change)


def test_valid_tokens_must_be_rows() -> None:
    with pytest.raises(ValueError, match=r"`num_valid_tokens` must be in \[1, vocab_size = 100\]; got 101"):
        ModelConfig.from_huggingface(MINIMAL, num_valid_tokens=101)
