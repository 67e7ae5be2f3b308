"""A target that chats: random weights, a byte tokenizer, a template."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from specjax.testing.tiny_models import tiny_target
from specjax.testing.tiny_tokenizer import CHATML_TEMPLATE, END_OF_TEXT, TURN_END, tiny_tokenizer
from specjax.text.chat_template import ChatTemplate


@pytest.fixture(scope="session")
def chat_target() -> Any:
    """Tiny target with tokenizer and template; its end-of-turn token ends a text."""
    tokenizer = tiny_tokenizer()
    target = tiny_target(
        jax.random.key(11),
        tokenizer=tokenizer,
        vocab_size=tokenizer.vocab_size,
        num_layers=1,
        max_position_embeddings=512,
        eos_token_ids=(tokenizer.id_of(TURN_END),),
    )
    return dataclasses.replace(target, chat_template=ChatTemplate(CHATML_TEMPLATE, "", END_OF_TEXT))
