"""The tokenizer inside a GGUF file: vocabulary, merges and token kinds."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from specjax.text.pre_tokenizers import ignores_merges, pre_tokenizer_for

# Values of `tokenizer.ggml.token_type`.
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5


@dataclasses.dataclass(frozen=True)
class GgufVocabulary:
    """What a GGUF says of its tokenizer.

    Attributes:
        tokens: text of each id; ordinary tokens in the byte alphabet of byte-level BPE. Rows at the end that
            only pad the embedding are cut off.
        merges: pairs in the order of their priority.
        control_tokens: tokens that `decode` leaves out.
        user_tokens: tokens matched whole in text, otherwise ordinary.
        pre_tokenizer: name of the rule that cuts words.
        bos_token: beginning-of-sequence token, if named.
        eos_token: end-of-sequence token, if named.
    """

    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...]
    control_tokens: tuple[str, ...]
    user_tokens: tuple[str, ...]
    pre_tokenizer: str
    bos_token: str | None
    eos_token: str | None

    @property
    def num_tokens(self) -> int:
        """Number of ids that stand for a token."""
        return len(self.tokens)


def field_value(fields: Mapping[str, Any], key: str) -> Any:
    """Plain value of a metadata field, or None where it is missing.

    Args:
        fields: metadata by key, as plain values or as the `fields` of a `gguf.GGUFReader`.
        key: the field's name.
    """
    value = fields.get(key)
    contents = getattr(value, "contents", None)
    return contents() if callable(contents) else value


def read_vocabulary(fields: Mapping[str, Any], *, pre_tokenizer: str | None = None) -> GgufVocabulary:
    """Reads and checks the tokenizer fields of a GGUF.

    Raises:
        ValueError: if a field is missing or contradicts another, or the tokenizer is of another kind.
    """
    kind = field_value(fields, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise ValueError(
            f"`tokenizer.ggml.model` must be 'gpt2' (byte-level BPE); got {kind!r}. "
            "Put the model's tokenizer.json beside the weights instead."
        )
    tokens = [str(token) for token in _required(fields, "tokenizer.ggml.tokens")]
    kinds = field_value(fields, "tokenizer.ggml.token_type")
    kinds = [1] * len(tokens) if kinds is None else [int(kind) for kind in kinds]
    if len(kinds) != len(tokens):
        raise ValueError(
            f"`tokenizer.ggml.token_type` must have one entry a token ({len(tokens)}); got {len(kinds)} entries"
        )
    while kinds and kinds[-1] == _UNUSED:
        del kinds[-1], tokens[-1]
    counts = collections.Counter(tokens)
    if len(counts) != len(tokens):
        twice = counts.most_common(1)[0][0]
        raise ValueError(f"`tokenizer.ggml.tokens` must not repeat a token; {twice!r} appears {counts[twice]} times")
    pre_tokenizer = pre_tokenizer or field_value(fields, "tokenizer.ggml.pre")
    if pre_tokenizer is None:
        raise ValueError("`tokenizer.ggml.pre` is missing; pass `pre_tokenizer` with the name of the model's rule")
    return GgufVocabulary(
        tokens=tuple(tokens),
        merges=tuple(_merge(text) for text in _required(fields, "tokenizer.ggml.merges")),
        control_tokens=tuple(t for t, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL),
        user_tokens=tuple(t for t, kind in zip(tokens, kinds, strict=True) if kind == _USER_DEFINED),
        pre_tokenizer=pre_tokenizer,
        bos_token=_token_field(fields, "tokenizer.ggml.bos_token_id", tokens),
        eos_token=_token_field(fields, "tokenizer.ggml.eos_token_id", tokens),
    )


def build_backend(vocabulary: GgufVocabulary) -> tokenizers.Tokenizer:
    """The `tokenizers` object of a GGUF's vocabulary.

    Raises:
        ValueError: if a merge names a token that is not in the vocabulary, or the pre-tokenizer is unknown.
    """
    pre_tokenizer = pre_tokenizer_for(vocabulary.pre_tokenizer)
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    try:
        model = models.BPE(
            vocab=ids, merges=list(vocabulary.merges), ignore_merges=ignores_merges(vocabulary.pre_tokenizer)
        )
    # The library raises bare Exception.
    except Exception as error:
        raise ValueError(f"`tokenizer.ggml.merges` must be pairs of tokens of the vocabulary ({error})") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in vocabulary.control_tokens])
    backend.add_tokens([AddedToken(token, normalized=False) for token in vocabulary.user_tokens])
    return backend


def _required(fields: Mapping[str, Any], key: str) -> list[Any]:
    value = field_value(fields, key)
    if value is None:
        raise ValueError(f"`{key}` is missing from the GGUF's metadata")
    return list(value)


def _merge(text: Any) -> tuple[str, str]:
    left, separator, right = str(text).partition(" ")
    if not (left and separator and right):
        raise ValueError(f"`tokenizer.ggml.merges` must hold pairs 'left right'; got {text!r}")
    return left, right


def _token_field(fields: Mapping[str, Any], key: str, tokens: list[str]) -> str | None:
    token_id = field_value(fields, key)
    if token_id is None:
        return None
    if not 0 <= int(token_id) < len(tokens):
        raise ValueError(f"`{key}` must be in [0, {len(tokens)}); got {token_id}")
    return tokens[int(token_id)]
