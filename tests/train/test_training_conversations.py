"""From prompts and datasets to conversations and examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints.target import Target
from specjax.text import load_prompts
from train.artifacts import RunError
from train.config import TrainConfig
from train.conversations import dataset_examples, held_out_questions, plan_conversations


def make_dataset(folder: Path, rows: list[Any]) -> str:
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(*texts: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def test_shipped_prompts_are_answered_greedily_once_and_sampled_otherwise() -> None:
    config = TrainConfig.create(num_prompts=5, held_out_prompts=3, answers_per_prompt=3, answer_temperature=0.7)
    plan, summary = plan_conversations(config)
    train = [c for c in plan if c.split == "train"]
    held_out = [c for c in plan if c.split == "held_out"]
    assert (len(train), len(held_out)) == (15, 3)
    assert len({c.id for c in plan}) == len(plan)
    assert [c.temperature for c in train] == [0.0, 0.7, 0.7] * 5
    assert {c.temperature for c in held_out} == {0.0}
    assert len({c.turn_seed(0) for c in plan}) == len(plan)
    assert "5 training and 3 held-out prompts from shipped prompts" in summary
    assert {c.id.partition("#")[0] for c in train} <= {p.id for p in load_prompts("train")}
    assert {c.id for c in held_out} <= {p.id for p in load_prompts("held_out")}


def test_without_the_greedy_one_all_answers_are_sampled() -> None:
    config = TrainConfig.create(num_prompts=2, answers_per_prompt=2, greedy_first=False, answer_temperature=0.7)
    assert {c.temperature for c in plan_conversations(config)[0] if c.split == "train"} == {0.7}


def test_the_choice_of_prompts_depends_on_the_seed_alone() -> None:
    first, again, other = (
        [c.id for c in plan_conversations(TrainConfig.create(num_prompts=9, seed=seed))[0]] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_kinds_choose_among_shipped_prompts() -> None:
    config = TrainConfig.create(prompt_kinds="maths, lists")
    assert {c.kind for c in plan_conversations(config)[0]} == {"maths", "lists"}
    assert {p.kind for p in held_out_questions(config)} == {"maths", "lists"}
    with pytest.raises(ValueError, match="poems"):
        plan_conversations(TrainConfig.create(prompt_kinds="poems"))


def test_a_dataset_gives_user_turns_and_its_own_held_out_part(tmp_path: Path) -> None:
    rows: list[Any] = [chat(f"q{i}", "a", f"r{i}", "b") for i in range(8)]
    rows[3] = {"messages": [{"role": "system", "content": "s"}, *chat("q3", "a")["messages"]]}
    rows.insert(2, {"messages": "no list"})
    config = TrainConfig.create(dataset=make_dataset(tmp_path, rows), held_out_prompts=2)
    plan, summary = plan_conversations(config)
    assert "8 of 9 records kept" in summary
    by_row = {c.id.partition("#")[0]: c for c in plan}
    # Numbers are those of the rows in the file, bad ones counted.
    assert set(by_row) == {f"row-{i}" for i in range(9)} - {"row-2"}
    assert by_row["row-0"].turns == ("q0", "r0")
    assert (by_row["row-4"].system, by_row["row-4"].turns) == ("s", ("q3",))
    held_out = {c.id for c in plan if c.split == "held_out"}
    assert len(held_out) == 2
    assert {p.id for p in held_out_questions(config)} == held_out


def test_strict_data_stops_at_the_first_bad_row(tmp_path: Path) -> None:
    source = make_dataset(tmp_path, [chat("q", "a"), {"messages": 3}, chat("q", "a")])
    with pytest.raises(ValueError, match=r"data\.jsonl:2"):
        plan_conversations(TrainConfig.create(dataset=source, held_out_prompts=1, strict_data=True))


def test_too_small_a_dataset_is_named(tmp_path: Path) -> None:
    source = make_dataset(tmp_path, [chat("q", "a")] * 3)
    with pytest.raises(RunError, match=r"more conversations than `--held_out_prompts` \(3\); got 3"):
        plan_conversations(TrainConfig.create(dataset=source, held_out_prompts=3))


def test_a_dataset_may_keep_its_own_answers(target: Target, tmp_path: Path) -> None:
    source = make_dataset(tmp_path, [chat(f"hello {i}", f"world {i}") for i in range(6)])
    config = TrainConfig.create(dataset=source, answer_source="dataset", held_out_prompts=2, num_prompts=3)
    train, held_out = dataset_examples(config, target)
    assert (len(train), len(held_out)) == (3, 2)
    for example in (*train, *held_out):
        supervised = target.tokenizer.decode(example.tokens[example.loss_mask].tolist())
        assert supervised == f"world {example.id.removeprefix('row-')}"
    everything = TrainConfig.create(dataset=source, answer_source="dataset", held_out_prompts=2, supervise="all")
    assert all(np.all(example.loss_mask) for example in dataset_examples(everything, target)[0])
