"""Answers by the target: resumable at any line, the same whatever was cut, never mixed with other settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specjax.checkpoints.target import Target
from specjax.decoding.engine import Engine
from specjax.text.chat_template import encode_prompt
from train.answers import AnswerLimits, Conversation, answer_conversations, rounds_of
from train.artifacts import RunError
from train.conversations import answer_examples

LIMITS = AnswerLimits(max_answer_tokens=6, max_total_tokens=96, num_slots=3)
PLAN = (
    Conversation("greedy", "train", "chat", ("hello world",)),
    Conversation("two", "train", "chat", ("hello", "and the other one"), temperature=1.0, seed=4),
    Conversation("sampled", "train", "code", ("hello world",), temperature=1.0, top_p=0.9, seed=4),
    Conversation("three", "held_out", "lists", ("a", "b", "c")),
    Conversation("system", "held_out", "lists", ("hello",), system="all in order"),
)


def answer(target: Target, folder: Path, plan: tuple[Conversation, ...] = PLAN, **options: Any) -> Any:
    return answer_conversations(target, list(plan), folder / "answers.jsonl", LIMITS, progress=False, **options)


@pytest.fixture(scope="module")
def straight(target: Target, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("straight")
    answer(target, folder)
    return (folder / "answers.jsonl").read_bytes()


class Counting(Engine):
    """An engine that counts its requests, and can be killed after some answers."""

    asked: list[str]
    answers_left = 10**9

    def stream(self, requests: Any) -> Any:
        requests = list(requests)
        type(self).asked += [request.id for request in requests]
        for event in super().stream(requests):
            if event.completion is not None:
                if self.answers_left == 0:
                    raise KeyboardInterrupt
                type(self).answers_left -= 1
            yield event


def counting(answers_left: int = 10**9) -> type[Counting]:
    return type("CountingOnce", (Counting,), {"asked": [], "answers_left": answers_left})


def test_every_turn_is_answered_in_the_order_of_the_plan(straight: bytes) -> None:
    lines = [json.loads(line) for line in straight.splitlines()]
    places = [(conversation.id, turn) for conversation in PLAN for turn in range(len(conversation.turns))]
    assert [(line["id"], line["turn"]) for line in lines] == places
    for line in lines:
        assert 1 <= len(line["token_ids"]) <= LIMITS.max_answer_tokens
        assert line["finish_reason"] in ("stop", "length")


def test_later_turns_see_the_answers_before(target: Target, straight: bytes) -> None:
    lines = {(line["id"], line["turn"]): line for line in map(json.loads, straight.splitlines())}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": lines["three", 0]["answer"]},
        {"role": "user", "content": "b"},
    ]
    assert lines["three", 1]["prompt_ids"] == list(encode_prompt(target.tokenizer, target.chat_template, messages))
    system = [{"role": "system", "content": "all in order"}, {"role": "user", "content": "hello"}]
    assert lines["system", 0]["prompt_ids"] == list(encode_prompt(target.tokenizer, target.chat_template, system))


@pytest.mark.parametrize("answers_before", [0, 1, 3, 5, 7])
def test_a_killed_run_generates_only_what_is_missing(
    target: Target, straight: bytes, tmp_path: Path, answers_before: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(target, tmp_path, make_engine=counting(answers_before))
    path = tmp_path / "answers.jsonl"
    there = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert len(there) == answers_before
    with path.open("ab") as file:
        file.write(b'{"id": "greedy", "turn": 0, "tok')
    engine = counting()
    answer(target, tmp_path, make_engine=engine)
    assert not {f"{line['id']}/{line['turn']}" for line in there} & set(engine.asked)
    assert len(engine.asked) == 8 - answers_before
    assert path.read_bytes() == straight


def test_a_complete_file_needs_no_engine(target: Target, straight: bytes, tmp_path: Path) -> None:
    answer(target, tmp_path)
    engine = counting()
    answer(target, tmp_path, make_engine=engine)
    assert engine.asked == []
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["num_turns"] == 8
    assert manifest["key"]["template_digest"] == target.chat_template.digest


@pytest.mark.parametrize("lost", [slice(None), slice(2, None), slice(3, 4)])
def test_answers_that_a_complete_file_lost_are_generated_again(
    target: Target, straight: bytes, tmp_path: Path, lost: slice
) -> None:
    answer(target, tmp_path)
    path = tmp_path / "answers.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    gone = lines[lost]
    del lines[lost]
    path.write_bytes(b"".join(lines))
    engine = counting()
    answer(target, tmp_path, make_engine=engine)
    assert len(engine.asked) == len(gone)
    assert path.read_bytes() == straight


def test_answers_for_other_settings_are_refused_by_name(target: Target, tmp_path: Path) -> None:
    answer(target, tmp_path, PLAN[:1])
    other = AnswerLimits(max_answer_tokens=5, max_total_tokens=96, num_slots=3)
    with pytest.raises(RunError, match=r"other settings: .*max_answer_tokens \(there 6, here 5\).*--data_dir"):
        answer_conversations(target, [PLAN[0]], tmp_path / "answers.jsonl", other, progress=False)
    with pytest.raises(RunError, match="prompts_and_sampling_digest"):
        answer(target, tmp_path, PLAN[1:2])


def test_answers_without_a_manifest_are_refused(target: Target, tmp_path: Path) -> None:
    (tmp_path / "answers.jsonl").write_text("{}\n")
    with pytest.raises(RunError, match="no manifest"):
        answer(target, tmp_path)


def test_a_prompt_that_does_not_fit_is_skipped_alone(target: Target, tmp_path: Path) -> None:
    long = Conversation("long", "train", "chat", ("x" * 200, "more"))
    file = answer(target, tmp_path, (long, PLAN[0]))
    lines = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [line["finish_reason"].partition(":")[0] for line in lines][:2] == ["skipped", "skipped"]
    assert "leaves no room in 96" in lines[0]["finish_reason"]
    train, _ = answer_examples(file, [long, PLAN[0]], target, supervise="answers")
    assert [example.id for example in train] == ["greedy"]


def test_examples_hold_the_generated_tokens_and_supervise_them(target: Target, tmp_path: Path) -> None:
    file = answer(target, tmp_path)
    train, held_out = answer_examples(file, PLAN, target, supervise="answers")
    assert [e.id for e in train] == ["greedy", "two", "sampled"]
    assert [e.id for e in held_out] == ["three", "system"]
    first = file.turns("greedy")[0]
    np.testing.assert_array_equal(train[0].tokens, [*first["prompt_ids"], *first["token_ids"]])
    np.testing.assert_array_equal(train[0].tokens[train[0].loss_mask], first["token_ids"])
    lines = file.turns("two")
    two = train[1]
    np.testing.assert_array_equal(two.tokens, [*lines[1]["prompt_ids"], *lines[1]["token_ids"]])
    assert two.loss_mask[-len(lines[1]["token_ids"]) :].all()
    assert two.loss_mask[: len(lines[0]["prompt_ids"])].sum() == 0
    # The first answer is supervised too, with the token that ends its turn.
    earlier = two.tokens[: len(lines[1]["prompt_ids"])][two.loss_mask[: len(lines[1]["prompt_ids"])]]
    end = target.config.eos_token_ids[0]
    assert earlier[-1] == end
    assert target.tokenizer.decode(earlier.tolist()) == lines[0]["answer"]
    everything, _ = answer_examples(file, PLAN, target, supervise="all")
    assert all(e.loss_mask.all() for e in everything)


def test_rounds_keep_the_order_of_turns_and_share_the_work() -> None:
    plan = [Conversation(f"c{i}", "train", "chat", ("x",) * (1 + i % 3)) for i in range(30)]
    rounds = rounds_of(plan)
    assert len(rounds) == 3
    seen: dict[str, int] = {}
    for turns in rounds:
        for conversation, turn in turns:
            assert seen.get(conversation.id, -1) == turn - 1
        seen.update({conversation.id: turn for conversation, turn in turns})
    assert all(seen[conversation.id] == len(conversation.turns) - 1 for conversation in plan)
    assert min(map(len, rounds)) >= 10
