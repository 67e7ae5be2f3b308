"""The training loop: batches in a fixed order, steps, rows of metrics, held-out tests and checkpoints.

All that a step depends on is its number and the state before it, so a run that goes on from a checkpoint makes
the same steps as one that never stopped.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from train.artifacts import RunError
from train.checkpointing import Checkpoints
from train.data import Rows, SampleOrder
from train.features import FeatureSource
from train.metrics_log import MetricsLog
from train.step import Batch, TrainState

Metrics = Mapping[str, Any]
StepFunction = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


@dataclasses.dataclass(frozen=True)
class LoopSettings:
    """How long to train and how often to look.

    Attributes:
        train_steps: optimiser steps in all; with 0 the state is tested and kept as it is.
        batch_size: rows of a step.
        seed: of the order of rows.
        checkpoint_every: steps between checkpoints; the last step always has one.
        held_out_every: steps between held-out tests; the last step always has one.
        log_every: steps between rows of metrics.
        max_bad_batches: batches in a row without a finite loss before the run stops.
        progress: whether to show a progress bar.
    """

    train_steps: int
    batch_size: int
    seed: int
    checkpoint_every: int
    held_out_every: int
    log_every: int = 1
    max_bad_batches: int = 10
    progress: bool = False


class BatchMaker:
    """Batches by row index, on the devices."""

    def __init__(self, rows: Rows, source: FeatureSource, place: Callable[[Any], Any]) -> None:
        """Keeps rows and features.

        Args:
            rows: all rows.
            source: their features.
            place: puts an array of rows onto the devices.
        """
        self._rows, self._source, self._place = rows, source, place

    def make(self, wanted: np.ndarray, *, keep: np.ndarray | None = None) -> Batch:
        """The batch of some rows.

        Args:
            wanted: row indices, [B].
            keep: rows whose tokens count in the loss, [B] bool; all by default.
        """
        features, hidden = self._source.read(wanted)
        loss_mask = self._rows.loss_mask[wanted]
        if keep is not None:
            loss_mask = loss_mask & keep[:, None]
        return Batch(
            tokens=self._place(self._rows.tokens[wanted]),
            loss_mask=self._place(loss_mask),
            features=self._place(features),
            final_hidden=self._place(hidden),
            segment_ids=self._place(self._rows.segment_ids[wanted]),
        )


class HeldOutTest:
    """Teacher-forced loss and acceptance over all held-out rows."""

    def __init__(self, batches: BatchMaker, num_rows: int, batch_size: int, evaluate: Callable[..., Metrics]) -> None:
        """Keeps what the test needs.

        Args:
            batches: makes held-out batches.
            num_rows: held-out rows.
            batch_size: rows of a batch; the last batch is filled up with rows that do not count.
            evaluate: `(params, batch) -> metrics`, means over the supervised tokens of a batch.
        """
        self._batches, self._num_rows, self._batch_size, self._evaluate = batches, num_rows, batch_size, evaluate

    def run(self, params: Any) -> dict[str, Any]:
        """Means over all supervised tokens, weighted by the number of tokens of each batch."""
        total: dict[str, Any] = {}
        weight = 0.0
        for start in range(0, self._num_rows, self._batch_size):
            places = np.arange(start, start + self._batch_size)
            batch = self._batches.make(np.minimum(places, self._num_rows - 1), keep=places < self._num_rows)
            metrics = jax.device_get(self._evaluate(params, batch))
            tokens = float(metrics["num_tokens"])
            for name in (name for name in metrics if name == "loss" or name.endswith("_per_step")):
                total[name] = total.get(name, 0.0) + tokens * np.asarray(metrics[name], np.float64)
            weight += tokens
        means = {name: (value / max(weight, 1.0)).tolist() for name, value in total.items()}
        return {
            **means,
            "num_tokens": int(weight),
            "acceptance_length": acceptance_length(means["acceptance_per_step"]),
        }


def acceptance_length(rates: list[float]) -> float:
    """Tokens a target call would commit if each draft were accepted at its teacher-forced rate, bonus included."""
    total = joint = 1.0
    for rate in rates:
        joint *= rate
        total += joint
    return total


def train(
    state: TrainState,
    step_of: Callable[[int], StepFunction],
    batches: BatchMaker,
    num_rows: int,
    held_out: HeldOutTest,
    settings: LoopSettings,
    run_dir: Path,
    checkpoints: Checkpoints,
    learning_rate: Callable[[int], float],
) -> TrainState:
    """Trains from the newest checkpoint, or from the start, to the last step.

    Args:
        state: the state at step 0, placed on the devices; also the form that a checkpoint is restored to.
        step_of: the function of a step, by its number from 0.
        batches: makes training batches.
        num_rows: training rows.
        held_out: the held-out test.
        settings: lengths and intervals.
        run_dir: where metrics.jsonl goes.
        checkpoints: of this run.
        learning_rate: of a step, by its number from 0, for the metrics.

    Returns:
        The state after the last step.

    Raises:
        RunError: if too many batches in a row give no finite loss, or a checkpoint cannot be written.
    """
    start, bad_in_a_row = 0, 0
    newest = checkpoints.latest_step()
    if newest is not None:
        state, meta = checkpoints.restore(newest, state)
        start, bad_in_a_row = newest, int(meta["bad_in_a_row"])
    else:
        # Steps donate their state's buffers, and those of a warm start may be the target's own.
        state = jax.tree.map(lambda leaf: jax.device_put(leaf.copy(), leaf.sharding), state)
    order = SampleOrder(num_rows, settings.batch_size, settings.seed)
    untrained = newest is None and settings.train_steps == 0
    recorder = _Recorder(run_dir / "metrics.jsonl", start, settings, bad_in_a_row, learning_rate)
    try:
        with tqdm(
            total=settings.train_steps, initial=start, desc="training", unit="step", disable=not settings.progress
        ) as bar:
            for index in range(start, settings.train_steps):
                state, metrics = step_of(index)(state, batches.make(order.rows(index)))
                recorder.add(index, metrics, order.epoch(index))
                step = index + 1
                last = step == settings.train_steps
                if last or step % settings.held_out_every == 0:
                    recorder.flush()
                    bar.set_postfix_str(recorder.held_out(step, held_out.run(state.params)))
                if last or step % settings.checkpoint_every == 0:
                    recorder.flush()
                    checkpoints.save(step, state, {"bad_in_a_row": recorder.bad_in_a_row})
                bar.update()
        if untrained:
            recorder.held_out(0, held_out.run(state.params))
            checkpoints.save(0, state, {"bad_in_a_row": 0})
    finally:
        recorder.close()
    return state


class _Recorder:
    """Reads metrics one step late, so that the host does not wait for the devices, and counts bad batches."""

    def __init__(
        self,
        path: Path,
        start: int,
        settings: LoopSettings,
        bad_in_a_row: int,
        learning_rate: Callable[[int], float],
    ) -> None:
        self.bad_in_a_row = bad_in_a_row
        # All processes of a multi-host run count; the first one writes.
        self._log = MetricsLog(path, last_step=start) if jax.process_index() == 0 else None
        self._settings, self._learning_rate = settings, learning_rate
        self._waiting: tuple[int, Metrics, float] | None = None
        self._clock = time.perf_counter()

    def add(self, index: int, metrics: Metrics, epoch: float) -> None:
        self.flush()
        self._waiting = (index, metrics, epoch)

    def flush(self) -> None:
        if self._waiting is None:
            return
        (index, on_device, epoch), self._waiting = self._waiting, None
        metrics = {name: np.asarray(value).tolist() for name, value in jax.device_get(dict(on_device)).items()}
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        step = index + 1
        bad = bool(metrics.get("skipped", 0))
        if bad or step % self._settings.log_every == 0 or step == self._settings.train_steps:
            self._write(
                {
                    "kind": "train",
                    "step": step,
                    "epoch": round(epoch, 4),
                    **metrics,
                    "learning_rate": float(self._learning_rate(index)),
                    "seconds": round(seconds, 4),
                }
            )
        self.bad_in_a_row = self.bad_in_a_row + 1 if bad else 0
        if self.bad_in_a_row >= self._settings.max_bad_batches:
            raise RunError(
                f"{self.bad_in_a_row} batches in a row up to step {step} gave no finite loss or gradient "
                "(`--max_bad_batches`): lower `--learning_rate` or look at the data; the parameters are unchanged since"
            )

    def held_out(self, step: int, result: Mapping[str, Any]) -> str:
        self._write({"kind": "held_out", "step": step, **result})
        self._clock = time.perf_counter()
        return f"held-out loss {result['loss']:.3f}, acceptance length {result['acceptance_length']:.2f}"

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _write(self, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.append(row)
