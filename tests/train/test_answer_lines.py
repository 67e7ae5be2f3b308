"""answers.jsonl after damage: a torn last line goes, any other bad line is named and nothing is lost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from train.answers import AnswerFile
from train.artifacts import RunError

KEY = {"target_digest": "abc"}


def line(name: str, **changes: Any) -> bytes:
    whole = {"id": name, "turn": 0, "user": "u", "answer": "a", "finish_reason": "stop", "split": "train"}
    return json.dumps({**whole, "prompt_ids": [1], "token_ids": [2, 3], **changes}).encode() + b"\n"


def without(name: str, field: str) -> bytes:
    whole = json.loads(line(name))
    del whole[field]
    return json.dumps(whole).encode() + b"\n"


def write(folder: Path, *lines: bytes, **totals: Any) -> Path:
    path = folder / "answers.jsonl"
    path.write_bytes(b"".join(lines))
    (folder / "manifest.json").write_text(json.dumps({"key": KEY, "complete": False, **totals}))
    return path


@pytest.mark.parametrize("torn", [b'{"id": "c", "tur', b"\xff\xfe", b'{"id": "c"\n', line("c").removesuffix(b"\n")])
def test_a_torn_last_line_is_removed(tmp_path: Path, torn: bytes) -> None:
    path = write(tmp_path, line("a"), line("b"), torn)
    assert len(AnswerFile(path, KEY)) == 2
    assert path.read_bytes() == line("a") + line("b")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (b'{"id": "c", "tur\n', "not JSON"),
        (b"\xff\n", "not JSON"),
        (b"[1]\n", "must be an object; got list"),
        (without("b", "id"), "`id` must be a string; got nothing"),
        (line("b", id=3), "`id` must be a string; got 3"),
        (line("b", turn="0"), "`turn` must be a whole number; got '0'"),
        (line("b", turn=True), "`turn` must be a whole number; got True"),
        (line("b", turn=-1), "`turn` must be at least 0; got -1"),
        (line("b", answer=None), "`answer` must be a string; got None"),
        (line("b", user=["u"]), "`user` must be a string"),
        (without("b", "finish_reason"), "`finish_reason` must be a string; got nothing"),
        (line("b", token_ids="23"), "`token_ids` must be a list; got '23'"),
        (line("b", token_ids=[1, 2.5]), "`token_ids` must be a list of token ids"),
        (line("b", prompt_ids=[True]), "`prompt_ids` must be a list of token ids"),
        (line("b", prompt_ids=[2**31]), "`prompt_ids` must be a list of token ids"),
    ],
)
def test_a_bad_line_in_the_middle_is_named_and_costs_nothing(tmp_path: Path, bad: bytes, problem: str) -> None:
    path = write(tmp_path, line("a"), bad, line("c"))
    before = path.read_bytes()
    with pytest.raises(RunError) as raised:
        AnswerFile(path, KEY)
    message = str(raised.value)
    assert message.startswith(f"{path}, line 2: {problem}")
    assert message.endswith("; remove the line and the same command generates its answer again")
    assert path.read_bytes() == before


def test_a_whole_last_line_that_is_no_turn_is_named_too(tmp_path: Path) -> None:
    path = write(tmp_path, line("a"), line("b", turn="0"))
    before = path.read_bytes()
    with pytest.raises(RunError, match=r"answers\.jsonl, line 2: `turn`"):
        AnswerFile(path, KEY)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1]", "must hold a JSON object; got list"),
        ("{}", "`key` must be an object; got nothing: the file is damaged"),
        ('{"key": 1}', "`key` must be an object; got 1: the file is damaged"),
    ],
)
def test_a_manifest_of_another_form_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    path = write(tmp_path, line("a"))
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises((RunError, ValueError)) as raised:
        AnswerFile(path, KEY)
    assert str(raised.value).startswith(f"{tmp_path / 'manifest.json'}: {words}")
    assert path.read_bytes() == line("a")


def test_a_complete_manifest_without_its_totals_is_counted_again(tmp_path: Path) -> None:
    totals = {"complete": True, "num_turns": 1, "num_answer_tokens": 2, "finish_reasons": {"stop": 1}}
    assert AnswerFile(write(tmp_path, line("a"), **totals), KEY).complete
    for name in totals:
        kept = {other: value for other, value in totals.items() if other != name}
        assert not AnswerFile(write(tmp_path, line("a"), **kept), KEY).complete
    assert not AnswerFile(write(tmp_path, line("a"), **{**totals, "num_turns": True}), KEY).complete
