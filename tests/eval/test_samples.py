"""Runs of tokens of equal origin."""

from __future__ import annotations

import pytest

from eval.samples import pieces
from specjax.testing.tiny_tokenizer import tiny_tokenizer
from specjax.text.tokenizer import StreamDecoder


def test_runs_are_joined_and_the_text_is_whole() -> None:
    tokenizer = tiny_tokenizer()
    text = "hello the world"
    ids = tokenizer.encode(text)
    sources = ["accepted"] * (len(ids) - 2) + ["bonus", "accepted"]
    runs = pieces(ids, sources, StreamDecoder(tokenizer))
    assert [run["source"] for run in runs] == ["accepted", "bonus", "accepted"]
    assert sum(run["num_tokens"] for run in runs) == len(ids)
    assert "".join(run["text"] for run in runs) == text


def test_characters_of_several_tokens_are_never_torn() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("é😀")
    sources = ["accepted", "bonus"] * (len(ids) // 2) + ["target"] * (len(ids) % 2)
    runs = pieces(ids, sources, StreamDecoder(tokenizer))
    assert "".join(run["text"] for run in runs) == "é😀"
    assert all("\ufffd" not in run["text"] for run in runs)


def test_half_a_character_at_the_end_is_not_lost() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a😀")[:-1]
    runs = pieces(ids, ["target"] * len(ids), StreamDecoder(tokenizer))
    assert "".join(run["text"] for run in runs) == tokenizer.decode(ids)


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="one entry a token"):
        pieces([3, 4], ["bonus"], StreamDecoder(tiny_tokenizer()))
