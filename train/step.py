"""One training step: the unroll, the loss in chunks, gradients, update. Pure, deterministic, one program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from specjax.drafters.eagle3_layer import Eagle3Config, Params, fixed_parameters
from train.draft_loss import Frozen, num_chunks, pair_statistics, weighted_loss
from train.losses import PairStatistics
from train.optimizer import OptimizerConfig, fixed_mask, learning_rate_schedule, make_optimizer
from train.step_config import StepConfig
from train.unroll import Batch, all_windows, random_windows, supervised_pairs

__all__ = [
    "Batch",
    "OptimizerConfig",
    "StepConfig",
    "TrainState",
    "learning_rate_schedule",
    "make_eval_step",
    "make_optimizer",
    "make_train_state",
    "make_train_step",
]

Metrics = dict[str, Array]


@flax.struct.dataclass
class TrainState:
    """All that training carries from step to step; trees of shapes or shardings have this form too.

    Attributes:
        step: steps taken, those that were skipped included, [].
        params: the drafter's trained parameters.
        opt_state: the optimiser's state.
        rng_key: never changes; a step folds its number in.
        num_skipped: steps whose loss or gradient was not finite, [].
    """

    step: Any
    params: Any
    opt_state: Any
    rng_key: Any
    num_skipped: Any


def make_train_state(params: Params, optimizer: optax.GradientTransformation, rng_key: PRNGKeyArray) -> TrainState:
    """The state before the first step; the key belongs to the state from now on."""
    # Two arrays, not one: a buffer can be donated only once.
    step, num_skipped = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    return TrainState(step, params, optimizer.init(params), rng_key, num_skipped)


def make_train_step(
    config: Eagle3Config,
    step_config: StepConfig,
    optimizer: optax.GradientTransformation,
    *,
    state_shardings: Any = None,
) -> Callable[[TrainState, Frozen, Batch], tuple[TrainState, Metrics]]:
    """Compiles-on-first-use training step.

    The loss is the sum over draft steps i of `step_decay**i` times the mean over the supervised pairs of step i of
    the configured objective, by default KL(target || draft); heads may add terms of their own. A batch without
    supervised tokens, and one whose loss or gradient is not finite, leave parameters and optimiser as they are. Rows
    may be sharded over devices, parameters in any way: the step has no code for devices, and a batch computed in parts
    gives the same gradient as at once.

    Args:
        config: the drafter.
        step_config: what to compute.
        optimizer: updates of the parameters.
        state_shardings: where the new state lies; None lets the compiler choose.

    Returns:
        `step(state, frozen, batch) -> (state, metrics)`; the old state's buffers are donated. `frozen` holds the
        target's `embed_tokens` [V, d] and `lm_head` [d, V]; a head that already has the compute dtype saves a
        conversion in every step. Metrics: `loss`, `grad_norm` (before clipping),
        `num_tokens` (supervised entries of draft step 0 that were read), `skipped` (1 if not finite), and per draft
        step [S] `loss_per_step`, `acceptance_per_step`, `top1_per_step`; for heads that cannot draft every token
        also `ceiling_per_step`, the target's mass over what they can draft, which acceptance cannot exceed, and
        `candidate_recall_per_step`, how often its most likely token is among that.
    """

    def step(state: TrainState, frozen: Frozen, batch: Batch) -> tuple[TrainState, Metrics]:
        window_key, measure_key = jax.random.split(jax.random.fold_in(state.rng_key, state.step))
        windows, mask = _choose_windows(window_key, step_config, batch)
        chunks = num_chunks(step_config, windows.shape[1], batch.tokens.shape[0] // step_config.accumulation_steps)
        measured = _choose_measured(measure_key, step_config, chunks)
        sums, gradients = _gradients(config, step_config, state.params, frozen, batch, windows, mask, measured)
        metrics = _metrics(step_config, sums, mask, measured)
        squares = [jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients) if _is_float(leaf)]
        grad_norm = jnp.sqrt(sum(squares))
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(grad_norm)

        def update(params: Any, opt_state: Any) -> tuple[Any, Any]:
            updates, opt_state = optimizer.update(gradients, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        params, opt_state = lax.cond(
            finite & (metrics["num_tokens"] > 0), update, lambda *old: old, state.params, state.opt_state
        )
        skipped = (~finite).astype(jnp.int32)
        new_state = TrainState(state.step + 1, params, opt_state, state.rng_key, state.num_skipped + skipped)
        return new_state, {**metrics, "grad_norm": grad_norm, "skipped": skipped}

    if state_shardings is None:
        return jax.jit(step, donate_argnums=0)
    return jax.jit(step, donate_argnums=0, out_shardings=(state_shardings, None))


def make_eval_step(config: Eagle3Config, step_config: StepConfig) -> Callable[[Params, Frozen, Batch], Metrics]:
    """A teacher-forced test over all supervised pairs of a batch, without gradients.

    Args:
        config: the drafter.
        step_config: as in training; `loss_rows` and `accumulation_steps` play no part.

    Returns:
        `evaluate(params, frozen, batch) -> metrics`, those of training that concern the loss.
    """
    step_config = dataclasses.replace(step_config, loss_rows=0)

    def evaluate(params: Params, frozen: Frozen, batch: Batch) -> Metrics:
        windows, mask = _choose_windows(None, step_config, batch)
        weights = mask.astype(jnp.float32)
        arguments = (params, config, step_config, frozen, batch, windows)
        blend = _blend(step_config, mask, lambda: _masked_sums(pair_statistics(*arguments, mask.shape), weights))
        _, statistics = weighted_loss(*arguments, weights, blend)
        return _metrics(step_config, _masked_sums(statistics, weights), mask, jnp.ones(1, bool))

    return jax.jit(evaluate)


def _is_float(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)


def _choose_windows(rng_key: PRNGKeyArray | None, config: StepConfig, batch: Batch) -> tuple[Array, Array]:
    """First entries of the windows, [B, W], and which pairs in them are supervised, [S, B, W, window]."""
    batch_size, length = batch.tokens.shape
    pairs = supervised_pairs(batch, config.num_steps)
    windows = all_windows(batch_size, length, config.window)
    wanted = math.ceil(config.loss_rows / config.window)
    if rng_key is not None and 0 < wanted < windows.shape[1]:
        windows = random_windows(rng_key, pairs, config.window, wanted)
    padded = jnp.pad(pairs, ((0, 0), (0, 0), (0, config.window)))
    entries = (windows[:, :, None] + jnp.arange(config.window, dtype=windows.dtype)).reshape(batch_size, -1)
    mask = jnp.take_along_axis(padded, jnp.minimum(entries, length)[None], axis=2)
    return windows, mask.reshape(config.num_steps, *windows.shape, config.window)


def _gradients(
    config: Eagle3Config,
    step_config: StepConfig,
    params: Params,
    frozen: Frozen,
    batch: Batch,
    windows: Array,
    mask: Array,
    measured: Array,
) -> tuple[PairStatistics, Params]:
    """Masked sums of all statistics, [S], and the gradient of the loss, over all parts of the batch."""
    weights = mask.astype(jnp.float32) * _pair_weights(step_config, mask)[:, None, None, None]
    fixed = fixed_mask(params, fixed_parameters(config))
    trained = jax.tree.map(lambda is_fixed, leaf: None if is_fixed else leaf, fixed, params)

    def loss_of(trained: Params, part: tuple[Batch, Array, Array, Array], blend: Array) -> Any:
        whole = jax.tree.map(lambda is_fixed, ours, leaf: leaf if is_fixed else ours, fixed, trained, params)
        part_batch, part_windows, part_weights, _ = part
        return weighted_loss(
            whole, config, step_config, frozen, part_batch, part_windows, part_weights, blend, measured
        )

    def part_gradients(part: tuple[Batch, Array, Array, Array], blend: Array) -> tuple[PairStatistics, Params]:
        gradients, statistics = jax.grad(loss_of, has_aux=True)(trained, part, blend)
        return _masked_sums(statistics, part[3].astype(jnp.float32)), gradients

    def part_acceptance(part: tuple[Batch, Array, Array, Array]) -> PairStatistics:
        part_batch, part_windows, _, part_mask = part
        statistics = pair_statistics(params, config, step_config, frozen, part_batch, part_windows, part_mask.shape)
        return _masked_sums(statistics, part_mask.astype(jnp.float32))

    def with_zeros(result: tuple[PairStatistics, Params]) -> tuple[PairStatistics, Params]:
        sums, gradients = result
        return sums, jax.tree.map(
            lambda is_fixed, ours, leaf: jnp.zeros_like(leaf) if is_fixed else ours, fixed, gradients, params
        )

    # The step axis of weights and mask goes last, so that rows lead everywhere.
    whole = (batch, windows, jnp.moveaxis(weights, 0, -1), jnp.moveaxis(mask, 0, -1))

    def rows_first(part: Any) -> Any:
        part_batch, part_windows, part_weights, part_mask = part
        return part_batch, part_windows, jnp.moveaxis(part_weights, -1, 0), jnp.moveaxis(part_mask, -1, 0)

    num_parts = step_config.accumulation_steps
    if num_parts == 1:
        part = rows_first(whole)
        return with_zeros(part_gradients(part, _blend(step_config, mask, lambda: part_acceptance(part))))
    rows = batch.tokens.shape[0]
    if rows % num_parts:
        raise ValueError(f"`accumulation_steps` must divide the batch's {rows} rows; got {num_parts}")

    def split(leaf: Array) -> Array:
        # Part a has rows a, a + parts, ...: rows that lie on different devices stay spread over all of them.
        return jnp.moveaxis(leaf.reshape(rows // num_parts, num_parts, *leaf.shape[1:]), 1, 0)

    parts = jax.tree.map(split, whole)

    def sum_over_parts(function: Callable[[Any], Any]) -> Any:
        structures = []

        def leaves_of(part: Any) -> list[Array]:
            leaves, structure = jax.tree.flatten(function(rows_first(part)))
            structures.append(structure)
            return leaves

        def add_part(total: list[Array], part: Any) -> tuple[list[Array], None]:
            return jax.tree.map(jnp.add, total, leaves_of(part)), None

        shapes = jax.eval_shape(leaves_of, jax.tree.map(lambda leaf: leaf[0], parts))
        zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes]
        return jax.tree.unflatten(structures[0], lax.scan(add_part, zeros, parts)[0])

    blend = _blend(step_config, mask, lambda: sum_over_parts(part_acceptance))
    return with_zeros(sum_over_parts(lambda part: part_gradients(part, blend)))


def _blend(config: StepConfig, mask: Array, sums_of: Callable[[], PairStatistics]) -> Float[Array, "steps"]:
    """Share of KL in the hybrid loss by the mean acceptance of each draft step (Samarin et al., arXiv 2602.23881)."""
    if config.loss != "lk_hybrid":
        return jnp.ones(config.num_steps, jnp.float32)
    acceptance = lax.stop_gradient(sums_of().acceptance) / jnp.maximum(_counts(mask), 1)
    return jnp.exp(-jnp.float32(config.blend_decay) * acceptance)


def _choose_measured(rng_key: PRNGKeyArray, config: StepConfig, num_chunks: int) -> Bool[Array, "chunks"]:
    """Which chunks are measured."""
    wanted = config.measured_chunks
    if not 0 < wanted < num_chunks:
        return jnp.ones(num_chunks, bool)
    return jax.random.permutation(rng_key, num_chunks) < wanted


def _pair_weights(config: StepConfig, mask: Array) -> Float[Array, "steps"]:
    """Weight of a supervised pair of each draft step: the step's, over its number of pairs."""
    decay = jnp.float32(config.step_decay) ** jnp.arange(config.num_steps, dtype=jnp.float32)
    return decay / jnp.maximum(_counts(mask), 1)


