"""Text that streams out of a decoder: whole characters only, and all of the text in the end."""

from __future__ import annotations

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from specjax.testing.tiny_tokenizer import tiny_tokenizer
from specjax.text.tokenizer import StreamDecoder, Tokenizer

TINY = tiny_tokenizer()
MARK = "\N{REPLACEMENT CHARACTER}"


def byte_fallback_tokenizer() -> Tokenizer:
    """A vocabulary in SentencePiece's manner: "▁" for the space, `<0x..>` for bytes without a token."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "▁a", "b", "▁b"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            {t: i for i, t in enumerate(tokens)}, [("▁", "a"), ("▁", "b")], unk_token="<unk>", byte_fallback=True
        )
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


FALLBACK = byte_fallback_tokenizer()


def stream(decoder: StreamDecoder, groups: list[list[int]]) -> list[str]:
    return [*(decoder.push(group) for group in groups), decoder.finish()]


def test_character_of_four_bytes_appears_at_once() -> None:
    ids = TINY.encode("a👩b")
    assert len(ids) == 6
    assert stream(StreamDecoder(TINY), [[token_id] for token_id in ids]) == ["a", "", "", "", "👩", "b", ""]


def test_bytes_that_never_become_a_character_appear_when_certain() -> None:
    lead = TINY.encode("👩")[:2]
    letter = TINY.encode("x")
    assert stream(StreamDecoder(TINY), [lead, letter]) == ["", MARK + "x", ""]
    assert stream(StreamDecoder(TINY), [lead, lead, lead]) == ["", MARK, MARK, MARK]


def test_replacement_character_of_the_model_itself() -> None:
    ids = TINY.encode(MARK)
    assert "".join(stream(StreamDecoder(TINY), [[token_id] for token_id in ids])) == MARK


def test_special_token_inside_a_character_is_skipped() -> None:
    first, *rest = TINY.encode("é")
    assert stream(StreamDecoder(TINY), [[first], [2], rest]) == ["", "", "é", ""]
    kept = stream(StreamDecoder(TINY, skip_special_tokens=False), [[first], [2], rest])
    assert kept == ["", MARK + "<|im_end|>", "", MARK]


def test_decoder_is_as_new_after_finish() -> None:
    decoder = StreamDecoder(FALLBACK)
    ids = FALLBACK.encode("▁a▁b")
    assert "".join(stream(decoder, [ids])) == "a b"
    assert "".join(stream(decoder, [ids])) == "a b"


def groups_of(ids: st.SearchStrategy[int]) -> st.SearchStrategy[list[list[int]]]:
    return st.lists(st.lists(ids, max_size=4), max_size=12)


@settings(deadline=None)
@given(groups=groups_of(st.integers(0, TINY.vocab_size + 1)), skip=st.booleans())
def test_pieces_of_any_ids_are_the_decoded_text(groups: list[list[int]], skip: bool) -> None:
    ids = [token_id for group in groups for token_id in group]
    text = TINY.decode(ids, skip_special_tokens=skip)
    assert "".join(stream(StreamDecoder(TINY, skip_special_tokens=skip), groups)) == text


@settings(deadline=None)
@given(text=st.text(max_size=12), sizes=st.lists(st.integers(1, 4), min_size=50, max_size=50))
def test_no_piece_of_real_text_holds_half_a_character(text: str, sizes: list[int]) -> None:
    ids = TINY.encode(text)
    groups = []
    for size in sizes:
        groups.append(ids[:size])
        ids = ids[size:]
    groups.append(ids)
    pieces = stream(StreamDecoder(TINY, skip_special_tokens=False), groups)
    assert "".join(pieces) == text
    # Every mark that appears is one of the text's own.
    assert sum(piece.count(MARK) for piece in pieces) == text.count(MARK)


# Bytes are drawn as often as all other tokens together, and mostly those of valid characters.
fallback_ids = st.one_of(
    st.integers(0, FALLBACK.vocab_size - 1),
    st.sampled_from([1 + byte for byte in "é👩".encode()]),
    st.integers(257, FALLBACK.vocab_size - 1),
)


@settings(deadline=None)
@given(groups=groups_of(fallback_ids))
def test_pieces_of_byte_fallback_ids_are_the_decoded_text(groups: list[list[int]]) -> None:
    ids = [token_id for group in groups for token_id in group]
    assert "".join(stream(StreamDecoder(FALLBACK), groups)) == FALLBACK.decode(ids)


@pytest.mark.parametrize("groups", [[], [[]], [[], [], []]])
def test_nothing_in_nothing_out(groups: list[list[int]]) -> None:
    assert "".join(stream(StreamDecoder(TINY), groups)) == ""
