"""Question files: every faulty line is named."""

from __future__ import annotations

import json
import pathlib

import pytest

from eval.questions import Question, load_questions, spread


def write(folder: pathlib.Path, *rows: object) -> pathlib.Path:
    path = folder / "asked.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
    return path


def test_case_e7_both_turns_of_a_conversation_are_read(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]})
    assert load_questions(path) == [Question(81, "writing", ("Write.", "Rewrite."))]


def test_missing_names_are_filled_in(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, {"turns": ["a"], "category": ""}, "", {"id": "x", "kind": "code", "turns": ["b"]})
    assert load_questions(path) == [Question(1, "asked", ("a",)), Question("x", "code", ("b",))]


def test_byte_order_mark_and_crlf_are_harmless(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"turns": ["a"]}\r\n{"turns": ["b"]}')
    assert [question.turns for question in load_questions(path)] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", ":2: not JSON"),
        ([1], ":2: must be a JSON object"),
        ({"question": "?"}, ":2: `turns` must be"),
        ({"turns": []}, ":2: `turns` must be"),
        ({"turns": ["ok", 3]}, ":2: `turns` must be"),
        ({"turns": [" "]}, ":2: `turns` must be"),
        ({"question_id": [1], "turns": ["a"]}, ":2: `question_id` must be"),
        ({"question_id": 1, "turns": ["a"]}, ":2: `question_id` 1 was used in line 1"),
        ({"category": 3, "turns": ["a"]}, ":2: `category` must be"),
    ],
)
def test_faulty_lines_are_named(tmp_path: pathlib.Path, row: object, message: str) -> None:
    path = write(tmp_path, {"question_id": 1, "turns": ["fine"]}, row)
    with pytest.raises(ValueError, match=message):
        load_questions(path)


def test_invalid_utf8_is_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b'{"turns": ["a"]}\n\xff\n')
    with pytest.raises(ValueError, match=":2: not UTF-8"):
        load_questions(path)


def test_missing_and_empty_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="no questions file"):
        load_questions(tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="no questions in"):
        load_questions(write(tmp_path, ""))


def test_a_limit_takes_every_kind_in_turn() -> None:
    questions = [Question(i, kind, ("q",)) for i, kind in enumerate(["chat"] * 5 + ["code"] * 5 + ["maths"])]
    assert [q.category for q in spread(questions, 4)] == ["chat", "code", "maths", "chat"]
    assert spread(questions, None) == questions
    assert len(spread(questions, 100)) == 11
    with pytest.raises(ValueError, match="at least 1"):
        spread(questions, 0)
