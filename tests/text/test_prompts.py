"""Prompts of the package and files of questions."""

from __future__ import annotations

import collections
import json
from pathlib import Path

import pytest

from specjax.text.prompts import (
    KINDS,
    Prompt,
    count_turns,
    load_prompts,
    load_questions,
    normalise,
    repeated_first_turns,
)

MINIMUM = {"train": 400, "held_out": 120}


@pytest.mark.parametrize("split", ["train", "held_out"])
def test_shipped_prompts_are_whole(split: str) -> None:
    prompts = load_prompts(split)
    assert len(prompts) >= MINIMUM[split]
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert {prompt.kind for prompt in prompts} == set(KINDS)
    assert repeated_first_turns(prompts) == {}
    # Some conversations go on, and none are out of proportion.
    assert any(len(prompt.turns) > 1 for prompt in prompts)
    assert all(turn == turn.strip() and len(turn) < 4000 for prompt in prompts for turn in prompt.turns)


def test_no_held_out_prompt_is_trained_on() -> None:
    train, held_out = load_prompts("train"), load_prompts("held_out")
    assert not {prompt.id for prompt in train} & {prompt.id for prompt in held_out}
    assert repeated_first_turns([*train, *held_out]) == {}
    # Nor is a later turn of one the first of another.
    seen = {normalise(turn) for prompt in train for turn in prompt.turns}
    assert [prompt.id for prompt in held_out if normalise(prompt.turns[0]) in seen] == []


def test_held_out_prompts_are_not_trained_on_in_other_words() -> None:
    """Sets of three-word runs: two prompts that share most of theirs are one prompt with a word changed."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = normalise(text).split()
        return set(zip(words, words[1:], words[2:], strict=False))

    train = [(prompt.id, runs(prompt.turns[0])) for prompt in load_prompts("train")]
    close = []
    for prompt in load_prompts("held_out"):
        own = runs(prompt.turns[0])
        for name, other in train:
            if len(own & other) > 0.6 * min(len(own), len(other)) > 0:
                close.append((prompt.id, name))
    assert close == []


def test_kinds_are_chosen_and_checked() -> None:
    prompts = load_prompts("held_out", ("code", "maths"))
    assert collections.Counter(prompt.kind for prompt in prompts).keys() == {"code", "maths"}
    assert prompts == [prompt for prompt in load_prompts("held_out") if prompt.kind in ("code", "maths")]
    with pytest.raises(ValueError, match=r"`kinds` must be among .*got \['poems'\]"):
        load_prompts("train", ("code", "poems"))
    with pytest.raises(ValueError, match=r"`kinds` must be among .*got \(\)"):
        load_prompts("train", ())
    with pytest.raises(ValueError, match=r"`split` must be one of .*got 'test'"):
        load_prompts("test")


def test_normalise_forgets_case_punctuation_and_letter_forms() -> None:
    assert normalise("  Why,\n does \uff22READ go “stale”?") == "why does bread go stale"
    same = [Prompt("a", "chat", ("Why?",)), Prompt("b", "chat", ("why!",)), Prompt("c", "chat", ("how",))]
    assert repeated_first_turns(same) == {"why": ["a", "b"]}


def write(path: Path, *rows: object) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


def test_case_e7_conversations_and_turns_are_counted_apart(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81 + index, "category": "writing", "turns": ["Write.", "Write again."], "reference": [""]}
        for index in range(80)
    ]
    questions = load_questions(write(tmp_path / "mt_bench.jsonl", *rows))
    assert (len(questions), count_turns(questions)) == (80, 160)
    assert questions[0] == Prompt("81", "writing", ("Write.", "Write again."))


def test_case_e7_second_turn_includes_the_first_answer() -> None:
    prompt = Prompt("81", "writing", ("Write.", "Write again."))
    first = {"role": "user", "content": "Write."}
    second = [first, {"role": "assistant", "content": "Done."}, {"role": "user", "content": "Write again."}]
    assert prompt.messages() == [first]
    assert prompt.messages(["Done."]) == second
    assert prompt.messages(["Done.", "Again."]) == [*second, {"role": "assistant", "content": "Again."}]
    with pytest.raises(ValueError, match="`answers` must be at most the 2 turns of '81'; got 3"):
        prompt.messages(["a", "b", "c"])


def test_questions_without_names_are_called_by_line_and_file(tmp_path: Path) -> None:
    rows = ({"turns": ["a"]}, "", {"id": "x", "kind": "code", "turns": ["b"]}, {"category": "", "turns": ["c"]})
    questions = load_questions(write(tmp_path / "mine.jsonl", *rows))
    assert questions == [Prompt("1", "mine", ("a",)), Prompt("x", "code", ("b",)), Prompt("4", "mine", ("c",))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([1], r"q\.jsonl:2: a question must be a JSON object"),
        ({"question": "x"}, r"q\.jsonl:2: `turns` must be a list of at least one text; got None"),
        ({"turns": []}, r"q\.jsonl:2: `turns` must be"),
        ({"turns": "x"}, r"q\.jsonl:2: `turns` must be"),
        ({"turns": ["a", " "]}, r"q\.jsonl:2: `turns\[1\]` must be a text that is not blank"),
        ({"turns": ["a"], "question_id": 1.5}, r"q\.jsonl:2: the id must be a text or an integer; got 1\.5"),
        ({"turns": ["a"], "category": 3}, r"q\.jsonl:2: the kind must be a text; got 3"),
        ({"turns": ["a"], "id": "first"}, r"q\.jsonl:2: id 'first' was already used on line 1"),
        ("{", r"q\.jsonl:2: invalid JSON"),
    ],
)
def test_bad_questions_name_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    path = write(tmp_path / "q.jsonl", {"id": "first", "turns": ["a"]}, row)
    with pytest.raises(ValueError, match=message):
        load_questions(path)


def test_no_questions_and_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"q\.jsonl: no questions in this file"):
        load_questions(write(tmp_path / "q.jsonl", ""))
    with pytest.raises(FileNotFoundError, match=r"absent\.jsonl: no such file"):
        load_questions(tmp_path / "absent.jsonl")
