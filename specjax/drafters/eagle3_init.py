"""Initial parameters of an EAGLE-3 drafter: random, or taken from the target so that small budgets go further."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from specjax.drafters.eagle3_layer import NUM_FEATURE_LAYERS, Eagle3Config, Params, parameter_shapes
from specjax.heads import HEAD_INITS, HeadSource, get_head
from specjax.models.config import ModelConfig

__all__ = ["HEAD_INITS", "init_drafter"]

# The two lower features start as a faint addition to the passed-through last one.
_MINOR_SCALE = 0.02


def init_drafter(
    rng_key: PRNGKeyArray,
    config: Eagle3Config,
    target_params: dict[str, Any],
    target_config: ModelConfig,
    *,
    head_init: str = "activation_aware",
    covariance: Float[np.ndarray, "rows columns"] | None = None,
    warm_start: bool = True,
    source: HeadSource | None = None,
    base: Params | None = None,
    dtype: DTypeLike = jnp.float32,
) -> Params:
    """Trainable parameters of a drafter (the frozen embedding is not among them).

    Args:
        rng_key: consumed.
        config: shape of the drafter.
        target_params: parameters of the target; only its last layer, final norm and head are read.
        target_config: configuration of the target.
        head_init: "random"; "svd", the dense head truncated to the rank; "frequency_svd", the same with errors of
            frequent tokens weighing more; "activation_aware", the same with the least error over the states that
            occur (needs `covariance`). A full head takes the dense one unless it is "random".
        covariance: second moment of the head's inputs, [d, d].
        warm_start: copy attention, feed-forward part and norms from the target's last layer and pass its latest
            feature through `fc`; otherwise all of these are random.
        source: what else heads are made from; its `weight`, `method` and `covariance` are those given here. None is
            nothing else.
        base: parameters of a drafter of the same shape with a full head, to start from in the place of the target's
            layer and head.
        dtype: dtype of all parameters.

    Returns:
        `{"fc", "midlayer", "norm", "head"}` and, where the configuration has it, `"fc_norm"`.

    Raises:
        ValueError: if the option is unknown, the covariance is missing, or the target's shapes do not fit.
    """
    if head_init not in HEAD_INITS:
        raise ValueError(f"`head_init` must be one of {HEAD_INITS}; got {head_init!r}")
    layer_key, head_key = jax.random.split(rng_key)
    del rng_key
    params = _random_layer(layer_key, config)
    if base is not None:
        params = _from_base(params, base)
    elif warm_start:
        _check_same_shape(config, target_config)
        params = _from_last_layer(params, config, target_params)
    weight = target_params["lm_head"] if base is None else base["head"]["kernel"]
    source = dataclasses.replace(source or HeadSource(), weight=weight, method=head_init, covariance=covariance)
    params["head"] = get_head(config.head.kind).start(head_key, config.head, source)

    def in_dtype(leaf: Any) -> Array:
        # Token ids stay whole numbers.
        return jnp.asarray(leaf, dtype if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf.dtype)

    return jax.tree.map(in_dtype, params)


def _random_layer(rng_key: PRNGKeyArray, config: Eagle3Config) -> Params:
    """Matrices normal with variance 1 / inputs, norms one."""
    leaves, treedef = jax.tree.flatten(parameter_shapes(config), is_leaf=lambda node: isinstance(node, tuple))
    keys = jax.random.split(rng_key, len(leaves))
    del rng_key
    arrays = [
        jnp.ones(shape, jnp.float32)
        if len(shape) == 1
        else jax.random.normal(key, shape, jnp.float32) * jnp.float32(shape[0] ** -0.5)
        for shape, key in zip(leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(treedef, arrays)


def _check_same_shape(config: Eagle3Config, target_config: ModelConfig) -> None:
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
        ours, theirs = getattr(config, name), getattr(target_config, name)
        if ours != theirs:
            raise ValueError(f"`{name}` must be the target's {theirs} for a warm start; got {ours}")


def _from_base(params: Params, base: Params) -> Params:
    """The parameters of another drafter, all but its head and embedding.

    Raises:
        ValueError: if it has other parameters or shapes, or no full head.
    """
    taken = {name: base.get(name) for name in params}
    ours, theirs = (jax.tree.map(lambda leaf: tuple(leaf.shape), tree) for tree in (params, taken))
    if ours != theirs:
        raise ValueError(f"the base drafter must have parameters of shapes {ours}; got {theirs}")
    if "kernel" not in base["head"] or "ids" in base["head"]:
        raise ValueError(f"the base drafter must have a full head; got one of {sorted(base['head'])}")
    return taken


def _from_last_layer(params: Params, config: Eagle3Config, target_params: dict[str, Any]) -> Params:
    """The target's last layer in the place of the draft layer.

    The state half of q, k and v reads what the target's layer would read; the embedding half starts random and small.
    """
    source = target_params["layers"][-1]
    layer = dict(params["midlayer"])
    for name in ("o_proj", "gate_proj", "up_proj", "down_proj", "post_attention_norm"):
        layer[name] = jnp.asarray(source[name], jnp.float32)
    layer["hidden_norm"] = jnp.asarray(source["input_norm"], jnp.float32)
    for name in ("q_proj", "k_proj", "v_proj"):
        embedding_half = layer[name][: config.target_hidden_size] * jnp.float32(_MINOR_SCALE)
        layer[name] = jnp.concatenate((embedding_half, jnp.asarray(source[name], jnp.float32)), axis=0)
    minor = params["fc"] * jnp.float32(_MINOR_SCALE)
    last = (NUM_FEATURE_LAYERS - 1) * config.target_hidden_size
    fc = minor.at[last:].add(jnp.eye(config.hidden_size, dtype=jnp.float32))
    norm = jnp.asarray(target_params["final_norm"], jnp.float32)
    return {**params, "midlayer": layer, "fc": fc, "norm": norm}