def _counts(mask: Array) -> Float[Array, "steps"]:
    return jnp.sum(mask, axis=(1, 2, 3)).astype(jnp.float32)


def _masked_sums(statistics: PairStatistics, mask: Array) -> PairStatistics:
    # Selected, not multiplied: what an unsupervised pair holds may be anything.
    return jax.tree.map(lambda leaf: jnp.sum(jnp.where(mask > 0, leaf, 0), axis=(1, 2, 3)), statistics)


def _metrics(config: StepConfig, sums: PairStatistics, mask: Array, measured: Array) -> Metrics:
    counts = _counts(mask)
    # Windows of a chunk lie side by side; what was not measured holds zeros and is not counted.
    seen = _counts(mask & jnp.repeat(measured, mask.shape[2] // measured.shape[0])[:, None])
    divergence = sums.divergence / jnp.maximum(counts, 1)
    decay = jnp.float32(config.step_decay) ** jnp.arange(config.num_steps, dtype=jnp.float32)
    metrics = {
        "loss": jnp.sum(decay * divergence),
        "loss_per_step": divergence,
        "acceptance_per_step": sums.acceptance / jnp.maximum(seen, 1),
        "top1_per_step": sums.top1 / jnp.maximum(seen, 1),
        "num_tokens": counts[0].astype(jnp.int32),
    }
    if sums.ceiling is not None:
        metrics["ceiling_per_step"] = sums.ceiling / jnp.maximum(seen, 1)
    if sums.recall is not None:
        metrics["candidate_recall_per_step"] = sums.recall / jnp.maximum(seen, 1)
    return metrics
