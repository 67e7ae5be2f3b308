"""Rows and their order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from train.artifacts import RunError
from train.data import Example, SampleOrder, load_text_examples, make_rows


def make_example(name: str, length: int, supervised: int | None = None) -> Example:
    mask = np.zeros(length, bool)
    mask[length - (length // 2 if supervised is None else supervised) :] = True
    return Example(name, np.arange(1, length + 1, dtype=np.int32), mask if supervised != 0 else np.zeros(length, bool))


@pytest.mark.parametrize("packing", [True, False])
def test_every_sequence_is_in_one_row_whole_and_alone_in_its_segment(packing: bool) -> None:
    rng = np.random.default_rng(3)
    examples = [make_example(f"e{i}", int(n)) for i, n in enumerate(rng.integers(2, 33, 50))]
    rows = make_rows(examples, 32, packing=packing)
    found = {}
    for row, names in enumerate(rows.example_ids):
        for segment, name in enumerate(names, start=1):
            place = rows.segment_ids[row] == segment
            found[name] = (rows.tokens[row][place].tolist(), rows.loss_mask[row][place].tolist())
        padding = rows.segment_ids[row] == 0
        assert not rows.loss_mask[row][padding].any()
        assert np.all(np.diff(np.flatnonzero(padding)) == 1)
    assert found == {e.id: (e.tokens.tolist(), e.loss_mask.tolist()) for e in examples}
    assert rows.num_tokens == sum(len(e.tokens) for e in examples)
    if packing:
        # Best fit in decreasing order needs at most 11/9 of the best number of rows, plus one.
        assert rows.num_rows <= 11 / 9 * np.ceil(rows.num_tokens / 32) + 1
    else:
        assert rows.num_rows == len(examples)


def test_long_sequences_are_cut_and_those_without_supervision_dropped() -> None:
    rows = make_rows([make_example("long", 20), make_example("none", 5, 0), make_example("ok", 6)], 12, packing=True)
    assert (rows.num_cut, rows.num_dropped) == (1, 1)
    assert sorted(name for names in rows.example_ids for name in names) == ["long", "ok"]
    assert "1 cut" in rows.summary()
    assert "1 dropped" in rows.summary()


def test_nothing_to_learn_is_an_error() -> None:
    with pytest.raises(RunError, match="no training example has a supervised token within 8 tokens; got 1"):
        make_rows([make_example("late", 20, 2)], 8, packing=True)


def test_case_t8_too_little_supervision_is_an_error() -> None:
    with pytest.raises(RunError, match=r"at least 1% .* got 0\.50%"):
        make_rows([make_example("headers", 200, 1)], 256, packing=True)


def test_order_visits_every_row_once_an_epoch_and_crosses_the_border() -> None:
    order = SampleOrder(num_rows=11, batch_size=2, seed=5)
    stream = np.concatenate([order.rows(step) for step in range(22)])
    assert len(stream) == 44
    epochs = stream.reshape(4, 11)
    for epoch in epochs:
        assert sorted(epoch.tolist()) == list(range(11))
    assert len({tuple(epoch.tolist()) for epoch in epochs}) == 4


def test_case_t12_order_does_not_depend_on_where_reading_starts() -> None:
    order = SampleOrder(11, 2, 5)
    straight = [order.rows(step).tolist() for step in range(20)]
    resumed = SampleOrder(11, 2, 5)
    assert [resumed.rows(step).tolist() for step in range(7, 20)] == straight[7:]
    assert [SampleOrder(11, 2, 6).rows(step).tolist() for step in range(20)] != straight


def test_a_batch_may_be_larger_than_the_data() -> None:
    assert sorted(SampleOrder(3, 7, 0).rows(0).tolist())[:2] == [0, 0]


def letters(text: str) -> list[int]:
    """A tokenizer of one token a character."""
    return [ord(character) for character in text]


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.txt", "abc\n\n\n\nabcdefg", ["abc", "abcd", "efg"]),
        ("a.jsonl", '{"text": "abc"}\n\n{"text": "abcdefg"}\n', ["abc", "abcd", "efg"]),
    ],
)
def test_plain_text_is_cut_into_supervised_rows(tmp_path: Path, name: str, content: str, expected: list[str]) -> None:
    (tmp_path / name).write_text(content)
    examples = load_text_examples(str(tmp_path / name), letters, 4, max_rows=0)
    assert ["".join(map(chr, e.tokens)) for e in examples] == expected
    assert all(e.loss_mask.all() for e in examples)
    assert len(load_text_examples(str(tmp_path / name), letters, 4, max_rows=2)) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\n{"text": 3}\n', "line 2"),
        (b'{"txt": "a"}\n', "line 1"),
        (b"[1]\n", "line 1"),
        (b"nope\n", "line 1"),
        (b"", "is empty"),
        (b"\xff\n", "UTF-8"),
    ],
)
def test_bad_text_files_are_named_with_their_line(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(RunError, match=words) as raised:
        load_text_examples(str(path), letters, 4, max_rows=0)
    assert "a.jsonl" in str(raised.value)


def test_a_missing_text_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"absent\.txt: No such file"):
        load_text_examples(str(tmp_path / "absent.txt"), letters, 4, max_rows=0)
    with pytest.raises(RunError, match="`--frequency_text` must be a readable file"):
        load_text_examples(str(tmp_path / "absent.txt"), letters, 4, max_rows=0, flag="frequency_text")
