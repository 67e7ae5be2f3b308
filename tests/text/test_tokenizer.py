"""Tokenizers from files and from GGUF metadata."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, pre_tokenizers, processors

from specjax.testing.tiny_tokenizer import SPECIAL_TOKENS, pieces_tokenizer, tiny_tokenizer
from specjax.text.pre_tokenizers import pre_tokenizer_for
from specjax.text.tokenizer import Tokenizer

VARIED = (
    "",
    " ",
    "  two  spaces\t\ttabs\r\n\r\nlines\n\n\n",
    "def f(x):\n    return x[1:] + 'é' * 12\n",
    "漢字とかな, 한국어, русский",
    "👩‍👩‍👧 e\u0301 ﷽ 🏳️‍🌈",
    "1234567890 3.14 ½ \uff12",
    "<|im_start|>user\nhi<|im_end|>\n",
)


def gguf_fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a small byte-level vocabulary, as a GGUF holds it."""
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĊĊ", "ĠĠ", "Ġ1", "12"]
    kinds = [3] * len(SPECIAL_TOKENS) + [1] * (len(tokens) - len(SPECIAL_TOKENS))
    fields: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": ["Ċ Ċ", "Ġ Ġ", "Ġ 1", "1 2"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    fields.update(changes)
    return {key: value for key, value in fields.items() if value is not None}


@pytest.mark.parametrize("text", VARIED)
def test_decode_inverts_encode(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids)


def test_special_tokens_are_parsed_and_skipped() -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode("a<|im_end|>b")
    assert ids[1] == tokenizer.id_of("<|im_end|>") == 2
    assert tokenizer.decode(ids) == "ab"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.id_of("no such token") is None
    assert (tokenizer.token_of(2), tokenizer.token_of(10_000)) == ("<|im_end|>", None)


def test_ids_may_be_numpy_and_past_the_vocabulary_but_not_negative() -> None:
    tokenizer = tiny_tokenizer()
    ids = np.asarray(tokenizer.encode("hello"), dtype=np.int32)
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode([*ids.tolist(), tokenizer.vocab_size + 5]) == "hello"
    with pytest.raises(ValueError, match="non-negative; got -1"):
        tokenizer.decode([-1])


def test_offsets_cover_the_text() -> None:
    text = "hello 👩 x<|im_end|>\n"
    tokenizer = tiny_tokenizer()
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert ids == tokenizer.encode(text)
    emoji = text.index("👩")
    assert sum(offset == (emoji, emoji + 1) for offset in offsets) >= 3
    assert offsets[0][0] == 0
    assert offsets[-1][1] == len(text)
    assert text[slice(*offsets[ids.index(2)])] == "<|im_end|>"


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(ValueError, match="lone surrogates"):
        tiny_tokenizer().encode("\ud83d")


def test_file_round_trip_keeps_ids_and_digest(tmp_path) -> None:
    tokenizer = tiny_tokenizer()
    path = tmp_path / "tokenizer.json"
    tokenizer._backend.save(str(path), pretty=True)
    again = Tokenizer.from_file(path)
    assert again.digest == tokenizer.digest
    assert again.encode("hello world 12") == tokenizer.encode("hello world 12")
    assert again.vocab_size == tokenizer.vocab_size

    description = json.loads(path.read_text(encoding="utf-8"))
    # The spelling of merges in older files.
    description["model"]["merges"] = [" ".join(merge) for merge in description["model"]["merges"]]
    path.write_text(json.dumps(description), encoding="utf-8")
    assert Tokenizer.from_file(path).digest == tokenizer.digest


def test_file_that_cuts_pads_and_decorates_is_read_without_that(tmp_path) -> None:
    backend = tokenizers.Tokenizer.from_str(tiny_tokenizer()._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.post_processor = processors.ByteLevel(trim_offsets=True)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    tokenizer = Tokenizer.from_file(path)
    assert tokenizer.decode(tokenizer.encode("hello and the world")) == "hello and the world"
    assert tokenizer.digest == tiny_tokenizer().digest
    # Offsets include the space, which the post-processor would have trimmed.
    assert tokenizer.encode_with_offsets("x world")[1] == [(0, 1), (1, 7)]


@pytest.mark.parametrize("change", ["merges", "digits", "special"])
def test_digest_changes_with_what_decides_ids(change: str) -> None:
    tokenizer = tiny_tokenizer()
    backend = tokenizers.Tokenizer.from_str(tokenizer._backend.to_str())
    if change == "merges":
        other = tiny_tokenizer(merges=())
    elif change == "digits":
        backend.pre_tokenizer = pre_tokenizer_for("gpt-2")
        other = Tokenizer(backend)
    else:
        backend.add_special_tokens([AddedToken("hello", normalized=False)])
        other = Tokenizer(backend)
    assert other.digest != tokenizer.digest


def test_broken_and_missing_files_name_the_file(tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        Tokenizer.from_file(tmp_path / "absent.json")
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer\.json"):
        Tokenizer.from_file(path)


def test_gguf_vocabulary() -> None:
    tokenizer = Tokenizer.from_gguf(gguf_fields())
    assert tokenizer.vocab_size == 3 + 256 + 4
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.special_ids == {0, 1, 2}
    for text in VARIED:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_of(token_id) for token_id in tokenizer.encode(text)]


def test_gguf_digits_stand_alone_only_where_the_file_says_so() -> None:
    smollm = Tokenizer.from_gguf(gguf_fields())
    gpt2 = Tokenizer.from_gguf(gguf_fields(**{"tokenizer.ggml.pre": "gpt-2"}))
    # The vocabulary has "12" and " 1", which a rule that keeps digits apart must never use.
    assert pieces(smollm, "x 12") == ["x", "Ġ", "1", "2"]
    assert pieces(gpt2, "x 12") == ["x", "Ġ1", "2"]
    # A blank line before a numbered item is one token only when digits are cut off first.
    assert pieces(smollm, "x\n\n1.") == ["x", "ĊĊ", "1", "."]
    assert pieces(gpt2, "x\n\n1.") == ["x", "Ċ", "Ċ", "1", "."]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("smollm", "a  12 b", ["a", "  ", "1", "2", " b"]),
        ("gpt-2", "it's 12  b\n\n1", ["it", "'s", " 12", " ", " b", "\n", "\n", "1"]),
        ("llama-bpe", "It'S 12345\n\n  x()", ["It", "'S", " ", "123", "45", "\n\n", " ", " x", "()"]),
        ("qwen2", "x 123", ["x", " ", "1", "2", "3"]),
        ("gpt-4o", "getHTML's 1234", ["get", "HTML's", " ", "123", "4"]),
        ("deepseek-coder", "a b\n\n(12) 中文x", ["a", " b", "\n", "\n", "(", "1", "2", ")", " ", "中文", "x"]),
    ],
)
def test_pre_tokenizers_cut_words(name: str, text: str, words: list[str]) -> None:
    cut = [text[slice(*span)] for _, span in pre_tokenizer_for(name).pre_tokenize_str(text)]
    assert cut == words


