"""Text to token ids and back, and text that streams out of a decoder."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers

from specjax.text import gguf_vocabulary

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """Token ids of one model, over a `tokenizers.Tokenizer`.

    Nothing is added to a text (no beginning-of-sequence token, no padding, no truncation): chat templates
    write the special tokens that a model expects, and their strings are parsed into their ids.

    Attributes:
        bos_token: text of the beginning-of-sequence token where the source names one, else None.
        eos_token: the same for the end-of-sequence token.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        vocab_size: int | None = None,
    ) -> None:
        """Wraps `backend`; `vocab_size` overrides one past its highest id."""
        self._backend = _without_side_effects(backend)
        self._ids = self._backend.get_vocab(with_added_tokens=True)
        if not self._ids:
            raise ValueError("`backend` must have at least one token; its vocabulary is empty")
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._vocab_size = max(self._ids.values()) + 1 if vocab_size is None else vocab_size

    @classmethod
    def from_file(
        cls, path: str | os.PathLike[str], *, bos_token: str | None = None, eos_token: str | None = None
    ) -> Tokenizer:
        """Reads a `tokenizer.json`.

        Raises:
            FileNotFoundError: if there is no such file.
            ValueError: if it isn't a tokenizer description.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such tokenizer file")
        try:
            backend = tokenizers.Tokenizer.from_str(path.read_text(encoding="utf-8"))
        # The library raises bare Exception for every kind of broken description.
        except Exception as error:
            raise ValueError(f"{path}: not a tokenizer.json ({error})") from error
        return cls(backend, bos_token=bos_token, eos_token=eos_token)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], *, pre_tokenizer: str | None = None) -> Tokenizer:
        """Builds the byte-level BPE tokenizer that a GGUF's metadata describes.

        Args:
            fields: metadata by key ("tokenizer.ggml.tokens", ...): plain values, or the `fields` of a
                `gguf.GGUFReader`.
            pre_tokenizer: name of the rule that cuts words, where the file names none or a wrong one.

        Raises:
            ValueError: if a field is missing or contradicts another, or names a kind that is not supported.
        """
        vocabulary = gguf_vocabulary.read_vocabulary(fields, pre_tokenizer=pre_tokenizer)
        return cls(
            gguf_vocabulary.build_backend(vocabulary),
            bos_token=vocabulary.bos_token,
            eos_token=vocabulary.eos_token,
            vocab_size=vocabulary.num_tokens,
        )

    @property
    def vocab_size(self) -> int:
        """One past the highest id; rows that pad a model's embedding do not count."""
        return self._vocab_size

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: those that `decode` leaves out and no plain text can spell by merging."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids that stand for one raw byte each (`<0x0A>`), in vocabularies that fall back to such tokens."""
        return frozenset(token_id for token, token_id in self._ids.items() if _BYTE_TOKEN.fullmatch(token))

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of everything that decides ids and text, independent of formatting."""
        canonical = json.dumps(_description(self._backend), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()

    def id_of(self, token: str) -> int | None:
        """The id of a token by its vocabulary spelling, or None if there is no such token."""
        return self._ids.get(token)

    def token_of(self, token_id: SupportsIndex) -> str | None:
        """The vocabulary spelling of an id, or None if there is no such id."""
        return self._backend.id_to_token(operator.index(token_id))

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; strings of special tokens in it become their ids.

        Raises:
            ValueError: if the text holds lone surrogates, which have no UTF-8 form.
        """
        return self._encoding(text).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of `text`, and for each the characters [start, end) of `text` that it covers.

        The tokens of one character that was cut into bytes all cover that character.
        """
        encoding = self._encoding(text)
        return encoding.ids, encoding.offsets

    def decode(self, ids: Iterable[SupportsIndex], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, and ids past the vocabulary nothing.

        Raises:
            ValueError: if an id is negative.
        """
        plain = [operator.index(token_id) for token_id in ids]
        if plain and min(plain) < 0:
            raise ValueError(f"token ids must be non-negative; got {min(plain)}")
        return self._backend.decode(plain, skip_special_tokens=skip_special_tokens)

    def _encoding(self, text: str) -> tokenizers.Encoding:
        try:
            return self._backend.encode(text, add_special_tokens=False)
        except (TypeError, UnicodeEncodeError) as error:
            raise ValueError(f"text must be valid Unicode without lone surrogates ({error})") from error


@dataclasses.dataclass
class StreamDecoder:
    """Turns ids that arrive bit by bit into text that never shows half a character.

    Text whose last character may still change is held back. All pieces together, with that of `finish`, are
    exactly `tokenizer.decode` of all ids.
    """

    tokenizer: Tokenizer
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        # Ids since the last two places where text was emitted up to a whole character. The first group is
        # context: decoders treat the start of a sequence in their own way.
        self._context: list[int] = []
        self._pending: list[int] = []
        # Characters of the pending ids that were already emitted.
        self._num_emitted = 0

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """Takes more ids; returns the text that they make certain (possibly empty)."""
        for token_id in map(operator.index, ids):
            # A skipped token leaves no text, not even a boundary between the bytes around it.
            if not (self.skip_special_tokens and token_id in self.tokenizer.special_ids):
                self._pending.append(token_id)
        if not self._pending:
            return ""
        text = self._pending_text()
        # A run of byte tokens is one unit: a byte that makes it invalid changes the text of the bytes before.
        if self._pending[-1] in self.tokenizer.byte_ids:
            return ""
        whole = not text.endswith(_REPLACEMENT)
        # Bytes before an unfinished character cannot change any more: only the last mark is held back.
        certain = text if whole else text[:-1]
        fresh = certain[self._num_emitted :]
        if whole:
            self._context, self._pending, self._num_emitted = self._pending, [], 0
        else:
            self._num_emitted += len(fresh)
        return fresh

    def finish(self) -> str:
        """The text held back so far; afterwards the decoder is as new."""
        rest = self._pending_text()[self._num_emitted :] if self._pending else ""
        self._context, self._pending, self._num_emitted = [], [], 0
        return rest

    def _pending_text(self) -> str:
        before = self.tokenizer.decode(self._context, skip_special_tokens=False)
        return self.tokenizer.decode(self._context + self._pending, skip_special_tokens=False)[len(before) :]


def _description(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    """The parts of a tokenizer that decide ids and text, in one spelling whatever wrote them."""
    description = json.loads(backend.to_str())
    for unused in ("version", "truncation", "padding", "post_processor"):
        description.pop(unused, None)
    merges = description.get("model", {}).get("merges")
    if merges is not None:
        # Older files write a pair as one string.
        description["model"]["merges"] = [m.split(" ") if isinstance(m, str) else list(m) for m in merges]
    return description


def _without_side_effects(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy that neither cuts, pads nor decorates: a `tokenizer.json` may ask for all three."""
    if backend.truncation is None and backend.padding is None and backend.post_processor is None:
        return backend
    description = json.loads(backend.to_str())
    description.update(truncation=None, padding=None, post_processor=None)
    return tokenizers.Tokenizer.from_str(json.dumps(description))
