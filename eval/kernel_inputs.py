"""Fresh random inputs of the kernels' operations on a device, and the functions to call with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from eval.kernel_floors import HEAD, Floor
from pallas_kernels._platform import Implementation
from pallas_kernels.block_verifier import aot_cases as verifier_cases
from pallas_kernels.block_verifier import shapes as verifier_shapes
from pallas_kernels.block_verifier.api import row_statistics
from pallas_kernels.block_verifier.chains import chain_rows
from pallas_kernels.low_rank_head import api as head_api
from pallas_kernels.low_rank_head import shapes as head_shapes
from pallas_kernels.low_rank_head import weights as head_weights


def operation(floor: Floor, implementation: Implementation) -> Callable[..., Any]:
    """`function(buffers, variation)`: the operation on large buffers and small arrays that differ from call to call."""
    if floor.kernel == HEAD:
        return _head_operation(floor.op, implementation)
    shape = verifier_shapes.get_shape(floor.shape)
    if floor.op != "log_normalisers":
        run = verifier_cases.function(floor.op, shape, implementation)
        return lambda buffers, variation: run(*buffers, *variation)
    rows = chain_rows(shape.batch, shape.num_drafts, shape.draft_length)

    def normalise(buffers: Any, variation: Any) -> Any:
        tokens, target, draft = variation
        found = row_statistics(
            buffers[0],
            buffers[1],
            tokens,
            rows.target_row,
            rows.draft_row,
            target_inverse_temperature=target,
            draft_inverse_temperature=draft,
            implementation=implementation,
        )
        return found.target.log_normaliser, found.draft.log_normaliser, found.target_log_prob, found.draft_log_prob

    return normalise


def _head_operation(op: str, implementation: Implementation) -> Callable[..., Any]:
    def run(head: Any, variation: Any) -> Any:
        hidden, words = variation
        if op == "sample":
            return head_api.sample(hidden, head, jax.random.wrap_key_data(words), implementation=implementation)
        return getattr(head_api, op)(hidden, head, implementation=implementation)

    return run


def make_buffers(rng_key: jax.Array, floor: Floor) -> Any:
    """The arrays that a call streams from memory: a head's weights, or both laws' logits."""
    keys = jax.random.split(rng_key, 2)
    if floor.kernel == HEAD:
        shape = head_shapes.SHAPES[floor.shape]
        sizes = (
            {"kernel": (shape.hidden_size, shape.vocab_size)}
            if shape.rank is None
            else {"down": (shape.hidden_size, shape.rank), "up": (shape.rank, shape.vocab_size)}
        )
        params = {
            name: jax.random.normal(key, size, jnp.bfloat16) * jnp.bfloat16(size[0] ** -0.5)
            for key, (name, size) in zip(keys, sizes.items(), strict=False)
        }
        return head_weights.prepare_weights(params)
    shape = verifier_shapes.get_shape(floor.shape)
    rows = shape.num_target_rows, shape.num_draft_rows
    logits = [
        3 * jax.random.normal(key, (count, shape.vocab_size), jnp.float32)
        for key, count in zip(keys, rows, strict=True)
    ]
    return tuple(values.astype(shape.dtype) for values in logits)


def make_variation(rng_key: jax.Array, floor: Floor) -> Any:
    """Small arrays of one call; no two calls of a program are alike, so that none can be left out."""
    keys = jax.random.split(rng_key, 3)
    if floor.kernel == HEAD:
        shape = head_shapes.SHAPES[floor.shape]
        hidden = jax.random.normal(keys[0], (floor.batch, shape.hidden_size), jnp.bfloat16)
        return hidden, jax.random.key_data(jax.random.split(keys[1], floor.batch))
    shape = verifier_shapes.get_shape(floor.shape)
    targets, drafts = shape.num_target_rows, shape.num_draft_rows
    if floor.op == "log_normalisers":
        tokens = jax.random.randint(keys[0], (drafts,), 0, shape.vocab_size, jnp.int32)
        temperatures = (
            jax.random.uniform(key, (rows,), jnp.float32, 0.5, 1.5)
            for key, rows in ((keys[1], targets), (keys[2], drafts))
        )
        return (tokens, *temperatures)
    # Normalisers of such logits are near these; weights are at most 1.
    normalisers = (
        jax.random.uniform(key, (rows,), jnp.float32, 15.9, 16.1)
        for key, rows in ((keys[0], targets), (keys[1], drafts))
    )
    return (*normalisers, -jax.random.uniform(keys[2], (drafts,), jnp.float32))
