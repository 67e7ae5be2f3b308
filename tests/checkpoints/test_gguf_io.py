"""GGUF files: a model written in llama.cpp's conventions comes back as the folder it was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_folders import CONFIG, random_tensors, write_folder

from specjax.checkpoints import huggingface
from specjax.checkpoints.gguf_io import load_gguf
from specjax.models import RopeScaling
from specjax.models.config import ModelConfig
from specjax.models.rope import rope_frequencies

NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    part, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def interleave(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp's converter orders them: row 2i of a head is i, row 2i + 1 is i + half."""
    head_dim = values.shape[0] // num_heads
    order = [
        head * head_dim + index % 2 * (head_dim // 2) + index // 2
        for head in range(num_heads)
        for index in range(head_dim)
    ]
    return values[order]


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    config: dict[str, Any] = CONFIG,
    quantized: tuple[str, ...] = (),
    omit: tuple[str, ...] = (),
    extra: dict[str, np.ndarray] | None = None,
    fields: dict[str, str] | None = None,
    family: str = "llama",
) -> Path:
    writer = gguf.GGUFWriter(path, family)
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "vocab_size": config["vocab_size"],
    }
    for name, value in numbers.items():
        if name not in omit:
            writer.add_uint32(f"{family}.{name}", value)
    writer.add_float32(f"{family}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{family}.rope.freq_base", config.get("rope_theta", 10000.0))
    writer.add_uint32("tokenizer.ggml.bos_token_id", config["bos_token_id"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", config["eos_token_id"])
    writer.add_array("tokenizer.ggml.tokens", [f"t{index}" for index in range(config["vocab_size"])])
    for name, value in (fields or {}).items():
        writer.add_string(name, value)
    for name, values in tensors.items():
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for part, num_heads in heads.items():
            if f".{part}." in name:
                values = interleave(values, num_heads)
        if name in quantized:
            data = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(gguf_name(name), data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(values))
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_round_trip_restores_the_order_of_rotary_pairs(tmp_path: Path) -> None:
    """Four heads of six: a permutation that is its own inverse would not be noticed with heads of two or four."""
    config = CONFIG | {"head_dim": 6}
    generator = np.random.default_rng(1)
    tensors = random_tensors()
    for layer in range(2):
        for part, shape in {"q": (24, 8), "k": (12, 8), "v": (12, 8), "o": (8, 24)}.items():
            name = f"model.layers.{layer}.self_attn.{part}_proj.weight"
            tensors[name] = generator.normal(size=shape).astype(np.float32)
    folder = write_folder(tmp_path / "folder", tensors, config=config)
    expected_config = huggingface.read_config(folder)
    expected = huggingface.load_params(folder, expected_config, jnp.float32)
    read_config, params, fields = load_gguf(write_gguf(tmp_path / "model.gguf", tensors, config=config), jnp.float32)
    assert read_config == expected_config
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    assert fields["tokenizer.ggml.tokens"][3] == "t3"


def test_quantised_tensors_are_dequantised(tmp_path: Path) -> None:
    config = CONFIG | {"hidden_size": 32, "head_dim": 8}
    tensors = {}
    generator = np.random.default_rng(2)
    for name, tensor in random_tensors().items():
        shape = tuple(32 if size == 8 else 16 if size == 4 else size for size in tensor.shape)
        tensors[name] = generator.normal(size=shape).astype(np.float32)
    name = "model.layers.1.self_attn.q_proj.weight"
    path = write_gguf(tmp_path / "model.gguf", tensors, config=config, quantized=(name, "model.embed_tokens.weight"))
    _, params, _ = load_gguf(path, jnp.float32)
    # Eight bits over the largest of 32 normal numbers, which is below 5: steps of at most 5 / 127.
    difference = np.abs(np.asarray(params["layers"][1]["q_proj"]) - tensors[name].T)
    assert 0 < difference.max() <= 5 / 127 / 2
    np.testing.assert_array_equal(params["lm_head"], tensors["lm_head.weight"].T)


def test_file_without_a_head_is_tied(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["lm_head.weight"]
    config, params, _ = load_gguf(write_gguf(tmp_path / "model.gguf", tensors), jnp.bfloat16)
    assert config.tie_word_embeddings
    np.testing.assert_array_equal(params["lm_head"], params["embed_tokens"].T)
    assert params["lm_head"].dtype == jnp.bfloat16


def llama3_factors(scaling: RopeScaling, head_dim: int, theta: float) -> np.ndarray:
    """As llama.cpp's converter computes them."""
    assert scaling.low_freq_factor is not None
    assert scaling.high_freq_factor is not None
    assert scaling.original_max_position_embeddings is not None
    factors = []
    for exponent in np.arange(0, head_dim, 2) / head_dim:
        wavelength = 2 * np.pi * theta**exponent
        if wavelength < scaling.original_max_position_embeddings / scaling.high_freq_factor:
            factors.append(1.0)
        elif wavelength > scaling.original_max_position_embeddings / scaling.low_freq_factor:
            factors.append(scaling.factor)
        else:
            smooth = scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor
            smooth /= scaling.high_freq_factor - scaling.low_freq_factor
            factors.append(1 / ((1 - smooth) / scaling.factor + smooth))
    return np.asarray(factors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_case_k9_rotary_factors_become_llama3_scaling(tmp_path: Path, factor: float) -> None:
    tensors = random_tensors()
    shapes = {"q": (64, 8), "k": (32, 8), "v": (32, 8), "o": (8, 64)}
    for layer in range(2):
        tensors |= {
            f"model.layers.{layer}.self_attn.{part}_proj.weight": np.ones(shape, np.float32)
            for part, shape in shapes.items()
        }
    scaling = RopeScaling("llama3", factor, 1.0, 4.0, 8192)
    factors = llama3_factors(scaling, 16, 500000.0)
    assert len(set(factors)) > 2
    path = write_gguf(
        tmp_path / "model.gguf",
        tensors,
        config=CONFIG | {"head_dim": 16, "rope_theta": 500000.0},
        extra={"rope_freqs.weight": factors},
    )
    config, _, _ = load_gguf(path, jnp.float32)
    assert config.rope_scaling == scaling
    plain = rope_frequencies(ModelConfig.from_huggingface(CONFIG | {"head_dim": 16, "rope_theta": 500000.0}))
    np.testing.assert_allclose(rope_frequencies(config), plain / factors, rtol=1e-6)


def test_other_rotary_factors_are_refused(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.asarray([3.0], np.float32)}
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), extra=extra)
    with pytest.raises(ValueError, match=r"`rope_freqs.weight` must be the factors of llama3 scaling"):
        load_gguf(path, jnp.float32)


def test_missing_and_unexpected_tensors_are_one_error(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    path = write_gguf(tmp_path / "model.gguf", tensors, extra={"blk.0.ssm_a": np.ones(4, np.float32)})
    with pytest.raises(ValueError, match=r"missing: model.layers.1.mlp.up_proj.weight; unexpected: blk.0.ssm_a"):
        load_gguf(path, jnp.float32)


def test_wrong_shapes_name_the_tensor(tmp_path: Path) -> None:
    tensors = random_tensors()
    tensors["model.norm.weight"] = np.ones(9, np.float32)
    path = write_gguf(tmp_path / "model.gguf", tensors)
    with pytest.raises(ValueError, match=r"wrong shapes: model.norm.weight must be \[8\], got \[9\]"):
        load_gguf(path, jnp.float32)


def test_missing_metadata_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), omit=("feed_forward_length",))
    with pytest.raises(ValueError, match=r"lacks `llama.feed_forward_length`"):
        load_gguf(path, jnp.float32)


def test_other_families_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), family="mamba")
    with pytest.raises(ValueError, match=r"`general.architecture` must be 'llama'; got 'mamba'"):
        load_gguf(path, jnp.float32)


def test_other_scalings_are_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", random_tensors(), fields={"llama.rope.scaling.type": "yarn"})
    with pytest.raises(ValueError, match=r"`llama.rope.scaling.type` must be none or linear; got 'yarn'"):
        load_gguf(path, jnp.float32)


@pytest.mark.parametrize("keep", [0, 3, 20, 300, 0.6, -1])
def test_case_h14_cut_files_are_refused(tmp_path: Path, keep: float) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", random_tensors()).read_bytes()
    # Trailing padding of the last tensor may be lost without harm: cut one byte of data.
    size = {-1: len(whole.rstrip(b"\0")) - 1, 0.6: int(0.6 * len(whole))}.get(keep, int(keep))
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:size])
    with pytest.raises(ValueError, match=r"cut.gguf: not a whole GGUF file"):
        load_gguf(path, jnp.float32)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(b"PK\3\4" + bytes(1000))
    with pytest.raises(ValueError, match=r"other.gguf: not a whole GGUF file \(GGUF magic invalid\)"):
        load_gguf(path, jnp.float32)
    with pytest.raises(FileNotFoundError, match="no such weights file"):
        load_gguf(tmp_path / "none.gguf", jnp.float32)
