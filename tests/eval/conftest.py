"""A target that chats: random weights, a byte tokenizer, a template; in memory and as a run directory."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest

from eval.provenance import describe_target
from specjax.checkpoints.eagle import export_drafter
from specjax.checkpoints.llama_names import EMBEDDING, FINAL_NORM, HEAD, layer_tensors
from specjax.checkpoints.safetensors_io import write_tensors
from specjax.checkpoints.target import Target, load_target
from specjax.drafters.eagle3 import Eagle3Config
from specjax.drafters.eagle3_init import init_drafter
from specjax.testing.tiny_models import tiny_target
from specjax.testing.tiny_tokenizer import CHATML_TEMPLATE, END_OF_TEXT, TURN_END, tiny_tokenizer
from specjax.text.chat_template import ChatTemplate


@pytest.fixture(scope="session")
def chat_target() -> Target:
    """Tiny target with tokenizer and template; its end-of-turn token ends a text."""
    tokenizer = tiny_tokenizer()
    tiny = tiny_target(
        jax.random.key(11),
        vocab_size=tokenizer.vocab_size,
        num_layers=1,
        max_position_embeddings=512,
        eos_token_ids=(tokenizer.id_of(TURN_END),),
    )
    template = ChatTemplate(CHATML_TEMPLATE, "", END_OF_TEXT)
    return Target(tiny.config, tiny.params, tokenizer, template, "somewhere/tiny", "0123456789abcdef" * 4)


@pytest.fixture(scope="session")
def run_directory(chat_target: Target, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """What a training run leaves behind: settings, the target in a folder, an exported drafter."""
    folder = tmp_path_factory.mktemp("run")
    model = folder / "model"
    _save_model(model, chat_target)
    loaded = load_target(str(model))
    config = Eagle3Config.for_target(loaded.config, head_kind="low_rank")
    params = init_drafter(jax.random.key(6), config, loaded.params, loaded.config, head_init="random", warm_start=False)
    export_drafter(folder / "export", config, params, describe_target(loaded), {"steps": 0})
    (folder / "flags.txt").write_text(f"--target={model}\n--target_dtype=float32\n--head=low_rank\n")
    return folder


def _save_model(folder: pathlib.Path, target: Target) -> None:
    params = target.params
    tensors = {
        EMBEDDING: np.asarray(params["embed_tokens"]),
        FINAL_NORM: np.asarray(params["final_norm"]),
        HEAD: np.asarray(params["lm_head"]).T,
    }
    for index, layer in enumerate(params["layers"]):
        for name, (tensor, transposed) in layer_tensors(target.config).items():
            value = np.asarray(layer[name])
            tensors[f"model.layers.{index}.{tensor}"] = value.T if transposed else value
    write_tensors(folder / "model.safetensors", tensors)
    settings = dataclasses.replace(target.config, tie_word_embeddings=False).to_huggingface()
    (folder / "config.json").write_text(json.dumps(settings))
    backend: Any = target.tokenizer._backend
    (folder / "tokenizer.json").write_text(backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END_OF_TEXT}))
    (folder / "chat_template.jinja").write_text(CHATML_TEMPLATE)
