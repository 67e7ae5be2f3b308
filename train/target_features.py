"""One frozen forward of the target over packed rows: what the drafter reads and what it must imitate."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.models import KVCache, ModelConfig, forward


@functools.partial(jax.jit, static_argnames=("config", "feature_layers"))
def packed_features(
    params: Any,
    config: ModelConfig,
    tokens: Int[Array, "rows time"],
    segment_ids: Int[Array, "rows time"],
    feature_layers: tuple[int, ...],
) -> tuple[Float[Array, "rows time features"], Float[Array, "rows time width"]]:
    """Features and final hidden states of packed rows, each sequence as if it stood alone.

    A token sees the earlier tokens of its own segment and has its position within it.

    Args:
        params: the target's parameters.
        config: its configuration, static.
        tokens: token ids, [R, T].
        segment_ids: sequence of each token, [R, T]; padding is 0 and forms a segment of its own.
        feature_layers: layers (0-based) whose outputs are returned, static.

    Returns:
        Features [R, T, 3d] and hidden states after the final norm [R, T, d].
    """
    length = tokens.shape[1]
    dtype = params["embed_tokens"].dtype
    places = jnp.arange(length, dtype=jnp.int32)

    def row(row_tokens: Int[Array, "time"], segments: Int[Array, "time"]) -> tuple[Array, Array]:
        together = segments[:, None] == segments[None, :]
        first = jnp.argmax(together, axis=1).astype(jnp.int32)
        output = forward(
            params,
            config,
            row_tokens[None],
            KVCache.zeros(config, 1, length, dtype),
            jnp.zeros(1, jnp.int32),
            tree_mask=together & (places[None, :] <= places[:, None]),
            depth=places - first,
            feature_layers=feature_layers,
        )
        return output.features[0], output.hidden[0]

    return jax.vmap(row)(tokens, segment_ids)
