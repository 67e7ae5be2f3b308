"""Which tokens of a conversation a drafter learns from: those that the assistant wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Int32

from specjax.text.chat_template import ChatTemplate, Message, check_separators, encode_prompt, require_template
from specjax.text.tokenizer import Tokenizer

__all__ = [
    "EncodedConversation",
    "check_supervised_ratio",
    "encode_conversation",
    "encode_prompt",
    "supervised_ratio",
]

ASSISTANT = "assistant"


@dataclasses.dataclass(frozen=True)
class EncodedConversation:
    """A conversation as tokens.

    Attributes:
        token_ids: [T] ids of the whole conversation.
        loss_mask: [T] True for tokens of the assistant's text and for the token that ends each of its turns,
            False for headers, for other roles and for what follows the end of a turn.
    """

    token_ids: Int32[np.ndarray, " T"]
    loss_mask: Bool[np.ndarray, " T"]

    @property
    def num_supervised(self) -> int:
        """Number of True entries of the mask."""
        return int(self.loss_mask.sum())


def encode_conversation(
    tokenizer: Tokenizer, template: ChatTemplate | None, messages: Sequence[Message]
) -> EncodedConversation:
    """Encodes a conversation and marks the assistant's tokens.

    The text of an assistant's turn is what the rendering up to that turn adds to the rendering of the prompt
    before it; nothing is ever searched for in the text, so that no message can shift the mask. Templates
    with `{% generation %}` marks say it themselves.

    The conversation is tokenised as a whole, and a token counts if all of its characters belong to the
    turn: a token that joins the end of a header with the first space of an answer is a header's.

    Args:
        tokenizer: the model's.
        template: the model's.
        messages: mappings with "role" and "content" (text). Roles may come in any order that the template
            accepts.

    Raises:
        ValueError: if there is no template, it does not belong to the tokenizer, it refuses the
            conversation, or it writes earlier turns differently once later ones follow.
    """
    template = require_template(template)
    check_separators(tokenizer, template)
    text, spans = _marked_spans(template, messages) or _prefix_spans(template, messages)
    token_ids, offsets = tokenizer.encode_with_offsets(text)
    loss_mask = np.zeros(len(token_ids), dtype=np.bool_)
    eos_id = tokenizer.id_of(template.eos_token)
    starts = np.asarray([start for start, _ in offsets], dtype=np.int64)
    ends = np.asarray([end for _, end in offsets], dtype=np.int64)
    for start, end in spans:
        inside = np.flatnonzero((starts >= start) & (ends <= end)).tolist()
        special = [index for index in inside if token_ids[index] in tokenizer.special_ids]
        after = int(np.searchsorted(starts, end))
        if special:
            # The model stops at the end of its turn: it never writes the newline that follows.
            inside = [index for index in inside if index <= special[-1]]
        elif after < len(token_ids) and token_ids[after] == eos_id:
            # Some templates close their mark before the token that ends the turn.
            inside.append(after)
        loss_mask[inside] = True
    return EncodedConversation(np.asarray(token_ids, dtype=np.int32), loss_mask)


def supervised_ratio(conversations: Iterable[EncodedConversation]) -> float:
    """Fraction of all tokens that are supervised; 0 for no tokens."""
    num_supervised = num_tokens = 0
    for conversation in conversations:
        num_supervised += conversation.num_supervised
        num_tokens += conversation.loss_mask.size
    return num_supervised / num_tokens if num_tokens else 0.0


def check_supervised_ratio(conversations: Iterable[EncodedConversation], minimum: float = 0.01) -> float:
    """The supervised fraction of all tokens, if there is enough of it to learn from.

    Args:
        conversations: all data of a run.
        minimum: smallest fraction that is no sign of a wrong mask.

    Raises:
        ValueError: if the fraction is below `minimum`.
    """
    ratio = supervised_ratio(conversations)
    if ratio < minimum:
        raise ValueError(
            f"only {ratio:.2%} of the tokens are supervised, less than {minimum:.2%}: the conversations have hardly "
            "any assistant text, or the chat template is not the one of the data"
        )
    return ratio


def _marked_spans(template: ChatTemplate, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]] | None:
    """Text and spans by the template's own marks, or None where they do not cover every assistant's turn."""
    if not template.has_generation_marks:
        return None
    marked = template.render_with_spans(messages)
    num_turns = sum(message["role"] == ASSISTANT for message in messages)
    return marked if marked is not None and len(marked[1]) == num_turns else None


def _prefix_spans(template: ChatTemplate, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
    text = template.render(messages)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != ASSISTANT:
            continue
        prompt = template.render(messages[:index], add_generation_prompt=True)
        through = template.render(messages[: index + 1])
        if not (text.startswith(through) and through.startswith(prompt)):
            raise ValueError(
                f"message {index}: the chat template writes this turn differently once it is answered or followed by "
                "others, so the assistant's tokens cannot be told apart; use a template with {% generation %} marks"
            )
        spans.append((len(prompt), len(through)))
    return text, spans
