"""Names and layouts of a Llama model's tensors in checkpoints, as one table.

Checkpoints store matrices as [out, in]; parameters here are [in, out], which is much faster on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.models import ModelConfig

# Parameter of a layer -> (tensor name without the layer's prefix, whether it is a matrix to transpose).
LAYER_TENSORS: dict[str, tuple[str, bool]] = {
    "input_norm": ("input_layernorm.weight", False),
    "q_proj": ("self_attn.q_proj.weight", True),
    "k_proj": ("self_attn.k_proj.weight", True),
    "v_proj": ("self_attn.v_proj.weight", True),
    "o_proj": ("self_attn.o_proj.weight", True),
    "post_attention_norm": ("post_attention_layernorm.weight", False),
    "gate_proj": ("mlp.gate_proj.weight", True),
    "up_proj": ("mlp.up_proj.weight", True),
    "down_proj": ("mlp.down_proj.weight", True),
}
BIAS_TENSORS: dict[str, tuple[str, bool]] = {
    "q_bias": ("self_attn.q_proj.bias", False),
    "k_bias": ("self_attn.k_proj.bias", False),
    "v_bias": ("self_attn.v_proj.bias", False),
    "o_bias": ("self_attn.o_proj.bias", False),
}
EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
# Buffers that old checkpoints carry although they follow from the configuration.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq",)


def layer_tensors(config: ModelConfig) -> dict[str, tuple[str, bool]]:
    """The table of one layer, with biases where the model has them."""
    return {**LAYER_TENSORS, **BIAS_TENSORS} if config.attention_bias else LAYER_TENSORS


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint, by name.

    Args:
        config: the model.

    Returns:
        Shapes in the checkpoint's own layout; `lm_head.weight` is absent where embeddings are tied.
    """
    width, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_norm": (width,),
        "q_proj": (queries, width),
        "k_proj": (keys, width),
        "v_proj": (keys, width),
        "o_proj": (width, queries),
        "post_attention_norm": (width,),
        "gate_proj": (inner, width),
        "up_proj": (inner, width),
        "down_proj": (width, inner),
        "q_bias": (queries,),
        "k_bias": (keys,),
        "v_bias": (keys,),
        "o_bias": (width,),
    }
    expected = {EMBEDDING: (config.vocab_size, width), FINAL_NORM: (width,)}
    if not config.tie_word_embeddings:
        expected[HEAD] = (config.vocab_size, width)
    for index in range(config.num_layers):
        for parameter, (name, _) in layer_tensors(config).items():
            expected[f"model.layers.{index}.{name}"] = shapes[parameter]
    return expected


def check_tensors(where: str, config: ModelConfig, shapes: Mapping[str, Iterable[int]]) -> None:
    """Accounts for every tensor before anything is computed.

    Args:
        where: the folder or file, for messages.
        config: the model.
        shapes: shape of each tensor found, by name.

    Raises:
        ValueError: listing all missing and unexpected tensors, or all wrong shapes.
    """
    expected = expected_shapes(config)
    # A tied model may store its head a second time; loading reads the embedding.
    optional = {HEAD} if config.tie_word_embeddings else set()
    missing = sorted(set(expected) - set(shapes))
    unexpected = sorted(n for n in set(shapes) - set(expected) - optional if not n.endswith(IGNORED_SUFFIXES))
    if missing or unexpected:
        raise ValueError(
            f"{where}: the tensors do not fit the configuration; "
            f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}"
        )
    wrong = [
        f"{name} must be {list(shape)}, got {list(shapes[name])}"
        for name, shape in expected.items()
        if tuple(shapes[name]) != shape
    ]
    if wrong:
        raise ValueError(f"{where}: wrong shapes: {'; '.join(wrong)}")


def build_params(config: ModelConfig, get: Callable[[str], np.ndarray], dtype: Any) -> dict[str, Any]:
    """Parameters from tensors in the checkpoint's layout.

    Args:
        config: the model.
        get: returns a tensor by its checkpoint name.
        dtype: of the parameters.

    Returns:
        The nested dict that `specjax.models.forward` takes; `lm_head` is always there.
    """

    def take(name: str, transpose: bool) -> Any:
        tensor = get(name)
        # Always one copy: a view of a mapped file would keep the file open and change with it.
        return jnp.asarray(np.array(tensor.T if transpose else tensor, dtype, order="C"))

    table = layer_tensors(config)
    embedding = take(EMBEDDING, False)
    return {
        "embed_tokens": embedding,
        "layers": [
            {parameter: take(f"model.layers.{index}.{name}", flip) for parameter, (name, flip) in table.items()}
            for index in range(config.num_layers)
        ],
        "final_norm": take(FINAL_NORM, False),
        "lm_head": embedding.T if config.tie_word_embeddings else take(HEAD, True),
    }