def test_llama_takes_whole_words_before_merges() -> None:
    fields = gguf_fields(**{"tokenizer.ggml.pre": "llama-bpe"})
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "xyz"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1]
    assert pieces(Tokenizer.from_gguf(fields), "xyz") == ["xyz"]
    fields["tokenizer.ggml.pre"] = "gpt-2"
    assert pieces(Tokenizer.from_gguf(fields), "xyz") == ["x", "y", "z"]


def test_gguf_user_tokens_are_matched_whole_and_kept_in_text() -> None:
    fields = gguf_fields()
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "<think>", "<\uff5ccontrol▁token\uff5c>"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 4, 3]
    tokenizer = Tokenizer.from_gguf(fields)
    ids = tokenizer.encode("a<think>b<\uff5ccontrol▁token\uff5c>")
    assert ids[1] == tokenizer.id_of("<think>") == tokenizer.vocab_size - 2
    assert ids[3] == tokenizer.vocab_size - 1
    assert tokenizer.decode(ids) == "a<think>b"


def test_case_h8_padding_rows_are_no_tokens() -> None:
    fields = gguf_fields()
    real = len(fields["tokenizer.ggml.tokens"])
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 5, 5]
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.vocab_size == real
    assert tokenizer.decode([real, real + 1]) == ""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "llama"}, r"`tokenizer\.ggml\.model` must be 'gpt2'.*got 'llama'"),
        ({"tokenizer.ggml.tokens": None}, r"`tokenizer\.ggml\.tokens` is missing"),
        ({"tokenizer.ggml.merges": None}, r"`tokenizer\.ggml\.merges` is missing"),
        ({"tokenizer.ggml.merges": ["ab"]}, r"must hold pairs 'left right'; got 'ab'"),
        ({"tokenizer.ggml.merges": ["a zz"]}, r"`tokenizer\.ggml\.merges` must be pairs of tokens"),
        ({"tokenizer.ggml.token_type": [1]}, r"`tokenizer\.ggml\.token_type` must have one entry a token"),
        ({"tokenizer.ggml.pre": None}, r"`tokenizer\.ggml\.pre` is missing"),
        ({"tokenizer.ggml.pre": "unheard-of"}, r"`tokenizer\.ggml\.pre` must be one of .*'unheard-of'"),
        ({"tokenizer.ggml.eos_token_id": 9999}, r"`tokenizer\.ggml\.eos_token_id` must be in \[0, 263\); got 9999"),
    ],
)
def test_gguf_faults_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_gguf(gguf_fields(**changes))


def test_gguf_with_repeated_token() -> None:
    fields = gguf_fields()
    fields["tokenizer.ggml.tokens"] = ["x" if token == "y" else token for token in fields["tokenizer.ggml.tokens"]]
    with pytest.raises(ValueError, match="'x' appears 2 times"):
        Tokenizer.from_gguf(fields)


def test_gguf_without_a_rule_takes_the_one_given() -> None:
    fields = gguf_fields(**{"tokenizer.ggml.pre": None})
    assert Tokenizer.from_gguf(fields, pre_tokenizer="smollm").digest == Tokenizer.from_gguf(gguf_fields()).digest


def test_gguf_reader_fields_are_read_through_contents() -> None:
    class Field:
        def __init__(self, value: Any) -> None:
            self.value = value

        def contents(self) -> Any:
            return self.value

    fields = {key: Field(value) for key, value in gguf_fields().items()}
    assert Tokenizer.from_gguf(fields).digest == Tokenizer.from_gguf(gguf_fields()).digest


def test_pieces_tokenizer_cuts_longest_pieces() -> None:
    tokenizer = pieces_tokenizer(["a", "b", "xa", "bz", "x"])
    assert tokenizer.vocab_size == 8
    assert tokenizer.encode("xabzab?") == [5, 6, 3, 4]
    assert tokenizer.decode([5, 6, 2]) == "xabz"
    for bad in (["a", "a"], [""], ["a b"], ["<|im_end|>"]):
        with pytest.raises(ValueError, match="`pieces` must be"):
            pieces_tokenizer(bad)
    with pytest.raises(ValueError, match="`special_tokens`"):
        pieces_tokenizer(["a"], special_tokens=())


def test_tiny_tokenizer_refuses_merges_of_nothing() -> None:
    with pytest.raises(ValueError, match="`merges` must join"):
        tiny_tokenizer([("ab", "c")])
