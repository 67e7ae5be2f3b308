"""Llama models from Hugging Face folders: config.json and one or many safetensors files."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoints import llama_names
from specjax.checkpoints.safetensors_io import read_header, read_tensors
from specjax.json_files import read_object
from specjax.models import ModelConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_FLOATS = ("F64", "F32", "F16", "BF16")


def read_config(folder: str | os.PathLike[str], *, num_valid_tokens: int | None = None) -> ModelConfig:
    """The configuration of a model folder.

    Tokens that end a text are those of config.json and, where there is one, of generation_config.json: chat
    models often name the end of a turn only there.

    Args:
        folder: holds config.json.
        num_valid_tokens: see `ModelConfig`.

    Raises:
        FileNotFoundError: if there is no config.json.
        ValueError: if it is broken or asks for another family.
    """
    config = read_config_file(Path(folder) / "config.json", num_valid_tokens=num_valid_tokens)
    path = Path(folder) / "generation_config.json"
    if not path.is_file():
        return config
    more = read_object(path).get("eos_token_id")
    more = [] if more is None else more if isinstance(more, list) else [more]
    try:
        return dataclasses.replace(config, eos_token_ids=tuple(dict.fromkeys((*config.eos_token_ids, *more))))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def read_config_file(path: Path, *, num_valid_tokens: int | None = None) -> ModelConfig:
    """The configuration in one JSON file; see `read_config`."""
    fields = read_object(path)
    try:
        return ModelConfig.from_huggingface(fields, num_valid_tokens=num_valid_tokens)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def weight_files(folder: str | os.PathLike[str]) -> list[Path]:
    """The weights files of a folder, each checked, in the index's order.

    Raises:
        FileNotFoundError: if there are no weights, or the index names files that are not there.
        ValueError: if a file is broken, holds other tensors than the index says, or two hold the same one.
    """
    folder = Path(folder)
    index_path = folder / INDEX
    if not index_path.is_file():
        if not (folder / SINGLE).is_file():
            raise FileNotFoundError(f"{folder}: no weights; expected {SINGLE} or {INDEX}")
        read_header(folder / SINGLE)
        return [folder / SINGLE]
    weight_map = read_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index_path}: `weight_map` must be an object that names a file for each tensor")
    names = list(dict.fromkeys(weight_map.values()))
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{folder}: {INDEX} names weights files that are missing: {', '.join(absent)}")
    stray = sorted(path.name for path in folder.iterdir() if _SHARD.fullmatch(path.name) and path.name not in names)
    if stray:
        raise ValueError(f"{folder}: weights files that {INDEX} does not name: {', '.join(stray)}")
    found: dict[str, str] = {}
    for name in names:
        for tensor in read_header(folder / name):
            if tensor in found:
                raise ValueError(f"{folder}: tensor `{tensor}` is in both {found[tensor]} and {name}")
            found[tensor] = name
    wrong = [f"{tensor} ({name})" for tensor, name in weight_map.items() if found.get(tensor) != name]
    if wrong:
        raise ValueError(f"{folder}: tensors that {INDEX} names are not in their files: {', '.join(wrong)}")
    extra = sorted(set(found) - set(weight_map))
    if extra:
        raise ValueError(f"{folder}: tensors in files that {INDEX} does not name: {', '.join(extra)}")
    return [folder / name for name in names]


def load_params(folder: str | os.PathLike[str], config: ModelConfig, dtype: Any) -> dict[str, Any]:
    """Parameters of a model folder; every tensor is accounted for first.

    Args:
        folder: see `weight_files`.
        config: see `read_config`.
        dtype: of the parameters.

    Raises:
        FileNotFoundError: see `weight_files`.
        ValueError: see `weight_files` and `llama_names.check_tensors`.
    """
    files = weight_files(folder)
    entries = {name: entry for path in files for name, entry in read_header(path).items()}
    llama_names.check_tensors(str(folder), config, {name: entry["shape"] for name, entry in entries.items()})
    packed = [f"{name} ({entry['dtype']})" for name, entry in entries.items() if entry["dtype"] not in _FLOATS]
    if packed:
        raise ValueError(f"{folder}: tensors must be of {', '.join(_FLOATS)}; got {', '.join(packed)}")
    tensors: dict[str, np.ndarray] = {}
    for path in files:
        tensors.update(read_tensors(path))
    return llama_names.build_params(config, tensors.__getitem__, dtype)
