"""Writes the golden files of this folder: logits of tiny random models by torch and transformers.

Run it where both are installed: `python tests/models/make_golden.py`. Weights are rounded to float16, so that
the files stay small and the comparison stays exact.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent / "golden"
NUM_TOKENS = 40
FEATURE_LAYERS = (0,)

BASE = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
# The original context is shorter than the text, so that all three regimes of the scaling matter.
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict] = {
    "default_rope": {},
    "llama3_rope": {"rope_scaling": LLAMA3_SCALING},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "num_key_value_heads": 4},
    "tied": {"tie_word_embeddings": True},
    "one_kv_head": {"num_key_value_heads": 1, "head_dim": 12},
    "attention_bias": {"attention_bias": True},
}


def make(name: str, seed: int) -> None:
    """Writes `name`.json (configuration) and `name`.npz (weights, tokens and what the model makes of them)."""
    import torch
    import transformers

    config = BASE | MODELS[name]
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    settings = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**settings, rope_parameters={"rope_theta": config["rope_theta"], **scaling})
    ).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            centre = 1.0 if key.endswith("norm.weight") else 0.0
            parameter.copy_((centre + 0.4 * noise).half().float())
        tokens = torch.randint(0, config["vocab_size"], (1, NUM_TOKENS), generator=generator)
        output = model(tokens, output_hidden_states=True)
    # Entry i + 1 of `hidden_states` is what layer i gives; the last one is already normed.
    features = [output.hidden_states[layer + 1] for layer in FEATURE_LAYERS]
    weights = {key: value.half().numpy() for key, value in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del weights["lm_head.weight"]
    np.savez_compressed(
        FOLDER / f"{name}.npz",
        tokens=tokens.numpy().astype(np.int32),
        logits=output.logits.numpy(),
        features=torch.cat(features, dim=-1).numpy(),
        **{f"weight:{key}": value for key, value in weights.items()},
    )
    (FOLDER / f"{name}.json").write_text(json.dumps({"model_type": "llama", **config}, indent=1) + "\n")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for number, model_name in enumerate(MODELS):
        make(model_name, seed=100 + number)
