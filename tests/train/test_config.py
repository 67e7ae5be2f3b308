"""Settings: bounds, combinations, presets, identity."""

from __future__ import annotations

import dataclasses

import pytest

from train.config import BUDGETS, TrainConfig
from train.flags import flags_text, parse_command_line
from train.idle_settings import idle_settings
from train.run_identity import differing_flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"rank": 0}, ["`--rank` must be at least 1", "0"]),
        ({"answer_temperature": -0.5}, ["`--answer_temperature` must be above 0", "-0.5"]),
        ({"answer_top_p": 1.5}, ["`--answer_top_p` must be at most 1", "1.5"]),
        ({"learning_rate": float("nan")}, ["`--learning_rate` must be finite", "nan"]),
        ({"learning_rate": 0.0}, ["`--learning_rate` must be above 0", "0.0"]),
        ({"head": "ful"}, ["`--head` must be one of bcl, coral,", "low_rank", "'ful'"]),
        ({"budget": "huge"}, ["`--budget` must be one of short, long", "'huge'"]),
        ({"target": ""}, ["`--target` must not be empty"]),
        ({"dataset": ""}, ["`--dataset` must not be empty"]),
        ({"draft_lengths": "1,x"}, ["`--draft_lengths` must be numbers", "'1,x'"]),
        ({"draft_lengths": "0,1"}, ["`--draft_lengths` must be at least 1", "'0,1'"]),
        ({"draft_lengths": "1,100000"}, ["`--draft_lengths` must be at most 64 each", "'1,100000'"]),
        ({"draft_lengths": "9" * 5000}, ["`--draft_lengths` must be numbers"]),
        ({"train_steps": 10**20 - 1}, ["`--train_steps` must be at most 1000000000", "99999999999999999999"]),
        ({"template_date": "foo"}, ["`--template_date` must be a day as YYYY-MM-DD", "'foo'"]),
        ({"template_date": "20260131"}, ["`--template_date` must be a day as YYYY-MM-DD", "'20260131'"]),
        ({"feature_layers": "1,2"}, ["`--feature_layers` must be three", "'1,2'"]),
        ({"mesh": "data:0"}, ["`--mesh` must name", "'data:0'"]),
        ({"mesh": "data:2,data:2"}, ["`--mesh` must name", "once"]),
        ({"mesh": "rows:2"}, ["`--mesh` must name", "'rows:2'"]),
        ({"mesh": "data:3"}, ["`--batch_size`", "multiple", "3"]),
        ({"batch_size": 4, "accumulation_steps": 3}, ["`--accumulation_steps` must divide", "3"]),
        ({"train_steps": 10, "warmup_steps": 10}, ["`--warmup_steps` must be below", "10"]),
        ({"train_steps": 10, "stage1_steps": 10}, ["`--stage1_steps` must be below", "10"]),
        ({"batch_length": 8, "unroll_steps": 7}, ["`--batch_length`", "9", "8"]),
        ({"answer_source": "dataset"}, ["`--answer_source=dataset` must come with `--dataset`"]),
        ({"coordinator": "host:1"}, ["must come together"]),
        ({"coordinator": "host", "num_processes": 2, "process_id": 0, "mesh": "data:2"}, ["HOST:PORT", "'host'"]),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 2, "mesh": "data:2"}, ["must be below", "2"]),
        ({"coordinator": "h:1", "num_processes": 2, "process_id": 0}, ["must come with `--mesh`"]),
        ({"seed": -1}, ["`--seed` must be at least 0", "-1"]),
        ({"held_out_prompts": 0}, ["`--held_out_prompts` must be at least 1", "0"]),
    ],
)
def test_each_error_names_flag_rule_and_value(flags: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match="`--") as raised:
        TrainConfig.create(**flags)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        (["--head=full", "--rank=8"], "rank", "--head=full"),
        (["--strict_data"], "strict_data", "without `--dataset`"),
        (["--dataset=x.jsonl", "--prompt_kinds=chat"], "prompt_kinds", "with `--dataset`"),
        (["--answer_temperature=1.0"], "answer_temperature", "one greedy answer"),
        (["--features=online", "--feature_dtype=float32"], "feature_dtype", "--features=online"),
        (["--unroll_steps=1", "--stage1_steps=3"], "stage1_steps", "--unroll_steps=1"),
        (["--optimizer=adamw", "--momentum=0.8"], "momentum", "--optimizer=adamw"),
        (["--schedule=constant", "--final_learning_rate=0.1"], "final_learning_rate", "--schedule=constant"),
        (["--noevaluate", "--eval_prompts=3"], "eval_prompts", "--noevaluate"),
        (["--process_id=0"], "process_id", "without `--coordinator`"),
        (["--max_text_rows=4"], "max_text_rows", "without `--text`"),
        (["--dataset=x", "--answer_source=dataset", "--answer_slots=2"], "answer_slots", "--answer_source=dataset"),
    ],
)
def test_a_flag_without_effect_is_refused(arguments: list[str], name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=f"`--{name}` has no effect .*{reason}"):
        parse_command_line(arguments)


def test_idle_settings_are_fields() -> None:
    assert set(idle_settings(TrainConfig())) <= {field.name for field in dataclasses.fields(TrainConfig)}


def test_given_values_win_over_the_preset() -> None:
    config = parse_command_line(["--budget=long", "--train_steps=77"])
    assert config.train_steps == 77
    assert config.answers_per_prompt == BUDGETS["long"]["answers_per_prompt"]


def test_presets_set_the_same_fields() -> None:
    assert set(BUDGETS["short"]) == set(BUDGETS["long"])


def test_a_few_steps_alone_are_a_valid_run() -> None:
    for steps in range(1, 6):
        assert parse_command_line([f"--train_steps={steps}"]).train_steps == steps


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--budget=long"],
        ["--head=full"],
        ["--noevaluate", "--features=online", "--mesh=data:2,fsdp:2"],
        ["--dataset=x.jsonl", "--answer_source=dataset", "--optimizer=adamw"],
        ["--unroll_steps=1", "--schedule=constant", "--nogreedy_first"],
    ],
)
def test_flags_text_gives_the_same_settings_again(arguments: list[str], tmp_path) -> None:
    config = parse_command_line(arguments)
    file = tmp_path / "flags.txt"
    file.write_text(flags_text(config))
    assert parse_command_line([f"--flagfile={file}"]) == config


def test_identity_ignores_where_and_how_but_not_what() -> None:
    config = TrainConfig()
    elsewhere = dataclasses.replace(config, run_dir="other", progress=False, keep_checkpoints=5)
    assert config.digest() == elsewhere.digest()
    other = dataclasses.replace(config, learning_rate=1.0)
    assert config.digest() != other.digest()
    assert differing_flags(other.identity(), config.identity()) == [
        f"--learning_rate (there {config.learning_rate}, here 1.0)"
    ]


def test_help_lists_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        parse_command_line(["--help"])
    assert raised.value.code == 0
    shown = capsys.readouterr().out
    for field in dataclasses.fields(TrainConfig):
        assert field.name in shown
