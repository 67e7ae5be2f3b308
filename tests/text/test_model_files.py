"""Tokenizer and template from the files beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specjax.testing.tiny_tokenizer import CHATML_TEMPLATE, SPECIAL_TOKENS, tiny_tokenizer
from specjax.text.chat_template import ChatTemplate
from specjax.text.model_files import text_from_folder, text_from_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_tokenizer()._backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def test_folder_with_everything(folder: Path) -> None:
    config = {"bos_token": {"content": "<|im_start|>", "special": True}, "eos_token": "<|im_end|>"}
    write_json(folder / "tokenizer_config.json", {**config, "chat_template": CHATML_TEMPLATE})
    tokenizer, template = text_from_folder(folder)
    assert tokenizer.digest == tiny_tokenizer().digest
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert template is not None
    assert template.digest == ChatTemplate(CHATML_TEMPLATE, "<|im_start|>", "<|im_end|>").digest


def test_folder_with_only_a_tokenizer(folder: Path) -> None:
    tokenizer, template = text_from_folder(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, template) == (None, None, None)


def test_which_template_counts(folder: Path) -> None:
    named = [{"name": "tools", "template": "t"}, {"name": "default", "template": "in config"}]
    write_json(folder / "tokenizer_config.json", {"chat_template": named})

    def source() -> str | None:
        _, template = text_from_folder(folder, date="2025-01-02")
        return template and template.source

    assert source() == "in config"
    write_json(folder / "chat_template.json", {"chat_template": "in its own file"})
    assert source() == "in its own file"
    (folder / "chat_template.jinja").write_text("in jinja", encoding="utf-8")
    assert source() == "in jinja"
    (folder / "chat_template.jinja").unlink()
    write_json(folder / "chat_template.json", {"chat_template": named[:1]})
    assert source() is None


def test_date_is_passed_on(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ strftime_now('%Y') }}", encoding="utf-8")
    _, template = text_from_folder(folder, date="1999-12-31")
    assert template is not None
    assert template.render([]) == "1999"


def test_broken_files_are_named(folder: Path) -> None:
    config = folder / "tokenizer_config.json"
    config.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not JSON"):
        text_from_folder(folder)
    write_json(config, [])
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: must hold a JSON object; got list"):
        text_from_folder(folder)
    write_json(config, {"chat_template": 3})
    with pytest.raises(ValueError, match="`chat_template` must be a text; got int"):
        text_from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        text_from_folder(folder)


def test_gguf_with_and_without_template() -> None:
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*SPECIAL_TOKENS, "a", "b", "ab"],
        "tokenizer.ggml.token_type": [3, 3, 3, 1, 1, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHATML_TEMPLATE,
    }
    tokenizer, template = text_from_gguf(fields)
    assert tokenizer.encode("ab<|im_end|>") == [5, 2]
    assert template is not None
    assert (template.bos_token, template.eos_token) == ("<|im_start|>", "<|im_end|>")
    del fields["tokenizer.chat_template"]
    assert text_from_gguf(fields)[1] is None
