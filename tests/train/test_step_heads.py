"""A training step with every kind of head and loss: what moves, what stays, what is measured, parts of a batch."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import Eagle3Config, fixed_parameters
from specjax.heads import HeadSource, get_head
from specjax.models import ModelConfig, init_params
from train.optimizer import OptimizerConfig, fixed_mask, make_optimizer
from train.step import Batch, StepConfig, make_eval_step, make_train_state, make_train_step

VOCAB, LENGTH, STEPS = 40, 12, 2
TARGET = ModelConfig(
    vocab_size=VOCAB, hidden_size=8, intermediate_size=16, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=4
)
STEP = StepConfig(num_steps=STEPS, window=4, chunk_rows=8, measured_chunks=0)
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup_steps=0, total_steps=200)
OPTIONS = {
    "vocab_trim": {"rows": 10, "trained": True},
    "fr_spec": {"rows": 10},
    "low_rank": {"ranks": (4, 2)},
    "spec_vocab": {"candidates": 6},
    "low_rank_preview": {"candidates": 6},
    "coral": {"groups": 6, "active": 2},
    "dyna_spec": {"groups": 6, "active": 2, "width": 4},
}


@functools.cache
def make_drafter(kind, num_valid_tokens=None):
    rank = 4 if kind in ("low_rank", "spec_vocab", "low_rank_preview") else None
    config = Eagle3Config.for_target(
        TARGET, head_kind=kind, rank=rank, head_options=OPTIONS.get(kind), num_valid_tokens=num_valid_tokens
    )
    target_params = init_params(jax.random.key(1), TARGET, scale=0.5)
    counts = np.arange(VOCAB)[::-1].astype(np.int64)
    source = HeadSource(answer_counts=counts, corpus_counts=counts, num_valid_tokens=num_valid_tokens)
    base = make_drafter("full")[1] if get_head(kind).needs_base else None
    params = init_drafter(
        jax.random.key(2),
        config,
        target_params,
        TARGET,
        head_init="random" if kind == "full" else "svd",
        warm_start=False,
        source=source,
        base=base,
    )
    return config, params, {name: target_params[name] for name in ("embed_tokens", "lm_head")}


def make_batch(batch_size=2, seed=0):
    generator = np.random.default_rng(seed)
    mask = np.arange(LENGTH) >= generator.integers(2, 6, batch_size)[:, None]
    return Batch(
        tokens=jnp.asarray(generator.integers(0, VOCAB, (batch_size, LENGTH)), jnp.int32),
        loss_mask=jnp.asarray(mask),
        features=jnp.asarray(generator.standard_normal((batch_size, LENGTH, 24)), jnp.float32),
        final_hidden=jnp.asarray(generator.standard_normal((batch_size, LENGTH, 8)), jnp.float32),
        segment_ids=jnp.ones((batch_size, LENGTH), jnp.int32),
    )


def optimizer(config):
    return make_optimizer(OptimizerConfig(**{**vars(OPTIMIZER), "frozen": fixed_parameters(config)}))


@functools.cache
def compiled(config, step_config):
    return make_train_step(config, step_config, optimizer(config))


def one_step(config, params, frozen, batch, step_config=STEP):
    # A copy, since a step takes the state's buffers.
    state = make_train_state(jax.tree.map(jnp.copy, params), optimizer(config), jax.random.key(5))
    return compiled(config, step_config)(state, frozen, batch)


@pytest.mark.parametrize(
    "kind",
    ["vocab_trim", "dyna_spec"]
    + [pytest.param(kind, marks=pytest.mark.slow) for kind in OPTIONS if kind not in ("vocab_trim", "dyna_spec")],
)
def test_a_step_moves_what_is_trained_and_case_t5_nothing_without_supervised_tokens(kind):
    config, params, frozen = make_drafter(kind)
    batch = make_batch()
    state, metrics = one_step(config, params, frozen, batch)
    assert np.isfinite(float(metrics["loss"]))
    assert float(metrics["grad_norm"]) > 0
    fixed = fixed_mask(params, fixed_parameters(config))
    for (path, is_fixed), before, after in zip(
        jax.tree.leaves_with_path(fixed), jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True
    ):
        assert before.dtype == after.dtype
        assert np.array_equal(before, after) == is_fixed, jax.tree_util.keystr(path)
    if not get_head(kind).law_is_first_part or get_head(kind).integers():
        assert np.all(metrics["acceptance_per_step"] <= metrics["ceiling_per_step"] + 1e-6)
        assert np.all((metrics["ceiling_per_step"] > 0) & (metrics["ceiling_per_step"] < 1))
        # Where both agree on a token, it can be drafted.
        assert np.all(metrics["top1_per_step"] <= metrics["candidate_recall_per_step"])
        assert np.all(metrics["candidate_recall_per_step"] < 1)
    else:
        assert not {"ceiling_per_step", "candidate_recall_per_step"} & set(metrics)
    # Case T5, with the same program: a batch without supervised tokens.
    state, metrics = one_step(config, params, frozen, batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask)))
    assert float(metrics["loss"]) == 0
    assert int(metrics["num_tokens"]) == int(metrics["skipped"]) == 0
    for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("loss", ["lk_hybrid", pytest.param("lk", marks=pytest.mark.slow)])
def test_case_t5_and_parts_of_a_batch_for_the_acceptance_losses(loss):
    """The hybrid's share of KL comes from the mean acceptance of the whole batch, whatever parts it is computed in."""
    config, params, frozen = make_drafter("vocab_trim")
    batch = make_batch(batch_size=4)
    whole, parts = (StepConfig(**{**vars(STEP), "loss": loss, "accumulation_steps": n}) for n in (1, 2))
    metrics, metrics_of_parts = (
        one_step(config, params, frozen, batch, step_config)[1] for step_config in (whole, parts)
    )
    for name in ("loss", "grad_norm", "acceptance_per_step", "ceiling_per_step"):
        np.testing.assert_allclose(metrics[name], metrics_of_parts[name], rtol=1e-4, err_msg=name)
    masked = batch.replace(loss_mask=jnp.zeros_like(batch.loss_mask))
    for step_config in (whole, parts):
        state, metrics = one_step(config, params, frozen, masked, step_config)
        assert float(metrics["loss"]) == 0
        for before, after in zip(jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
            np.testing.assert_array_equal(before, after)


@pytest.mark.slow
def test_a_floor_lets_all_tokens_be_drafted_and_the_ceiling_follows():
    config, params, frozen = make_drafter("dyna_spec")
    with_floor = dataclasses.replace(config, head=config.head.with_options(floor=0.05))
    metrics = make_eval_step(with_floor, STEP)(params, frozen, make_batch())
    np.testing.assert_allclose(metrics["ceiling_per_step"], 1, rtol=1e-5)
    np.testing.assert_array_equal(metrics["candidate_recall_per_step"], 1)


def test_the_hybrid_loss_blends_by_the_measured_acceptance():
    config, params, frozen = make_drafter("vocab_trim")
    batch = make_batch()
    values = {}
    for loss in ("kl", "lk_hybrid"):
        step_config = StepConfig(**{**vars(STEP), "loss": loss, "blend_decay": 2.0})
        values[loss] = make_eval_step(config, step_config)(params, frozen, batch)
    acceptance = np.asarray(values["kl"]["acceptance_per_step"], np.float64)
    blend = np.exp(-2.0 * acceptance)
    # Total variation sees the mass that is lost: it is one minus the acceptance.
    expected = blend * values["kl"]["loss_per_step"] + (1 - blend) * (1 - acceptance)
    np.testing.assert_allclose(values["lk_hybrid"]["loss_per_step"], expected, rtol=1e-5)


def test_case_h8_padded_ids_have_no_part_in_training_a_reduced_head():
    """Target rows past the tokenizer's: whatever mass the target gives them, they are neither kept nor counted."""
    config, params, frozen = make_drafter("vocab_trim", 30)
    assert int(params["head"]["ids"].max()) < 30
    evaluate = make_eval_step(config, STEP)
    batch = make_batch()
    metrics = evaluate(params, frozen, batch)
    heavy = dict(frozen, lm_head=frozen["lm_head"].at[:, 30:].multiply(50))
    for name, value in evaluate(params, heavy, batch).items():
        np.testing.assert_array_equal(value, metrics[name], err_msg=name)
