"""Data at the door: every kind of bad record is left out, counted and named by file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specjax.text import conversations as conversations_module
from specjax.text.conversation_record import RecordProblem, conversation_of
from specjax.text.conversations import load_conversations
from specjax.text.json_records import read_json_records

GOOD = {"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}
PLAIN = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


def line(record: Any) -> bytes:
    return json.dumps(record).encode()


def messages(*roles: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": role[0]} for role in roles]}


# (line as it stands in the file, reason it is left out or None)
T15_LINES: list[tuple[bytes, str | None]] = [
    (b"\xef\xbb\xbf" + line(GOOD) + b"\n", None),  # 1: byte-order mark
    (b"\n", "blank"),  # 2
    (b"   \r\n", "blank"),  # 3
    (line(GOOD) + b"\r\n", None),  # 4: CRLF
    (b'{"messages": [{"role": "user"}]}\n', "missing key"),  # 5
    (b'{"messages": [{"role": "user", "content": null}]}\n', "`content` is null instead of text"),  # 6
    (b'{"messages": [{"role": "user", "content": [{"text": "x"}]}]}\n', "`content` is a list instead of text"),  # 7
    (b'{"messages": [{"role": "user", "content": 3}]}\n', "`content` is a number instead of text"),  # 8
    (b'{"messages": [], "messages": []}\n', "key appears twice in one object"),  # 9
    (b'{"messages": [{"role": "user", "content": "a", "content": "b"}]}\n', "key appears twice in one object"),  # 10
    (line({"messages": [{"role": "user", "content": "x" * 5_000_000}]}) + b"\n", None),  # 11: 5 MB
    (b'{"messages": [{"role": "user", "content": "\xff"}]}\n', "invalid UTF-8"),  # 12
    (b'{"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]}\n', None),  # 13
    (b'{"messages": [{"role": "user", "content": "u"}\n', "invalid JSON"),  # 14
    (b"[1, 2]\n", "record is not an object"),  # 15
    (b'{"text": "x"}\n', "missing key"),  # 16
    (b'{"messages": [{"role": "user", "content": "\\ud83d"}]}\n', "`content` holds half a surrogate pair"),  # 17
    (b"[" * 100_000 + b"\n", "invalid JSON"),  # 18: nested too deeply
    (b'{"messages": [{"role": "poet", "content": "u"}]}\n', "unknown role"),  # 19
    (line(GOOD), None),  # 20: no line end
]


@pytest.fixture
def t15_file(tmp_path: Path) -> Path:
    path = tmp_path / "mixed.jsonl"
    path.write_bytes(b"".join(raw for raw, _ in T15_LINES))
    return path


def test_case_t15_every_line_is_kept_or_reported(t15_file: Path) -> None:
    loaded = load_conversations(str(t15_file))
    expected = [
        (f"{t15_file}:{number}", reason)
        for number, (_, reason) in enumerate(T15_LINES, start=1)
        if reason not in (None, "blank")
    ]
    assert [(skipped.place, skipped.reason) for skipped in loaded.report.skipped] == expected
    assert len(loaded.conversations) == sum(reason is None for _, reason in T15_LINES) == 5
    assert loaded.conversations[0] == loaded.conversations[1] == loaded.conversations[3] == PLAIN
    assert len(loaded.conversations[2][0]["content"]) == 5_000_000
    # Blank lines are no records.
    assert loaded.report.num_records == len(T15_LINES) - 2
    assert loaded.report.num_kept == 5
    assert loaded.report.counts["key appears twice in one object"] == 2
    assert loaded.report.counts["missing key"] == 2
    summary = loaded.report.summary()
    assert "\n" not in summary
    assert summary.startswith(f"{t15_file}: 5 of 18 records kept; left out: 2 x ")


def test_case_t15_strict_stops_at_the_first_bad_line(t15_file: Path) -> None:
    with pytest.raises(ValueError, match=r"mixed\.jsonl:5: missing key \(message 0: `content`\)"):
        load_conversations(str(t15_file), strict=True)


def test_case_t15_strict_accepts_what_is_only_untidy(tmp_path: Path) -> None:
    path = tmp_path / "untidy.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + line(GOOD) + b"\r\n\r\n\n" + line(GOOD))
    assert load_conversations(path, strict=True).indices == [0, 1]


@pytest.mark.parametrize(("raw", "reason"), [(raw, reason) for raw, reason in T15_LINES if reason != "blank"])
def test_case_t15_strict_names_each_fault(tmp_path: Path, raw: bytes, reason: str | None) -> None:
    path = tmp_path / "one.jsonl"
    path.write_bytes(line(GOOD) + b"\n\n" + raw.removeprefix(b"\xef\xbb\xbf"))
    if reason is None:
        assert len(load_conversations(path, strict=True).conversations) == 2
    else:
        with pytest.raises(ValueError, match=rf"one\.jsonl:3: {reason}"):
            load_conversations(path, strict=True)


def test_case_t3_roles_out_of_order_are_skipped_and_indices_stay(tmp_path: Path) -> None:
    rows = [
        messages("user", "assistant"),
        {"messages": []},
        messages("assistant", "user"),
        messages("user", "user", "assistant"),
        messages("user", "assistant", "assistant"),
        messages("system", "user", "assistant", "user"),
    ]
    path = tmp_path / "six.jsonl"
    path.write_bytes(b"\n".join(line(row) for row in rows))
    loaded = load_conversations(path)
    assert loaded.indices == [0, 5]
    assert loaded.report.counts == {
        "roles do not alternate": 2,
        "conversation is empty": 1,
        "first turn is not the user's": 1,
    }
    # Repairing one row leaves the others' numbers as they were.
    rows[1] = messages("user", "assistant")
    path.write_bytes(b"\n".join(line(row) for row in rows))
    assert load_conversations(path).indices == [0, 1, 5]


@pytest.mark.parametrize(
    ("roles", "problem"),
    [
        (("user",), None),
        (("system", "user"), None),
        (("user", "assistant", "tool", "tool", "assistant", "user"), None),
        (("user", "tool", "assistant"), None),
        (("system",), "system message only"),
        (("system", "system", "user"), "system message after the start"),
        (("user", "assistant", "system", "user"), "system message after the start"),
        (("system", "assistant"), "first turn is not the user's"),
        (("tool", "user"), "first turn is not the user's"),
        (("user", "assistant", "assistant"), "roles do not alternate"),
    ],
)
def test_case_t3_orders_of_roles(roles: tuple[str, ...], problem: str | None) -> None:
    if problem is None:
        assert [message["role"] for message in conversation_of(messages(*roles))] == list(roles)
    else:
        with pytest.raises(RecordProblem, match=problem):
            conversation_of(messages(*roles))


def test_both_key_styles_under_either_name() -> None:
    share = [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]
    expected = [{"role": "system", "content": "s"}, *PLAIN]
    assert conversation_of({"conversations": share}) == expected
    assert conversation_of({"messages": share}) == expected
    assert conversation_of({"conversations": PLAIN, "id": 3}) == PLAIN
    # Fields that no template needs are left behind.
    assert conversation_of({"messages": [{"role": "User", "content": "u", "weight": 1}]}) == PLAIN[:1]


def test_tables_that_store_messages_by_column_or_with_all_keys() -> None:
    by_column = {"messages": {"role": ["user", "assistant"], "content": ["u", "a"]}, "turns": None}
    assert conversation_of(by_column) == PLAIN
    all_keys = [{"role": None, "content": None, "from": "human", "value": "u"}]
    assert conversation_of({"messages": None, "conversations": all_keys}) == PLAIN[:1]
    with pytest.raises(RecordProblem, match=r"conversation is not a list \(`messages` is an object\)"):
        conversation_of({"messages": {"role": ["user"], "content": []}})


def test_turns_are_the_users() -> None:
    assert conversation_of({"turns": ["a", "b"]}) == [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
    ]
    with pytest.raises(RecordProblem, match=r"turn is null instead of text \(turn 1\)"):
        conversation_of({"turns": ["a", None]})


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        (3, r"record is not an object \(got a number\)"),
        ({}, "missing key"),
        ({"messages": "hello"}, "`messages` is a text"),
        ({"messages": ["hello"]}, "message is not an object"),
        ({"messages": [{"content": "x"}]}, r"missing key \(message 0: `role`\)"),
        ({"messages": [{"from": "human"}]}, r"missing key \(message 0: `value`\)"),
        ({"messages": [{"role": True, "content": "x"}]}, "`role` is a boolean instead of text"),
    ],
)
def test_records_that_are_no_conversations(record: Any, problem: str) -> None:
    with pytest.raises(RecordProblem, match=problem):
        conversation_of(record)


def test_empty_data_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_bytes(b"\n\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no records"):
        load_conversations(path)
    path.write_bytes(b'{"messages": []}\n' * 2)
    with pytest.raises(ValueError, match=r"empty\.jsonl: 0 of 2 records kept; left out: 2 x conversation is empty"):
        load_conversations(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for source in (tmp_path / "absent.jsonl", tmp_path / "absent", "absent.json"):
        with pytest.raises(FileNotFoundError, match="absent"):
            load_conversations(source)
    with pytest.raises(FileNotFoundError, match="no name of a hub data set"):
        load_conversations("not a name")


def test_json_array_knows_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    path.write_text(
        '\n[\n{"messages":\n [{"role": "user", "content": "u"}]},\n\n {"messages": []}\n]\n', encoding="utf-8"
    )
    loaded = load_conversations(path)
    assert loaded.conversations == [PLAIN[:1]]
    assert [str(skipped) for skipped in loaded.report.skipped] == [f"{path}:6: conversation is empty (`messages`)"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'[\n{"messages": []},\n{"messages": [}\n]', r"a\.json:3: invalid JSON: .* in an array of records"),
        (b'[{"messages": []}\n{"messages": []}]', r"a\.json:2: ',' or '\]' must follow a record of an array; got '{'"),
        (b'[{"messages": []}', r"a\.json:1: ',' or '\]' must follow a record of an array; got ''"),
        (b'[{"messages": []}]\n\nmore', r"a\.json:3: nothing may follow the array of records; got 'more'"),
        (b'[\n"\xff"]', r"a\.json:2: invalid UTF-8 inside an array"),
        (b"[1,]", r"a\.json:1: invalid JSON"),
        (b"[]", r"a\.json: no records"),
        (b" [ ] ", r"a\.json: no records"),
        (b"", r"a\.json: no records"),
    ],
)
def test_broken_arrays_are_errors_even_where_records_may_be_skipped(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(ValueError, match=message):
        load_conversations(path)


def test_json_file_with_one_object_or_lines_of_objects(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    path.write_text(json.dumps(GOOD, indent=1), encoding="utf-8")
    assert load_conversations(path).conversations == [PLAIN]
    path.write_text("\n" + json.dumps(GOOD) + "\n{broken}\n" + json.dumps(GOOD), encoding="utf-8")
    loaded = load_conversations(path)
    assert loaded.indices == [0, 2]
    assert loaded.report.skipped[0].place == f"{path}:3"


def test_lines_past_the_limit_are_skipped_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"a": 1}\n' + b"x" * 100 + b'\n{"b": 2}')
    records = list(read_json_records(path, max_line_bytes=20))
    assert [(record.line, record.value) for record in records] == [(1, {"a": 1}), (2, None), (3, {"b": 2})]
    assert records[1].problem == "line too long: more than 20 bytes"


def test_arrow_folder_and_its_splits(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_list([GOOD, {"messages": []}, GOOD])
    table.save_to_disk(str(tmp_path / "table"))
    loaded = load_conversations(tmp_path / "table")
    assert loaded.conversations == [PLAIN, PLAIN]
    assert loaded.indices == [0, 2]
    assert loaded.report.skipped[0].place == f"{tmp_path / 'table'}:row 1"

    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "splits"))
    assert load_conversations(tmp_path / "splits", split="test").indices == [0, 2]
    with pytest.raises(ValueError, match=r"`split` must be one of \['test', 'train'\] in .*; got 'dev'"):
        load_conversations(tmp_path / "splits", split="dev")
    with pytest.raises(ValueError, match="not a data set saved by `datasets`"):
        load_conversations(tmp_path)


def test_hub_names_go_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def from_hub(name: str, split: str) -> Any:
        calls.append((name, split))
        return [GOOD, {"messages": None}]

    monkeypatch.setattr(conversations_module, "_from_hub", from_hub)
    loaded = load_conversations("someone/some-chats_1.0", split="train_sft")
    assert calls == [("someone/some-chats_1.0", "train_sft")]
    assert loaded.conversations == [PLAIN]
    assert loaded.report.skipped[0].place == "someone/some-chats_1.0[train_sft]:row 1"


def test_hub_failures_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")

    def load_dataset(name: str, split: str) -> Any:
        raise ConnectionError("cannot reach the hub\nmore\nlines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"data set 'a/b', split 'train' cannot be loaded \(cannot reach the hub\)$"):
        load_conversations("a/b")
