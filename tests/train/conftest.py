"""A tiny target with a tokenizer and a chat template, for everything that training does with a target."""

from __future__ import annotations

import jax
import pytest
from tiny_folder import save_target

from specjax.checkpoints.target import Target
from specjax.testing.tiny_models import tiny_target
from specjax.testing.tiny_tokenizer import CHATML_TEMPLATE, TURN_END, tiny_tokenizer
from specjax.text.chat_template import ChatTemplate


def make_target(*, tie_word_embeddings: bool = True, seed: int = 0, **fields) -> Target:
    """A random target of four layers of width 16 that can chat, after a fashion."""
    tokenizer = tiny_tokenizer()
    tiny = tiny_target(
        jax.random.key(seed),
        vocab_size=tokenizer.vocab_size,
        num_layers=4,
        max_position_embeddings=256,
        eos_token_ids=(tokenizer.id_of(TURN_END),),
        bos_token_id=0,
        tie_word_embeddings=tie_word_embeddings,
        **fields,
    )
    params = dict(tiny.params)
    if tie_word_embeddings:
        params["lm_head"] = params["embed_tokens"].T
    return Target(
        config=tiny.config,
        params=params,
        tokenizer=tokenizer,
        chat_template=ChatTemplate(CHATML_TEMPLATE, "", TURN_END),
        source="tiny",
        digest=f"tiny-{seed}-{tie_word_embeddings}",
    )


@pytest.fixture(scope="session")
def target() -> Target:
    """The tiny target."""
    return make_target()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model with tied embeddings as a folder on disk."""
    return str(save_target(tmp_path_factory.mktemp("model") / "tiny-chat", make_target()))
