"""Tokenizers of a few hundred tokens, built in code, and a chat template to go with them."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from specjax.text.tokenizer import Tokenizer

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

# A turn is: start mark, role, newline, text, end mark, newline.
CHATML_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\\n' ~ message['content'] ~ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# The same text, with the assistant's part marked.
CHATML_TEMPLATE_WITH_MARKS = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' ~ message['role'] ~ '\\n' }}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{ message['content'] ~ '<|im_end|>' }}{%- endgeneration -%}"
    "{%- else -%}{{ message['content'] ~ '<|im_end|>' }}{%- endif -%}"
    "{{ '\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

# Enough English to give tokens of several lengths, in the byte alphabet ("Ġ" is the space, "Ċ" the newline).
DEFAULT_MERGES = (
    *(("Ġ", "Ġ"), ("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("i", "n"), ("in", "g"), ("l", "l"), ("o", "n")),
    *(("a", "n"), ("an", "d"), ("Ġ", "and"), ("u", "s"), ("e", "r"), ("us", "er"), ("a", "s")),
    *(("Ċ", "Ċ"), ("Ċ", "Ġ"), ("he", "ll"), ("hell", "o"), ("o", "r"), ("or", "l"), ("orl", "d"), ("w", "orld")),
    *(("Ġ", "world"),),
)


def tiny_tokenizer(merges: Sequence[tuple[str, str]] = DEFAULT_MERGES) -> Tokenizer:
    """A byte-level BPE tokenizer: any text in, the same text out.

    Ids 0, 1 and 2 are `END_OF_TEXT`, `TURN_START` and `TURN_END`, then come the 256 bytes, then one token a
    merge. Digits stand alone, and words are cut as in GPT-2.

    Args:
        merges: pairs in the byte alphabet, by priority; an empty sequence gives one token a byte.

    Raises:
        ValueError: if a merge names a token that does not exist yet, or makes one that does.
    """
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    for left, right in merges:
        if left not in tokens or right not in tokens or left + right in tokens:
            raise ValueError(f"`merges` must join two tokens that exist into a new one; got {(left, right)!r}")
        tokens.append(left + right)
    backend = tokenizers.Tokenizer(models.BPE(_ids(tokens), list(merges)))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return _finished(backend, SPECIAL_TOKENS)


def pieces_tokenizer(pieces: Sequence[str], special_tokens: Sequence[str] = SPECIAL_TOKENS) -> Tokenizer:
    """A tokenizer with just these pieces, for models with a vocabulary of 7 to 32 tokens.

    Ids count from 0: the special tokens, then the pieces in order. Text is cut into the longest pieces that
    fit, from left to right; characters that start no piece are dropped.

    Args:
        pieces: distinct texts of printable ASCII without spaces ("a", "xa", "bz").
        special_tokens: control tokens before them; the last is the end-of-sequence token.

    Raises:
        ValueError: if there is no special token, or a piece is empty, repeated or holds other characters.
    """
    if not special_tokens:
        raise ValueError("`special_tokens` must name at least one token; got none")
    tokens = [*special_tokens, *pieces]
    if len(set(tokens)) != len(tokens):
        raise ValueError(f"`pieces` must be distinct and no special tokens; got {list(pieces)!r}")
    for piece in pieces:
        if not piece or not all("!" <= character <= "~" for character in piece):
            raise ValueError(f"`pieces` must be printable ASCII without spaces; got {piece!r}")
    backend = tokenizers.Tokenizer(models.BPE(_ids(tokens), []))
    # Added tokens are matched whole, the longest first, but these remain ordinary text.
    return _finished(backend, special_tokens, pieces)


def _ids(tokens: Sequence[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _finished(
    backend: tokenizers.Tokenizer, special_tokens: Sequence[str], whole_pieces: Sequence[str] = ()
) -> Tokenizer:
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in special_tokens])
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in whole_pieces])
    return Tokenizer(backend, bos_token=special_tokens[0], eos_token=special_tokens[-1])
