"""The plan of a run, against numbers worked out by hand and against published shapes."""

from __future__ import annotations

import dataclasses

import pytest

from specjax.models import ModelConfig, RopeScaling
from train.config import TrainConfig
from train.flags import parse_command_line
from train.plan import drafter_config, drafter_train_flops, make_plan, target_num_params

LLAMA = ModelConfig(
    128256,
    4096,
    14336,
    32,
    32,
    8,
    128,
    rope_theta=5e5,
    rope_scaling=RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
    max_position_embeddings=131072,
)
SMOLLM2 = ModelConfig(49152, 576, 1536, 30, 9, 3, 64, max_position_embeddings=8192, tie_word_embeddings=True)


@pytest.mark.parametrize(("model", "parameters"), [(LLAMA, 8_030_261_248), (SMOLLM2, 134_515_008)])
def test_parameters_are_the_published_numbers(model: ModelConfig, parameters: int) -> None:
    assert target_num_params(model) == parameters


def test_the_llama_plan_without_weights() -> None:
    plan = make_plan(parse_command_line(["--flagfile=llama8b.flags"]), LLAMA)
    text = str(plan)
    assert plan.sections["Expected at decoding"]["nu (bytes of the head over full)"] == "0.129"
    assert plan.sections["Drafter (EAGLE-3)"]["LM head"] == "low_rank [4096, 512] x [512, 128256]"
    assert plan.sections["Training"]["steps"] == "103125 (S = 7)"
    assert "64 rows x 2048 tokens = 131 K tokens a step" in text
    # 8.03 billion parameters of two bytes.
    assert plan.sections["Memory per device (estimate)"]["target weights"] == "15 GiB"
    assert "answer tokens, at most" in text


def test_fsdp_splits_the_weights() -> None:
    config = parse_command_line(["--flagfile=llama8b.flags"])
    split = dataclasses.replace(config, mesh="data:2,fsdp:4")
    assert make_plan(split, LLAMA).sections["Memory per device (estimate)"]["target weights"] == "3.74 GiB"


def test_the_smollm2_plan_counts_the_shipped_prompts() -> None:
    plan = make_plan(TrainConfig(), SMOLLM2)
    assert plan.sections["Data"]["prompts"] == "449 shipped, 1 answer(s) each"
    assert plan.sections["Training"]["feature cache"] == "4.5 KiB a token"


def test_operations_of_one_step_by_hand() -> None:
    config = TrainConfig.create(
        head="full", batch_size=2, batch_length=16, loss_rows=5, loss_window=4, unroll_steps=3, warmup_steps=1
    )
    model = ModelConfig(50, 8, 16, 4, 2, 1, 4)
    drafter = drafter_config(config, model)
    entries, tokens = 2 * 8, 2 * 16
    keys_values = 16 * 4 * 2
    others = 16 * 8 + 8 * 8 + 3 * 8 * 16
    forward = 2 * tokens * (24 * 8 + keys_values) + 2 * entries * others + 2 * 2 * entries * (keys_values + others)
    attention, head = 3 * 4 * entries * 8 * 8, 3 * 2 * entries * 8 * 50
    # Four windows of four entries and two more positions each.
    target_head = 2 * 4 * 6 * 8 * 50
    expected = 3 * (forward + attention + head) + target_head
    assert drafter_train_flops(config, drafter, unroll_steps=3) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"rank": 600}, r"`--rank` must be at most the target's width 576; got 600"),
        ({"feature_layers": "1,2,30"}, r"`--feature_layers` must be below the target's 30 layers; got 1,2,30"),
        ({"batch_length": 9000}, r"`--batch_length` must be at most the target's context of 8192 tokens; got 9000"),
    ],
)
def test_what_does_not_fit_the_target_is_refused(flags: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_plan(TrainConfig.create(**flags), SMOLLM2)
