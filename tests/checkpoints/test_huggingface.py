"""Model folders: every tensor accounted for, in one file or many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from model_folders import CONFIG, random_tensors, read_index, write_folder, write_index

from specjax.checkpoints.huggingface import load_params, read_config, weight_files
from specjax.models import parameter_shapes

SHARD_1, SHARD_2 = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NORM, HEAD = "model.norm.weight", "lm_head.weight"
GATE = "model.layers.1.mlp.gate_proj.weight"


def load(folder: Path, dtype: Any = jnp.float32) -> Any:
    return load_params(folder, read_config(folder), dtype)


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_matrices_arrive_transposed_under_their_names(tmp_path: Path, num_shards: int) -> None:
    tensors = random_tensors()
    folder = write_folder(tmp_path, tensors, num_shards=num_shards)
    params = load(folder)
    assert jax.tree.map(lambda leaf: leaf.shape, params) == parameter_shapes(read_config(folder))
    np.testing.assert_array_equal(params["embed_tokens"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["lm_head"], tensors[HEAD].T)
    np.testing.assert_array_equal(params["layers"][1]["gate_proj"], tensors[GATE].T)
    np.testing.assert_array_equal(params["layers"][0]["k_proj"], tensors["model.layers.0.self_attn.k_proj.weight"].T)
    np.testing.assert_array_equal(params["final_norm"], tensors[NORM])


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16, np.float64])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_stored_and_wanted_dtypes_are_independent(tmp_path: Path, stored: Any, wanted: Any) -> None:
    tensors = {name: tensor.astype(stored) for name, tensor in random_tensors().items()}
    params = load(write_folder(tmp_path, tensors), wanted)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(wanted)}
    expected = tensors[GATE].T.astype(wanted)
    np.testing.assert_array_equal(np.asarray(params["layers"][1]["gate_proj"]), expected)


def test_loaded_parameters_do_not_hang_on_the_file(tmp_path: Path) -> None:
    tensors = random_tensors()
    folder = write_folder(tmp_path, tensors)
    params = load(folder)
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-400, 2)
        file.write(bytes(400))
    np.testing.assert_array_equal(params["embed_tokens"], tensors["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["final_norm"], tensors[NORM])


@pytest.mark.parametrize("stored_head", [False, True])
def test_tied_models_take_their_head_from_the_embedding(tmp_path: Path, stored_head: bool) -> None:
    tensors = random_tensors()
    if not stored_head:
        del tensors[HEAD]
    params = load(write_folder(tmp_path, tensors, config={"tie_word_embeddings": True}))
    np.testing.assert_array_equal(params["lm_head"], tensors["model.embed_tokens.weight"].T)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors() | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32)}
    load(write_folder(tmp_path, tensors))


def test_missing_and_unexpected_tensors_are_one_error(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[GATE], tensors[HEAD]
    tensors |= {"model.layers.2.input_layernorm.weight": np.ones(8, np.float32), "extra": np.ones(1, np.float32)}
    with pytest.raises(ValueError, match=f"missing: {HEAD}, {GATE}; unexpected: extra, model.layers.2.input"):
        load(write_folder(tmp_path, tensors))


def test_wrong_shapes_are_listed_before_anything_is_read(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors[GATE] = np.ascontiguousarray(tensors[GATE].T)
    with pytest.raises(ValueError, match=rf"wrong shapes: {GATE} must be \[12, 8\], got \[8, 12\]"):
        load(write_folder(tmp_path, tensors))


def test_packed_integers_are_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors[GATE] = tensors[GATE].astype(np.int8)
    with pytest.raises(ValueError, match=rf"must be of F64, F32, F16, BF16; got {GATE} \(I8\)"):
        load(write_folder(tmp_path, tensors))


def test_case_h13_missing_shard(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors(), num_shards=2)
    (folder / SHARD_2).unlink()
    with pytest.raises(FileNotFoundError, match=f"weights files that are missing: {SHARD_2}"):
        load(folder)


def test_case_h13_shard_that_the_index_does_not_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors(), num_shards=2)
    safetensors.numpy.save_file({"x": np.ones(1)}, folder / "model-00003-of-00003.safetensors")
    with pytest.raises(ValueError, match=r"does not name: model-00003-of-00003.safetensors"):
        load(folder)


def test_other_files_beside_the_shards_are_no_matter(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors(), num_shards=2)
    safetensors.numpy.save_file({"x": np.ones(1)}, folder / "consolidated.safetensors")
    load(folder)


def test_case_h13_tensor_of_the_index_is_not_in_its_shard(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors(), num_shards=2)
    index = read_index(folder)
    moved = SHARD_1 if index[GATE] == SHARD_2 else SHARD_2
    write_index(folder, index | {GATE: moved})
    with pytest.raises(ValueError, match=rf"are not in their files: {GATE} \({moved}\)"):
        load(folder)
    write_index(folder, index | {"ghost": SHARD_1})
    with pytest.raises(ValueError, match=rf"are not in their files: ghost \({SHARD_1}\)"):
        load(folder)


def test_case_h13_tensor_in_two_shards(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors(), num_shards=2)
    for name in (SHARD_1, SHARD_2):
        part = safetensors.numpy.load_file(folder / name)
        safetensors.numpy.save_file(part | {NORM: np.ones(8, np.float32)}, folder / name)
    with pytest.raises(ValueError, match=f"tensor `{NORM}` is in both {SHARD_1} and {SHARD_2}"):
        load(folder)


def test_case_h13_tensor_that_the_index_does_not_name(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors(), num_shards=2)
    index = read_index(folder)
    del index[GATE]
    write_index(folder, index)
    with pytest.raises(ValueError, match=f"does not name: {GATE}"):
        load(folder)


def test_case_h14_cut_shard_is_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors(), num_shards=2)
    (folder / SHARD_2).write_bytes((folder / SHARD_2).read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{SHARD_2}: truncated"):
        load(folder)


def test_folder_without_weights(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors())
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"no weights; expected model.safetensors or"):
        weight_files(folder)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_without_a_map(tmp_path: Path, text: str) -> None:
    folder = write_folder(tmp_path, random_tensors(), num_shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="`weight_map` must be an object"):
        weight_files(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "config.json: not JSON"), ("[]", "must hold a JSON object; got list"), ("{}", "config.json: .* lacks")],
)
def test_broken_configurations_name_their_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_config(tmp_path)


def test_missing_configuration(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config.json: no such file"):
        read_config(tmp_path)


def test_end_tokens_of_generation_count_too(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, random_tensors())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2, 7]}))
    assert read_config(folder).eos_token_ids == (2, 5, 7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": CONFIG["vocab_size"]}))
    with pytest.raises(ValueError, match=r"generation_config.json: `eos_token_ids` must be in .*; got 13"):
        read_config(folder)
