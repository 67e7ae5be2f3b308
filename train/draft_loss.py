"""The loss of a drafter on a batch: unrolled states, the head's parts, each against its teacher, in chunks.

Nothing here knows heads by kind. A head says what its parts are; a part over the whole vocabulary with the plain KL
takes the hand-fused loss, any other one the general one.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.eagle3_layer import Eagle3Config, Params, head_input
from specjax.heads import LossPart, get_head
from train.chunked_loss import Objective, Teacher, measure_agreement, weighted_objective
from train.losses import PairStatistics, weighted_forward_kl
from train.step_config import StepConfig
from train.unroll import Batch, unroll

Frozen = dict[str, Array]


class _Chunks:
    """Moves windows of entries into chunks and back."""

    def __init__(self, num_steps: int, batch_size: int, num_windows: int, window: int, num_chunks: int) -> None:
        self._shape = (num_steps, batch_size, num_windows, window)
        self.number, self._together = num_chunks, num_windows // num_chunks

    def split(self, x: Array, axis: int) -> Array:
        """[..., B, W, ...] with B at `axis` to [chunks, ..., B * windows of a chunk, ...]."""
        shape, batch_size = x.shape, self._shape[1]
        x = x.reshape(*shape[: axis + 1], self.number, self._together, *shape[axis + 2 :])
        x = jnp.moveaxis(x, axis + 1, 0)
        return x.reshape(x.shape[0], *shape[:axis], batch_size * self._together, *shape[axis + 2 :])

    def join(self, x: Array) -> Array:
        """[chunks, S, B * windows of a chunk, window] to [S, B, W, window]."""
        num_steps, batch_size, _, window = self._shape
        x = x.reshape(self.number, num_steps, batch_size, self._together, window)
        return jnp.moveaxis(x, 0, 2).reshape(self._shape)


def weighted_loss(
    params: Params,
    config: Eagle3Config,
    step_config: StepConfig,
    frozen: Frozen,
    batch: Batch,
    windows: Int[Array, "batch windows"],
    weights: Float[Array, "steps batch windows window"],
    blend: Float[Array, "steps"],
    measured: Bool[Array, "chunks"] | None = None,
) -> tuple[Float[Array, ""], PairStatistics]:
    """Weighted sum of the objective, and the statistics of all pairs.

    Args:
        params: the drafter's parameters.
        config: the drafter.
        step_config: what to compute.
        frozen: the target's `embed_tokens` and `lm_head`.
        batch: the texts.
        windows: first entry of each window.
        weights: weight of each pair.
        blend: share of KL of each draft step, for the hybrid loss.
        measured: chunks whose acceptance is wanted; None is all.

    Returns:
        The sum, and statistics of [S, B, W, window].
    """
    dtype = jnp.dtype(step_config.compute_dtype)
    params, hidden, target_states, chunks = _states(params, config, step_config, frozen, batch, windows, weights.shape)
    head = get_head(config.head.kind)
    # Padded ids have no probability under either law, so their columns are left out of both.
    valid = slice(0, config.num_valid_tokens)
    target = (chunks.split(target_states, 0), frozen["lm_head"].astype(dtype)[:, valid])
    chunk_weights = chunks.split(weights, 1)
    wanted = jnp.ones(chunks.number, bool) if measured is None else measured
    losses, values, statistics = [], [], None
    for index, part in enumerate(head.loss_parts(params["head"], hidden, config.head)):
        name = part.objective or step_config.loss
        states = chunks.split(part.states, 1)
        part_weights = chunk_weights if part.weight == 1 else part.weight * chunk_weights
        if name == "kl" and part.columns is None and part.classes is None and part.teacher_states is None:
            is_law = index == 0 and head.law_is_first_part
            seen = wanted if is_law else jnp.zeros_like(wanted)
            loss, fused = weighted_forward_kl(states, part.matrix[:, valid], target[0], target[1], part_weights, seen)
            statistics = fused if is_law else statistics
            value = fused.divergence
        else:
            objective, matrix, teacher = _general_part(part, name, config, chunks, target)
            loss, value = weighted_objective(  # pyright: ignore[reportGeneralTypeIssues]
                objective, states, matrix, teacher, part_weights, blend
            )
        losses.append(loss)
        values.append(value if part.weight == 1 else part.weight * value)
    if statistics is None:
        statistics = _agreement(params, config, chunks, hidden, target, wanted)
    total, value = (functools.reduce(jnp.add, terms) for terms in (losses, values))
    return total, jax.tree.map(chunks.join, dataclasses.replace(statistics, divergence=value))


def pair_statistics(
    params: Params,
    config: Eagle3Config,
    step_config: StepConfig,
    frozen: Frozen,
    batch: Batch,
    windows: Int[Array, "batch windows"],
    shape: tuple[int, ...],
) -> PairStatistics:
    """Acceptance of all pairs and no loss, for objectives that depend on it; as `weighted_loss` otherwise."""
    params, hidden, target_states, chunks = _states(params, config, step_config, frozen, batch, windows, shape)
    matrix = frozen["lm_head"].astype(step_config.compute_dtype)[:, : config.num_valid_tokens]
    target = (chunks.split(target_states, 0), matrix)
    statistics = _agreement(params, config, chunks, hidden, target, jnp.ones(chunks.number, bool))
    return jax.tree.map(chunks.join, statistics)


def num_chunks(config: StepConfig, num_windows: int, batch_size: int) -> int:
    """Chunks of windows: as few as keep one chunk to about `chunk_rows` entries, all of the same size."""
    limit = max(1, config.chunk_rows // (batch_size * config.window))
    return min(
        divisor
        for divisor in range(1, num_windows + 1)
        if num_windows % divisor == 0 and num_windows // divisor <= limit
    )


def _states(
    params: Params,
    config: Eagle3Config,
    step_config: StepConfig,
    frozen: Frozen,
    batch: Batch,
    windows: Array,
    shape: tuple[int, ...],
) -> tuple[Params, Array, Array, _Chunks]:
    """Parameters in the compute dtype, the head's inputs [S, B, W, window, d] and the target's states of windows."""
    dtype = jnp.dtype(step_config.compute_dtype)
    num_steps, batch_size, num_windows, window = shape
    params = jax.tree.map(lambda leaf: leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, params)
    # Only the rows that are looked up are converted, not the whole table.
    params["embed_tokens"] = frozen["embed_tokens"]
    outputs = unroll(
        params,
        config,
        batch,
        windows,
        num_steps=num_steps,
        window=window,
        rematerialise=step_config.rematerialise,
    )
    hidden = head_input(params, config, outputs)
    positions = jnp.arange(1, window + num_steps, dtype=windows.dtype)
    positions = jnp.minimum(windows[:, :, None] + positions, batch.tokens.shape[1] - 1).reshape(batch_size, -1, 1)
    target_states = jnp.take_along_axis(batch.final_hidden, positions, axis=1)
    target_states = target_states.reshape(batch_size, num_windows, window + num_steps - 1, -1)
    chunks = _Chunks(num_steps, batch_size, num_windows, window, num_chunks(step_config, num_windows, batch_size))
    return params, hidden, target_states, chunks


def _general_part(
    part: LossPart, name: str, config: Eagle3Config, chunks: _Chunks, target: tuple[Array, Array]
) -> tuple[Objective, Array, Teacher]:
    states, target_matrix = target
    valid = slice(0, config.num_valid_tokens)
    if part.teacher_states is not None and part.teacher_matrix is not None:
        states = chunks.split(jax.lax.stop_gradient(part.teacher_states), 1)
        target_matrix = jax.lax.stop_gradient(part.teacher_matrix)[:, valid]
    by_token = part.columns is None and part.classes is None
    matrix = part.matrix[:, valid] if by_token else part.matrix
    classes = None if part.classes is None else part.classes[valid]
    num_classes = 0 if part.classes is None else part.matrix.shape[1]
    teacher = Teacher(states, target_matrix, part.columns, classes)
    return Objective(name, num_classes, part.num_top), matrix, teacher


def _agreement(
    params: Params, config: Eagle3Config, chunks: _Chunks, hidden: Array, target: tuple[Array, Array], wanted: Array
) -> PairStatistics:
    head, own = get_head(config.head.kind), jax.lax.stop_gradient(params["head"])

    def logits_of(states: Any, step: int) -> Array:
        return head.logits(own, states, config.head, step)[..., : config.num_valid_tokens]

    agreement = measure_agreement(logits_of, chunks.split(hidden, 1), *target, wanted)
    nothing = jnp.zeros_like(agreement.acceptance)
    return PairStatistics(nothing, agreement.acceptance, agreement.top1, agreement.ceiling, agreement.recall)
