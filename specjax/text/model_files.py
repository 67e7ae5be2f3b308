"""Tokenizer and chat template from the files that come with a model's weights."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.json_files import read_object
from specjax.text.chat_template import ChatTemplate
from specjax.text.gguf_vocabulary import field_value
from specjax.text.tokenizer import Tokenizer


def text_from_folder(
    folder: str | os.PathLike[str], *, date: str | None = None
) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template of a Hugging Face model folder.

    The template is that of `chat_template.jinja`, else of `chat_template.json`, else of `tokenizer_config.json`;
    where there are several by name, the one called "default".

    Args:
        folder: holds `tokenizer.json`, and usually `tokenizer_config.json`.
        date: see `ChatTemplate`.

    Raises:
        FileNotFoundError: if there is no `tokenizer.json`.
        ValueError: if one of the files is broken.
    """
    folder = Path(folder)
    config = _read_json(folder / "tokenizer_config.json")
    bos_token = _token_text(config.get("bos_token"))
    eos_token = _token_text(config.get("eos_token"))
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json", bos_token=bos_token, eos_token=eos_token)
    return tokenizer, _template(_template_source(folder, config), tokenizer, folder, date)


def text_from_gguf(fields: Mapping[str, Any], *, date: str | None = None) -> tuple[Tokenizer, ChatTemplate | None]:
    """Tokenizer and chat template of a GGUF's metadata.

    Args:
        fields: see `Tokenizer.from_gguf`.
        date: see `ChatTemplate`.

    Raises:
        ValueError: see `Tokenizer.from_gguf` and `ChatTemplate`.
    """
    tokenizer = Tokenizer.from_gguf(fields)
    return tokenizer, _template(field_value(fields, "tokenizer.chat_template"), tokenizer, "GGUF", date)


def _template(source: Any, tokenizer: Tokenizer, where: object, date: str | None) -> ChatTemplate | None:
    if source is None:
        return None
    if not isinstance(source, str):
        raise ValueError(f"{where}: `chat_template` must be a text; got {type(source).__name__}")
    return ChatTemplate(source, tokenizer.bos_token, tokenizer.eos_token, date=date)


def _template_source(folder: Path, config: Mapping[str, Any]) -> Any:
    jinja_file = folder / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    own_file = _read_json(folder / "chat_template.json")
    source = own_file.get("chat_template", config.get("chat_template"))
    if isinstance(source, list):
        by_name = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        return by_name.get("default")
    return source


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file, or nothing if there is no file."""
    return read_object(path) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """Special tokens are written as text, or as objects that say more about it."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None
