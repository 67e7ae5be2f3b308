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
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from specjax.drafters.eagle3_layer import Eagle3Config, Params, head_input
from specjax.heads import get_head
from train.losses import PairStatistics, weighted_forward_kl
from train.optimizer import OptimizerConfig, learning_rate_schedule, make_optimizer
from train.unroll import Batch, all_windows, random_windows, supervised_pairs, unroll

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
Frozen = dict[str, Array]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What one step computes.

    Attributes:
        num_steps: draft steps that are unrolled, S.
        step_decay: the loss of draft step i has the weight `step_decay**i`.
        window: consecutive entries that are trained on together.
        loss_rows: entries of each row that the loss reads, chosen anew in every step as random windows; rounded up to
            whole windows. 0 is all entries.
        chunk_rows: entries whose logits exist at the same time, about; at least one window of each row.
        measured_chunks: chunks of a training step, chosen at random, in which acceptance and top-1 agreement are
            measured; 0 is all. The loss always covers everything.
        accumulation_steps: parts that a batch is computed in, one after the other.
        compute_dtype: dtype of products; parameters and their updates stay in their own dtype.
        rematerialise: compute the layer's activations again in the backward pass instead of keeping them.

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    num_steps: int = 7
    step_decay: float = 0.8
    window: int = 16
    loss_rows: int = 0
    chunk_rows: int = 128
    measured_chunks: int = 1
    accumulation_steps: int = 1
    compute_dtype: str = "float32"
    rematerialise: bool = False

    def __post_init__(self) -> None:
        for field in ("num_steps", "window", "chunk_rows", "accumulation_steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1; got {getattr(self, field)}")
        for field in ("loss_rows", "measured_chunks"):
            if getattr(self, field) < 0:
                raise ValueError(f"`{field}` must be at least 0; got {getattr(self, field)}")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"`step_decay` must be in (0, 1]; got {self.step_decay}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"`compute_dtype` must be float32 or bfloat16; got {self.compute_dtype!r}")


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
    KL(target || draft). A batch without supervised tokens, and one whose loss or gradient is not finite, leave
    parameters and optimiser as they are. Rows may be sharded over devices, parameters in any way: the step has no
    code for devices, and a batch computed in parts gives the same gradient as at once.

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
        step [S] `loss_per_step`, `acceptance_per_step`, `top1_per_step`.
    """

    def step(state: TrainState, frozen: Frozen, batch: Batch) -> tuple[TrainState, Metrics]:
        window_key, measure_key = jax.random.split(jax.random.fold_in(state.rng_key, state.step))
        windows, mask = _choose_windows(window_key, step_config, batch)
        chunks = _num_chunks(step_config, windows.shape[1], batch.tokens.shape[0] // step_config.accumulation_steps)
        measured = _choose_measured(measure_key, step_config, chunks)
        sums, gradients = _gradients(config, step_config, state.params, frozen, batch, windows, mask, measured)
        metrics = _metrics(step_config, sums, mask, measured)
        grad_norm = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradients)))
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
        _, statistics = _weighted_loss(params, config, step_config, frozen, batch, windows, weights)
        return _metrics(step_config, _masked_sums(statistics, weights), mask, jnp.ones(1, bool))

    return jax.jit(evaluate)


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

    def part_gradients(part: tuple[Batch, Array, Array, Array]) -> tuple[PairStatistics, Params]:
        part_batch, part_windows, part_weights, part_mask = part
        gradient_of = jax.grad(_weighted_loss, has_aux=True)
        gradients, statistics = gradient_of(
            params, config, step_config, frozen, part_batch, part_windows, part_weights, measured
        )
        return _masked_sums(statistics, part_mask.astype(jnp.float32)), gradients

    # The step axis of weights and mask goes last, so that rows lead everywhere.
    whole = (batch, windows, jnp.moveaxis(weights, 0, -1), jnp.moveaxis(mask, 0, -1))

    def rows_first(part: Any) -> Any:
        part_batch, part_windows, part_weights, part_mask = part
        return part_batch, part_windows, jnp.moveaxis(part_weights, -1, 0), jnp.moveaxis(part_mask, -1, 0)

    num_parts = step_config.accumulation_steps
    if num_parts == 1:
        return part_gradients(rows_first(whole))
    rows = batch.tokens.shape[0]
    if rows % num_parts:
        raise ValueError(f"`accumulation_steps` must divide the batch's {rows} rows; got {num_parts}")

    def split(leaf: Array) -> Array:
        # Part a has rows a, a + parts, ...: rows that lie on different devices stay spread over all of them.
        return jnp.moveaxis(leaf.reshape(rows // num_parts, num_parts, *leaf.shape[1:]), 1, 0)

    def add_part(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, part_gradients(rows_first(part))), None

    zeros = jax.tree.map(jnp.zeros_like, (_masked_sums_shape(step_config), params))
    return lax.scan(add_part, zeros, jax.tree.map(split, whole))[0]


def _weighted_loss(
    params: Params,
    config: Eagle3Config,
    step_config: StepConfig,
    frozen: Frozen,
    batch: Batch,
    windows: Int[Array, "batch windows"],
    weights: Float[Array, "steps batch windows window"],
    measured: Bool[Array, "chunks"] | None = None,
) -> tuple[Float[Array, ""], PairStatistics]:
    """Weighted sum of the divergences, and the statistics of all pairs, [S, B, W, window]; None measures all chunks."""
    dtype = jnp.dtype(step_config.compute_dtype)
    num_steps, batch_size, num_windows, window = weights.shape
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
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
    head = get_head(config.head.kind)
    states = head.project(params["head"], head_input(params, config, outputs))
    positions = jnp.arange(1, window + num_steps, dtype=windows.dtype)
    positions = jnp.minimum(windows[:, :, None] + positions, batch.tokens.shape[1] - 1).reshape(batch_size, -1, 1)
    target_states = jnp.take_along_axis(batch.final_hidden, positions, axis=1)
    target_states = target_states.reshape(batch_size, num_windows, window + num_steps - 1, -1)
    # Padded ids have no probability under either law, so their columns are left out of both.
    valid = slice(0, config.num_valid_tokens)
    num_chunks = _num_chunks(step_config, num_windows, batch_size)
    together = num_windows // num_chunks

    def chunk(x: Array, axis: int) -> Array:
        """[..., B, W, ...] with B at `axis` to [chunks, ..., B * windows of a chunk, ...]."""
        shape = x.shape
        x = x.reshape(*shape[: axis + 1], num_chunks, together, *shape[axis + 2 :])
        x = jnp.moveaxis(x, axis + 1, 0)
        return x.reshape(x.shape[0], *shape[:axis], batch_size * together, *shape[axis + 2 :])

    loss, statistics = weighted_forward_kl(
        chunk(states, 1),
        head.output_matrix(params["head"])[:, valid],
        chunk(target_states, 0),
        frozen["lm_head"].astype(dtype)[:, valid],
        chunk(weights, 1),
        jnp.ones(num_chunks, bool) if measured is None else measured,
    )

    def unchunk(x: Array) -> Array:
        x = x.reshape(num_chunks, num_steps, batch_size, together, window)
        return jnp.moveaxis(x, 0, 2).reshape(weights.shape)

    return loss, jax.tree.map(unchunk, statistics)


def _num_chunks(config: StepConfig, num_windows: int, batch_size: int) -> int:
    """Chunks of windows: as few as keep one chunk to about `chunk_rows` entries, all of the same size."""
    limit = max(1, config.chunk_rows // (batch_size * config.window))
    return min(
        divisor
        for divisor in range(1, num_windows + 1)
        if num_windows % divisor == 0 and num_windows // divisor <= limit
    )


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


def _masked_sums_shape(config: StepConfig) -> PairStatistics:
    zero = jnp.zeros(config.num_steps, jnp.float32)
    return PairStatistics(zero, zero, zero)


def _metrics(config: StepConfig, sums: PairStatistics, mask: Array, measured: Array) -> Metrics:
    counts = _counts(mask)
    # Windows of a chunk lie side by side; what was not measured holds zeros and is not counted.
    seen = _counts(mask & jnp.repeat(measured, mask.shape[2] // measured.shape[0])[:, None])
    divergence = sums.divergence / jnp.maximum(counts, 1)
    decay = jnp.float32(config.step_decay) ** jnp.arange(config.num_steps, dtype=jnp.float32)
    return {
        "loss": jnp.sum(decay * divergence),
        "loss_per_step": divergence,
        "acceptance_per_step": sums.acceptance / jnp.maximum(seen, 1),
        "top1_per_step": sums.top1 / jnp.maximum(seen, 1),
        "num_tokens": counts[0].astype(jnp.int32),
    }
