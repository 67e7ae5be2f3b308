"""The loop: resume is exact, bad batches do no harm, all-masked ones pass."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.target import Target
from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import Eagle3Config
from train.artifacts import RunError
from train.checkpointing import Checkpoints
from train.data import Example, Rows, SampleOrder, make_rows
from train.loop import BatchMaker, HeldOutTest, LoopSettings, acceptance_length, train
from train.step import (
    OptimizerConfig,
    StepConfig,
    TrainState,
    learning_rate_schedule,
    make_eval_step,
    make_optimizer,
    make_train_state,
    make_train_step,
)

STEPS = 20
LENGTH = 12
SETTINGS = LoopSettings(
    train_steps=STEPS, batch_size=2, seed=3, checkpoint_every=7, held_out_every=6, max_bad_batches=3
)
OPTIMIZER = OptimizerConfig(name="adamw", learning_rate=1e-2, total_steps=STEPS, warmup_steps=3)


class RandomFeatures:
    """Features of rows from a fixed table."""

    def __init__(self, rows: Rows, width: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.features = rng.normal(size=(*rows.tokens.shape, 3 * width)).astype(np.float32)
        self.hidden = rng.normal(size=(*rows.tokens.shape, width)).astype(np.float32)
        self.seen: list[list[int]] = []

    def read(self, rows: np.ndarray) -> tuple[Any, Any]:
        self.seen.append(rows.tolist())
        return self.features[rows], self.hidden[rows]


def random_rows(count: int, seed: int) -> Rows:
    rng = np.random.default_rng(seed)
    examples = [
        Example(f"e{i}", rng.integers(3, 200, LENGTH).astype(np.int32), np.arange(LENGTH) >= 4) for i in range(count)
    ]
    return make_rows(examples, LENGTH, packing=False)


@dataclasses.dataclass
class Setup:
    """A run of 11 rows in batches of 2: every epoch ends in the middle of a batch."""

    state: Callable[[], TrainState]
    step_of: Callable[[int], Any]
    rows: Rows
    source: RandomFeatures
    held_out: HeldOutTest

    def run(self, run_dir: Path, settings: LoopSettings = SETTINGS, *, dies_at: int | None = None) -> TrainState:
        def step_of(index: int) -> Any:
            if index == dies_at:
                raise KeyboardInterrupt
            return self.step_of(index)

        checkpoints = Checkpoints(run_dir / "checkpoints", keep=2)
        try:
            return train(
                self.state(),
                step_of,
                BatchMaker(self.rows, self.source, jnp.asarray),
                self.rows.num_rows,
                self.held_out,
                settings,
                run_dir,
                checkpoints,
                lambda index: float(learning_rate_schedule(OPTIMIZER)(index)),
            )
        finally:
            checkpoints.close()


@pytest.fixture(scope="module")
def setup(target: Target) -> Setup:
    config = Eagle3Config.for_target(target.config, rank=4)
    frozen = {name: target.params[name] for name in ("embed_tokens", "lm_head")}
    optimizer = make_optimizer(OPTIMIZER)
    steps = {
        count: make_train_step(config, StepConfig(num_steps=count, window=4, loss_rows=4), optimizer)
        for count in (1, 2)
    }
    evaluate = make_eval_step(config, StepConfig(num_steps=2, window=4))
    rows, held_out = random_rows(11, 1), random_rows(3, 2)
    width = target.config.hidden_size
    held_out_batches = BatchMaker(held_out, RandomFeatures(held_out, width, 4), jnp.asarray)

    def state() -> TrainState:
        init_key, train_key = jax.random.split(jax.random.key(0))
        params = init_drafter(init_key, config, target.params, target.config, head_init="svd")
        return make_train_state(params, optimizer, train_key)

    return Setup(
        state=state,
        step_of=lambda index: lambda state, batch: steps[1 if index < 5 else 2](state, frozen, batch),
        rows=rows,
        source=RandomFeatures(rows, width, 3),
        held_out=HeldOutTest(held_out_batches, 3, 2, lambda params, batch: evaluate(params, frozen, batch)),
    )


@pytest.fixture
def seen(setup: Setup) -> list[list[int]]:
    setup.source.seen.clear()
    return setup.source.seen


@pytest.fixture(scope="module")
def straight(setup: Setup, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainState, list[dict]]:
    folder = tmp_path_factory.mktemp("straight")
    state = setup.run(folder)
    return state, rows_of(folder)


def rows_of(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds", None)
    return rows


def assert_same(left: TrainState, right: TrainState) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(left), jax.tree.leaves(right), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("dies_at", [7, 9, 13, 19])
def test_case_t12_resume_equals_a_straight_run(
    setup: Setup, straight: tuple[TrainState, list[dict]], seen: list[list[int]], tmp_path: Path, dies_at: int
) -> None:
    """Parameters, moments, learning rate, sample order and key; the epochs end at samples 11 and 22 of 40."""
    with pytest.raises(KeyboardInterrupt):
        setup.run(tmp_path, dies_at=dies_at)
    assert len(seen) == dies_at
    seen.clear()
    state = setup.run(tmp_path)
    resumed_at = dies_at // 7 * 7
    order = SampleOrder(11, 2, SETTINGS.seed)
    assert seen == [order.rows(step).tolist() for step in range(resumed_at, STEPS)]
    assert_same(state, straight[0])
    assert rows_of(tmp_path) == straight[1]


def test_training_does_something(straight: tuple[TrainState, list[dict]]) -> None:
    train_rows = [row for row in straight[1] if row["kind"] == "train"]
    assert [row["step"] for row in train_rows] == list(range(1, STEPS + 1))
    assert [len(row["loss_per_step"]) for row in train_rows] == [1] * 5 + [2] * 15
    assert train_rows[0]["learning_rate"] < train_rows[3]["learning_rate"] > train_rows[-1]["learning_rate"]
    held_out = [row for row in straight[1] if row["kind"] == "held_out"]
    assert [row["step"] for row in held_out] == [6, 12, 18, 20]
    # Three rows of eight supervised tokens; the first two tokens of a text have no draft.
    assert all(row["num_tokens"] == 24 for row in held_out)
    assert held_out[0]["loss"] != held_out[-1]["loss"]


def test_a_finished_run_is_not_repeated(
    setup: Setup, straight: tuple[TrainState, list[dict]], seen: list[list[int]], tmp_path: Path
) -> None:
    setup.run(tmp_path)
    seen.clear()
    state = setup.run(tmp_path)
    assert seen == []
    assert_same(state, straight[0])
    assert rows_of(tmp_path) == straight[1]


def spoiled(setup: Setup, poison: Callable[[int, Any], Any]) -> Setup:
    """The same run with some batches changed."""
    return dataclasses.replace(
        setup,
        step_of=lambda index: lambda state, batch: setup.step_of(index)(state, poison(index, batch)),
    )


def test_bad_batches_are_skipped_and_counted(setup: Setup, tmp_path: Path) -> None:
    def poison(index: int, batch: Any) -> Any:
        return batch.replace(features=batch.features * jnp.float32(np.nan)) if index in (3, 4, 8) else batch

    state = spoiled(setup, poison).run(tmp_path)
    assert int(state.num_skipped) == 3
    assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in jax.tree.leaves(state.params))
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "train"]
    assert [row["step"] for row in rows if row["skipped"]] == [4, 5, 9]
    assert rows[3]["loss"] is None


def test_too_many_bad_batches_in_a_row_stop_the_run_even_over_a_restart(setup: Setup, tmp_path: Path) -> None:
    def poison(index: int, batch: Any) -> Any:
        return batch.replace(features=batch.features * jnp.float32(np.nan)) if index >= 6 else batch

    bad = spoiled(setup, poison)
    # Step 7 is bad and has a checkpoint; steps 8 and 9 are bad in the next start.
    with pytest.raises(KeyboardInterrupt):
        bad.run(tmp_path, dies_at=7)
    with pytest.raises(RunError, match=r"3 batches in a row up to step 9 gave no finite loss.*--max_bad_batches"):
        bad.run(tmp_path)


def test_case_t5_a_batch_without_supervised_tokens_passes(setup: Setup, tmp_path: Path) -> None:
    states: dict[int, Any] = {}

    def mask_out(index: int, batch: Any) -> Any:
        return batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask)) if index in (0, 8) else batch

    masked = spoiled(setup, mask_out)

    def step_of(index: int) -> Any:
        def step(state: TrainState, batch: Any) -> Any:
            before = jax.device_get(state.params)
            after, metrics = masked.step_of(index)(state, batch)
            states[index] = (before, jax.device_get(after.params))
            return after, metrics

        return step

    state = dataclasses.replace(masked, step_of=step_of).run(tmp_path)
    assert int(state.num_skipped) == 0
    rows = [row for row in rows_of(tmp_path) if row["kind"] == "train"]
    for index in (0, 8):
        assert (rows[index]["loss"], rows[index]["num_tokens"]) == (0.0, 0)
        for a, b in zip(*map(jax.tree.leaves, states[index]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, states[9]), strict=True))


def test_rows_that_fill_up_the_last_held_out_batch_do_not_count(setup: Setup) -> None:
    params = setup.state().params
    three = setup.held_out.run(params)
    batches = setup.held_out._batches
    one_by_one = HeldOutTest(batches, 3, 1, setup.held_out._evaluate).run(params)
    assert three["num_tokens"] == one_by_one["num_tokens"]
    np.testing.assert_allclose(three["loss"], one_by_one["loss"], rtol=1e-5)


def test_acceptance_length_by_hand() -> None:
    assert acceptance_length([0.5, 0.5]) == 1.75
    assert acceptance_length([]) == 1.0
