"""Puts the training of one drafter together: start, optimiser, devices, features and checkpoints; then the loop."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.target import Target
from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import Eagle3Config, fixed_parameters, num_params
from specjax.heads import HeadSource, get_head
from train import mesh as mesh_lib
from train.checkpointing import Checkpoints
from train.config import TrainConfig
from train.data import Rows
from train.features import FeatureSource, hidden_covariance
from train.head_data import head_source_of, vocabulary_report
from train.loop import BatchMaker, HeldOutTest, LoopSettings, StepFunction, train
from train.plan import load_base
from train.prepare import feature_source, in_dtype
from train.stages import stage
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

# Enough rows for a d x d matrix to be well determined, few enough to be quick for large targets.
_COVARIANCE_ROWS = 512


def optimizer_config(config: TrainConfig, fixed: tuple[str, ...] = ()) -> OptimizerConfig:
    """The optimiser's part of the settings; `fixed` names parameters that the head leaves as they are."""
    return OptimizerConfig(
        name=config.optimizer,
        learning_rate=config.learning_rate,
        total_steps=config.train_steps,
        schedule=config.schedule,
        warmup_steps=config.warmup_steps,
        final_learning_rate=config.final_learning_rate,
        weight_decay=config.weight_decay,
        beta1=config.beta1,
        beta2=config.beta2,
        momentum=config.momentum,
        adam_share=config.adam_share,
        clip_norm=config.clip_norm,
        frozen=fixed if config.train_head else (*fixed, "head"),
    )


def step_config(config: TrainConfig, *, unroll_steps: int) -> StepConfig:
    """The part of the settings that one step with `unroll_steps` draft steps needs."""
    return StepConfig(
        num_steps=unroll_steps,
        step_decay=config.loss_decay,
        window=config.loss_window,
        loss_rows=config.loss_rows,
        chunk_rows=config.chunk_rows,
        accumulation_steps=config.accumulation_steps,
        compute_dtype=config.train_dtype,
        rematerialise=config.rematerialise,
        loss=config.loss,
        blend_decay=config.lk_decay,
    )


