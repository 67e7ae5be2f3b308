"""A tiny model as a folder on disk, as users have theirs: weights, configuration, tokenizer, chat template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from specjax.checkpoints.llama_names import EMBEDDING, FINAL_NORM, HEAD, layer_tensors
from specjax.checkpoints.safetensors_io import write_tensors
from specjax.checkpoints.target import Target


def save_target(folder: Path, target: Target) -> Path:
    """Writes what `load_target` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    params = target.params
    tensors = {EMBEDDING: np.asarray(params["embed_tokens"]), FINAL_NORM: np.asarray(params["final_norm"])}
    if not target.config.tie_word_embeddings:
        tensors[HEAD] = np.asarray(params["lm_head"]).T
    for index, layer in enumerate(params["layers"]):
        for name, (tensor, transposed) in layer_tensors(target.config).items():
            value = np.asarray(layer[name])
            tensors[f"model.layers.{index}.{tensor}"] = value.T if transposed else value
    write_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(target.config.to_huggingface()))
    (folder / "tokenizer.json").write_text(target.tokenizer._backend.to_str())
    assert target.chat_template is not None
    (folder / "chat_template.jinja").write_text(target.chat_template.source)
    special = {"eos_token": target.chat_template.eos_token}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder
