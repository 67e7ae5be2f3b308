"""Tiny model folders in Hugging Face's form, written without any part of the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "max_position_embeddings": 32,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of CONFIG under their usual names, [out, in]."""
    shapes = {"model.embed_tokens.weight": (13, 8), "model.norm.weight": (8,), "lm_head.weight": (13, 8)}
    for layer in range(2):
        for name, shape in {
            "input_layernorm": (8,),
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "post_attention_layernorm": (8,),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
        }.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write_folder(
    folder: Path, tensors: dict[str, np.ndarray], *, num_shards: int = 1, config: dict[str, Any] | None = None
) -> Path:
    """Writes config.json and one file, or shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    if num_shards == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    write_index(folder, weight_map)
    return folder


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """Writes the index of shards."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder: Path) -> dict[str, str]:
    """Shard of each tensor."""
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