class Trainer:
    """Everything that training needs, placed on the devices.

    Attributes:
        drafter: shape of the drafter, its head's size fitted to the data where that depends on them.
        state: the state before the first step.
        vocabulary: for a head over a fixed part of the vocabulary, what it covers; else what was counted.
    """

    def __init__(
        self, config: TrainConfig, target: Target, drafter: Eagle3Config, rows: Rows, held_out: Rows, data_dir: Path
    ) -> None:
        """Computes features, if they are cached, and the start of the drafter.

        Args:
            config: the settings.
            target: the frozen model.
            drafter: shape of the drafter.
            rows: training rows.
            held_out: held-out rows.
            data_dir: keeps cached features.
        """
        self._config, self._rows, self._held_out_rows = config, rows, held_out
        self._mesh = mesh_lib.make_mesh(config.mesh_axes) if config.mesh else None
        teacher = in_dtype(target, config.teacher_dtype)
        if config.features == "online":
            teacher = dataclasses.replace(teacher, params=self._put_weights(teacher.params))
        source_of = functools.partial(
            feature_source, config, teacher, layers=drafter.feature_layers, data_dir=data_dir, place=self._place_rows
        )
        self._source = source_of(rows=rows, title="features")
        self._held_out_source = source_of(rows=held_out, title="held-out features")
        frozen = {name: target.params[name] for name in ("embed_tokens", "lm_head")}
        self._frozen = self._put_weights(frozen)
        head_source, self.vocabulary = head_source_of(config, target, drafter, rows)
        # Some heads take their size from the data.
        head = get_head(drafter.head.kind).fit(drafter.head, head_source)
        self.drafter = dataclasses.replace(drafter, head=head)
        self.state = self._initial_state(target, head_source)

    @property
    def trains(self) -> bool:
        """False if all that is wanted is derived from a finished drafter: another head over its own parameters."""
        return self._config.base is None or get_head(self.drafter.head.kind).is_trained(self.drafter.head)

    def train(self, run_dir: Path) -> TrainState:
        """Trains to the last step, from the newest checkpoint on; see `train.loop.train`.

        Where there is nothing to train, the held-out test alone is made.
        """
        config = self._config
        settings = LoopSettings(
            train_steps=config.train_steps if self.trains else 0,
            batch_size=config.batch_size,
            seed=config.seed,
            checkpoint_every=config.checkpoint_every,
            held_out_every=config.held_out_every,
            log_every=config.log_every,
            max_bad_batches=config.max_bad_batches,
            progress=config.progress,
        )
        evaluate = make_eval_step(self.drafter, step_config(config, unroll_steps=config.unroll_steps))
        held_out = HeldOutTest(
            self._batch_maker(self._held_out_rows, self._held_out_source),
            self._held_out_rows.num_rows,
            config.batch_size,
            lambda params, batch: evaluate(params, self._frozen, batch),
        )
        checkpoints = Checkpoints(run_dir / "checkpoints", keep=config.keep_checkpoints)
        try:
            return train(
                self.state,
                self._step_of(),
                self._batch_maker(self._rows, self._source),
                self._rows.num_rows,
                held_out,
                settings,
                run_dir,
                checkpoints,
                lambda index: float(np.asarray(learning_rate_schedule(optimizer_config(config))(index))),
            )
        finally:
            checkpoints.close()

    def _step_of(self) -> Callable[[int], StepFunction]:
        """The function of each step: one draft step in the first stage, all of them afterwards."""
        config = self._config
        optimizer = make_optimizer(self._optimizer_config())
        shardings = None if self._mesh is None else mesh_lib.weight_shardings(self._mesh, self.state)

        @functools.cache
        def function(unroll_steps: int) -> StepFunction:
            step = make_train_step(
                self.drafter,
                step_config(config, unroll_steps=unroll_steps),
                optimizer,
                state_shardings=shardings,
            )
            return lambda state, batch: step(state, self._frozen, batch)

        return lambda index: function(1 if index < config.stage1_steps else config.unroll_steps)

    def _optimizer_config(self) -> OptimizerConfig:
        return optimizer_config(self._config, fixed_parameters(self.drafter))

    def _initial_state(self, target: Target, head_source: HeadSource) -> TrainState:
        config = self._config
        init_key, train_key = jax.random.split(jax.random.key(config.seed))
        with stage("start") as done:
            covariance = None
            if config.head_init == "activation_aware":
                covariance = hidden_covariance(
                    self._source, self._rows, max_rows=_COVARIANCE_ROWS, rows_at_once=config.batch_size
                )
            params = init_drafter(
                init_key,
                self.drafter,
                target.params,
                target.config,
                head_init=config.head_init,
                covariance=covariance,
                warm_start=config.warm_start,
                source=head_source,
                base=None if config.base is None else load_base(config.base)[1],
            )
            done(f"{num_params(self.drafter)} parameters, {config.head} head from {config.head_init}")
            ids = get_head(self.drafter.head.kind).support(params["head"])
            if ids is not None:
                self.vocabulary = vocabulary_report(
                    np.asarray(ids), head_source, self._rows, self._held_out_rows, self.vocabulary
                )
                done(
                    f"{len(ids)} of {self.drafter.vocab_size} tokens cover "
                    f"{self.vocabulary['training_coverage']:.2%} of training answers and "
                    f"{self.vocabulary['held_out_coverage']:.2%} of held-out ones"
                )
        state = make_train_state(params, make_optimizer(self._optimizer_config()), train_key)
        return state if self._mesh is None else mesh_lib.put(state, mesh_lib.weight_shardings(self._mesh, state))

    def _batch_maker(self, rows: Rows, source: FeatureSource) -> BatchMaker:
        return BatchMaker(rows, source, self._place_rows)

    def _place_rows(self, array: Any) -> jax.Array:
        if self._mesh is None:
            return jnp.asarray(array)
        return mesh_lib.put(array, mesh_lib.row_sharding(self._mesh))

    def _put_weights(self, tree: Any) -> Any:
        if self._mesh is None:
            return tree
        return mesh_lib.put(tree, mesh_lib.weight_shardings(self._mesh, tree))
