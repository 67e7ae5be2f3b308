"""Llama models from GGUF files, dequantised by the `gguf` package.

llama.cpp stores the rows of q and k so that rotary pairs lie side by side; the half-split convention used here
needs them back in their original order.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from specjax.checkpoints import llama_names
from specjax.models import ModelConfig, RopeScaling
from specjax.models.rope import rope_frequencies

_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_GLOBAL = {
    "token_embd.weight": llama_names.EMBEDDING,
    "output_norm.weight": llama_names.FINAL_NORM,
    "output.weight": llama_names.HEAD,
}
_ROPE_FACTORS = "rope_freqs.weight"
# Published constants of llama3 scaling: they are the same for all models that have it, only the factor differs.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class _PlainReader(gguf.GGUFReader):
    """A reader whose many small slices are those of a plain array: three times faster than of a memory map."""

    @property
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._plain = mapped.view(np.ndarray)


def open_gguf(path: str | os.PathLike[str]) -> gguf.GGUFReader:
    """Opens a GGUF file.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is not GGUF, or is cut short.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weights file")
    try:
        return _PlainReader(str(path))
    except Exception as error:
        # The package raises whatever its array reads run into: IndexError and ValueError for cut files.
        raise ValueError(f"{path}: not a whole GGUF file ({error})") from error


def read_fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The metadata as plain values."""
    return {name: field.contents() for name, field in reader.fields.items()}


def read_config(reader: gguf.GGUFReader, fields: dict[str, Any], *, where: str) -> ModelConfig:
    """The configuration that metadata and tensor names describe.

    Args:
        reader: see `open_gguf`.
        fields: see `read_fields`.
        where: the file, for messages.

    Raises:
        ValueError: if the family is another one, or a field is missing.
    """
    family = fields.get("general.architecture")
    if family != "llama":
        raise ValueError(f"{where}: `general.architecture` must be 'llama'; got {family!r}")

    def need(name: str) -> Any:
        value = fields.get(f"llama.{name}")
        if value is None:
            raise ValueError(f"{where}: the metadata lacks `llama.{name}`")
        return value

    tensors = {tensor.name: tensor for tensor in reader.tensors}
    num_heads, width = int(need("attention.head_count")), int(need("embedding_length"))
    tokens = fields.get("tokenizer.ggml.tokens") or ()
    eos = [fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
    scaling_kind = fields.get("llama.rope.scaling.type", "none")
    scaling = None
    if scaling_kind == "linear":
        scaling = RopeScaling(kind="linear", factor=float(need("rope.scaling.factor")))
    elif scaling_kind != "none":
        raise ValueError(f"{where}: `llama.rope.scaling.type` must be none or linear; got {scaling_kind!r}")
    head_dim = int(fields.get("llama.attention.key_length") or width // num_heads)
    config = ModelConfig(
        vocab_size=int(fields.get("llama.vocab_size") or len(tokens)),
        hidden_size=width,
        intermediate_size=int(need("feed_forward_length")),
        num_layers=int(need("block_count")),
        num_heads=num_heads,
        num_kv_heads=int(fields.get("llama.attention.head_count_kv") or num_heads),
        head_dim=head_dim,
        rope_theta=float(fields.get("llama.rope.freq_base") or 10000.0),
        rope_scaling=scaling,
        # Stored as float32; the shortest decimal is what the model's author wrote.
        rms_norm_eps=float(str(np.float32(need("attention.layer_norm_rms_epsilon")))),
        max_position_embeddings=int(need("context_length")),
        # A file without a separate head uses the embedding.
        tie_word_embeddings="output.weight" not in tensors,
        attention_bias="blk.0.attn_q.bias" in tensors,
        bos_token_id=_as_int(fields.get("tokenizer.ggml.bos_token_id")),
        eos_token_ids=tuple(dict.fromkeys(int(token) for token in eos if token is not None)),
    )
    if _ROPE_FACTORS not in tensors:
        return config
    factors = gguf.dequantize(tensors[_ROPE_FACTORS].data, tensors[_ROPE_FACTORS].tensor_type)
    return dataclasses.replace(config, rope_scaling=_scaling_of_factors(factors.ravel(), config, where))


def load_gguf(path: str | os.PathLike[str], dtype: Any) -> tuple[ModelConfig, dict[str, Any], dict[str, Any]]:
    """Configuration, parameters and metadata of a GGUF file.

    Args:
        path: the file.
        dtype: of the parameters.

    Returns:
        The configuration, the parameters, and the metadata for tokenizer and template.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is broken, of another family, or its tensors do not fit its metadata.
    """
    reader = open_gguf(path)
    fields = read_fields(reader)
    config = read_config(reader, fields, where=str(path))
    stored = {_checkpoint_name(tensor.name): tensor for tensor in reader.tensors if tensor.name != _ROPE_FACTORS}
    # GGUF lists dimensions from the innermost one on.
    shapes = {name: tuple(int(size) for size in reversed(tensor.shape)) for name, tensor in stored.items()}
    llama_names.check_tensors(str(path), config, shapes)

    def get(name: str) -> np.ndarray:
        tensor = stored[name]
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shapes[name])
        if ".q_proj." in name:
            return _restore_halves(values, config.num_heads)
        return _restore_halves(values, config.num_kv_heads) if ".k_proj." in name else values

    return config, llama_names.build_params(config, get, dtype), fields


def _restore_halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows (head, pair, which of the two) back to (head, which half, pair)."""
    pairs = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _checkpoint_name(name: str) -> str:
    if name in _GLOBAL:
        return _GLOBAL[name]
    block, _, rest = name.partition(".")
    index, _, tensor = rest.partition(".")
    if block == "blk" and index.isdecimal() and tensor in _LAYER:
        return f"model.layers.{index}.{_LAYER[tensor]}"
    return name


def _scaling_of_factors(factors: np.ndarray, config: ModelConfig, where: str) -> RopeScaling:
    """The llama3 scaling that gives these factors: the format keeps only what each frequency is divided by."""
    scaling = RopeScaling(kind="llama3", factor=float(np.max(factors)), **_LLAMA3_ROPE)
    scaled = rope_frequencies(dataclasses.replace(config, rope_scaling=scaling))
    plain = rope_frequencies(dataclasses.replace(config, rope_scaling=None))
    if factors.shape != plain.shape or not np.allclose(plain / scaled, factors, rtol=1e-4, atol=0.0):
        raise ValueError(f"{where}: `{_ROPE_FACTORS}` must be the factors of llama3 scaling; got others")
    return scaling


def _as_int(value: Any) -> int | None:
    return None if value is None else int(value)
