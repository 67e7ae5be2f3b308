"""The Llama family as pure functions of parameters, tokens and cache."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from specjax.models.attention import attend, update_cache, visibility_mask
from specjax.models.cache import KVCache
from specjax.models.config import ModelConfig
from specjax.models.layers import gated_feed_forward, linear, matmul, rms_norm, split_heads
from specjax.models.rope import rope_frequencies, rope_tables, rotate

Params = dict[str, Any]


@flax.struct.dataclass
class ForwardOutput:
    """What one forward pass gives.

    Attributes:
        hidden: states after the final norm, [B, T, d]; the head's input.
        features: outputs of the requested layers side by side, [B, T, number of layers * d].
        cache: the cache with the block written.
    """

    # Any: transformations rebuild pytrees with leaves that are no arrays (shapes, axes, None).
    hidden: Any
    features: Any
    cache: Any


def parameter_shapes(config: ModelConfig) -> Params:
    """Shapes of all parameters, in the tree that `forward` takes; matrices are [in, out]."""
    width, inner = config.hidden_size, config.intermediate_size
    query_width = config.num_heads * config.head_dim
    kv_width = config.num_kv_heads * config.head_dim
    layer: Params = {
        "input_norm": (width,),
        "q_proj": (width, query_width),
        "k_proj": (width, kv_width),
        "v_proj": (width, kv_width),
        "o_proj": (query_width, width),
        "post_attention_norm": (width,),
        "gate_proj": (width, inner),
        "up_proj": (width, inner),
        "down_proj": (inner, width),
    }
    if config.attention_bias:
        layer |= {"q_bias": (query_width,), "k_bias": (kv_width,), "v_bias": (kv_width,), "o_bias": (width,)}
    return {
        "embed_tokens": (config.vocab_size, width),
        "layers": [dict(layer) for _ in range(config.num_layers)],
        "final_norm": (width,),
        "lm_head": (width, config.vocab_size),
    }


def init_params(
    rng_key: PRNGKeyArray, config: ModelConfig, dtype: DTypeLike = jnp.float32, *, scale: float = 0.02
) -> Params:
    """Random parameters: normal matrices, norms of one; a tied head is the embedding's transpose.

    Args:
        rng_key: consumed.
        config: shapes.
        dtype: dtype of all parameters.
        scale: standard deviation of matrices and biases.

    Returns:
        Parameters in the tree of `parameter_shapes`.
    """
    shapes = parameter_shapes(config)
    leaves, treedef = jax.tree.flatten_with_path(shapes, is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(rng_key, len(leaves))
    del rng_key
    params = []
    for (path, shape), key in zip(leaves, keys, strict=True):
        if path[-1].key.endswith("norm"):
            params.append(jnp.ones(shape, dtype))
        else:
            params.append((jax.random.normal(key, shape, jnp.float32) * jnp.float32(scale)).astype(dtype))
    tree = jax.tree.unflatten(treedef, params)
    if config.tie_word_embeddings:
        tree["lm_head"] = tree["embed_tokens"].T
    return tree


def forward(
    params: Params,
    config: ModelConfig,
    tokens: Int[Array, "batch time"],
    cache: KVCache,
    start: Int[Array, "batch"],
    *,
    tree_mask: Bool[Array, "time block"] | Bool[np.ndarray, "time block"] | None = None,
    depth: Int[Array, "time"] | Int[np.ndarray, "time"] | tuple[int, ...] | None = None,
    block_offset: Int[Array, ""] | int = 0,
    feature_layers: tuple[int, ...] = (),
) -> ForwardOutput:
    """Runs a block of tokens against the cache: prefill, decoding and packed verification alike.

    The block's keys and values go to slots `start` to `start + T - 1`; query t has position
    `start + depth[t]` and sees the slots before `start` and block slot j where `tree_mask[t, j]`.
    Slots past a row's real length may hold anything: `start` alone says what is committed, so a
    right-padded prefill needs no mask.

    A block may also be run in parts, as a drafter does that learns the tokens of a depth only after the depth before:
    the queries of a part go to the slots from `start + block_offset` on, and `tree_mask` [T, N] says which of the
    block's N slots, earlier parts among them, each query sees.

    Args:
        params: parameters in the tree of `parameter_shapes`.
        config: the model's configuration, static.
        tokens: token ids, [B, T].
        cache: keys and values, S slots a row.
        start: number of committed tokens in each row's cache, [B]; the caller guarantees
            `start + T <= S`.
        tree_mask: ancestor mask of a packed tree, [T, T], or [T, N] of a part; None is causal.
        depth: depth of each query below `start`, [T]; None is 0 to T - 1.
        block_offset: place of the first query in its block, []; other than 0 it needs `tree_mask`.
        feature_layers: layers (0-based) whose outputs are returned, in this order.

    Returns:
        Final hidden states, features and the updated cache.

    Raises:
        ValueError: if the block does not fit into the cache, a feature layer does not exist,
            `tree_mask` comes without `depth` or `block_offset` without `tree_mask`.
    """
    is_whole = isinstance(block_offset, int) and block_offset == 0
    _check_arguments(config, tokens, cache, tree_mask is None, depth is None, is_whole, feature_layers)
    first_slot = start if is_whole else start + jnp.asarray(block_offset, start.dtype)
    num_queries = tokens.shape[1]
    offsets = np.arange(num_queries) if depth is None else depth
    positions = start[:, None] + jnp.asarray(offsets, start.dtype)[None, :]
    mask = visibility_mask(start, num_queries, cache.max_length, tree_mask)
    cos, sin = rope_tables(positions, rope_frequencies(config))

    x = jnp.take(params["embed_tokens"], tokens, axis=0, mode="clip")
    outputs: dict[int, Array] = {}
    all_keys, all_values = [], []
    for index, layer in enumerate(params["layers"]):
        normed = rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        queries = split_heads(linear(normed, layer["q_proj"], layer.get("q_bias")), config.num_heads)
        new_keys = split_heads(linear(normed, layer["k_proj"], layer.get("k_bias")), config.num_kv_heads)
        new_values = split_heads(linear(normed, layer["v_proj"], layer.get("v_bias")), config.num_kv_heads)
        keys = update_cache(cache.keys[index], rotate(new_keys, cos, sin), first_slot)
        values = update_cache(cache.values[index], new_values, first_slot)
        mixed = attend(rotate(queries, cos, sin), keys, values, mask)
        x = x + linear(mixed, layer["o_proj"], layer.get("o_bias"))
        normed = rms_norm(x, layer["post_attention_norm"], config.rms_norm_eps)
        x = x + gated_feed_forward(normed, layer["gate_proj"], layer["up_proj"], layer["down_proj"])
        all_keys.append(keys)
        all_values.append(values)
        if index in feature_layers:
            outputs[index] = x

    features = [outputs[index] for index in feature_layers]
    return ForwardOutput(
        hidden=rms_norm(x, params["final_norm"], config.rms_norm_eps),
        features=jnp.concatenate(features, axis=-1) if features else jnp.zeros((*x.shape[:2], 0), x.dtype),
        cache=KVCache(keys=tuple(all_keys), values=tuple(all_values)),
    )


def compute_logits(
    params: Params, config: ModelConfig, hidden: Float[Array, "*batch width"]
) -> Float[Array, "*batch vocab"]:
    """Logits of the target's head.

    Args:
        params: parameters; `lm_head` is [d, V].
        config: says which ids are padded rows.
        hidden: states after the final norm, [..., d].

    Returns:
        Logits [..., V] float32; padded ids are -inf.
    """
    kernel = params["lm_head"]
    logits = matmul(hidden, kernel)
    if config.num_valid_tokens is None or config.num_valid_tokens == config.vocab_size:
        return logits
    valid = jnp.arange(config.vocab_size) < config.num_valid_tokens
    return jnp.where(valid, logits, -jnp.inf)


def _check_arguments(
    config: ModelConfig,
    tokens: Array,
    cache: KVCache,
    causal: bool,
    default_depth: bool,
    is_whole: bool,
    feature_layers: tuple[int, ...],
) -> None:
    if tokens.shape[0] != cache.batch:
        raise ValueError(f"`tokens` must have the cache's {cache.batch} rows; got {tokens.shape[0]}")
    if tokens.shape[1] > cache.max_length:
        raise ValueError(f"`tokens` must fit into the cache ({cache.max_length} slots); got {tokens.shape[1]} columns")
    if len(cache.keys) != config.num_layers:
        raise ValueError(f"the cache must have {config.num_layers} layers; got {len(cache.keys)}")
    if not causal and default_depth:
        raise ValueError("`tree_mask` must come with `depth`, the depth of each query; got none")
    if causal and not is_whole:
        raise ValueError("`block_offset` must come with `tree_mask`, what each query sees of the block; got none")
    for layer in feature_layers:
        if not 0 <= layer < config.num_layers:
            raise ValueError(f"`feature_layers` must be in [0, {config.num_layers}); got {layer}")
