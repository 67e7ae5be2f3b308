"""Chat templates: from messages to the text that a model was trained to see."""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from specjax.text.tokenizer import Tokenizer

_MARK_START = "__generation_start"
_MARK_END = "__generation_end"

Message = Mapping[str, Any]

# `<|name|>`, also with the full-width bars of some vocabularies.
_CONTROL_TOKEN = re.compile("<\\|[^<>|\\s]+\\|>|<\uff5c[^<>\uff5c\\s]+\uff5c>")
_PROBE = ({"role": "user", "content": "1"}, {"role": "assistant", "content": "2"})


class _GenerationMarks(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` around what the assistant wrote.

    The block becomes its body between two variables, which are empty unless the marks are asked for.
    """

    tags = {"generation"}  # noqa: RUF012  (the base class declares a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (
            jinja2.nodes.Output([jinja2.nodes.Name(name, "load")], lineno=line) for name in (_MARK_START, _MARK_END)
        )
        return [start, *body, end]


class ChatTemplate:
    """A model's chat template, run in a sandbox that can neither reach the machine nor change its input.

    The environment is the usual one for such templates: blocks are trimmed, `break` and `continue` work, and
    `raise_exception`, `strftime_now` and the filter `tojson` exist.

    Attributes:
        source: the template.
        bos_token: text of the beginning-of-sequence token ("" if there is none).
        eos_token: text of the end-of-sequence token ("" if there is none).
        date: the day that `strftime_now` speaks of, as "YYYY-MM-DD". It never changes while this object
            lives, so that a run over midnight stays one run.
    """

    def __init__(
        self, source: str, bos_token: str | None = None, eos_token: str | None = None, *, date: str | None = None
    ) -> None:
        """Compiles `source`.

        Args:
            source: the template.
            bos_token: text of the beginning-of-sequence token.
            eos_token: text of the end-of-sequence token.
            date: day for templates that write the date, as "YYYY-MM-DD"; None is today. Pin it wherever
                equal ids are wanted on another day.

        Raises:
            ValueError: if the template is empty or not valid, or the date isn't one.
        """
        if not source.strip():
            raise ValueError("`source` of a chat template must not be empty")
        self.source = source
        self.bos_token = bos_token or ""
        self.eos_token = eos_token or ""
        self.date = _parse_date(date).isoformat()
        environment = _environment()
        try:
            names = jinja2.meta.find_undeclared_variables(environment.parse(source))
            # Only now, because a global does not count as undeclared.
            environment.globals["strftime_now"] = self._strftime_now
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        self.uses_date: bool = "strftime_now" in names
        self.has_generation_marks: bool = _MARK_START in names

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        """Text of a conversation.

        Args:
            messages: mappings with "role" and "content".
            add_generation_prompt: whether the text ends with the header of the assistant's next turn.

        Raises:
            ValueError: if the template refuses the conversation.
        """
        return self._render(messages, add_generation_prompt, "", "")

    def render_with_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]] | None:
        """Text of a conversation and the character ranges [start, end) inside `{% generation %}` marks.

        Returns None if the marks cannot be trusted: a template that works on the text of a marked block
        (trims it, say) may write something else when the marks are there.
        """
        # Drawn at random, so that no message can hold it.
        nonce = secrets.token_hex(16)
        start, end = f"\x02{nonce}", f"\x03{nonce}"
        pieces = self._render(messages, False, start, end).split(start)
        text, spans = pieces[0], []
        for piece in pieces[1:]:
            inside, found, outside = piece.partition(end)
            if not found or end in outside:
                return None
            spans.append((len(text), len(text) + len(inside)))
            text += inside + outside
        if end in pieces[0] or text != self.render(messages):
            return None
        return text, spans

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 (hexadecimal) of all that decides the text; the date counts where the template writes it."""
        date = self.date if self.uses_date else None
        canonical = json.dumps([self.source, self.bos_token, self.eos_token, date])
        return hashlib.sha256(canonical.encode()).hexdigest()

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, start: str, end: str) -> str:
        for index, message in enumerate(messages):
            if not isinstance(message.get("role"), str):
                raise ValueError(f"message {index} must have a `role`; got {dict(message)!r:.60}")
        variables: dict[str, Any] = {_MARK_START: start, _MARK_END: end}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token,
                eos_token=self.eos_token,
                tools=None,
                documents=None,
                **variables,
            )
        # A template is foreign code: it can fail in any way, not only by `raise_exception`.
        except Exception as error:
            raise ValueError(f"the chat template refuses the conversation: {error}") from error

    def _strftime_now(self, form: str) -> str:
        return datetime.date.fromisoformat(self.date).strftime(form)


def require_template(template: ChatTemplate | None) -> ChatTemplate:
    """The template itself.

    Raises:
        ValueError: if there is none.
    """
    if template is None:
        raise ValueError(
            "the model has no chat template, so its turns cannot be written; choose an instruction-tuned model, "
            "or put a chat_template.jinja beside its weights"
        )
    return template


def encode_prompt(tokenizer: Tokenizer, template: ChatTemplate | None, messages: Sequence[Message]) -> list[int]:
    """Ids of a conversation up to the header of the assistant's next turn.

    Raises:
        ValueError: if there is no template, it does not belong to the tokenizer, or it refuses the
            conversation.
    """
    template = require_template(template)
    check_separators(tokenizer, template)
    return tokenizer.encode(template.render(messages, add_generation_prompt=True))


def template_separators(template: ChatTemplate) -> tuple[str, ...]:
    """Control tokens that the template writes around a plain exchange, in order of appearance.

    They are looked for in the rendering of a conversation of our own, so that nothing a user wrote, and no
    branch for tools that a model may lack, is taken for one.
    """
    try:
        text = template.render(_PROBE)
    except ValueError:
        return ()
    found = _CONTROL_TOKEN.findall(text)
    found += [token for token in (template.bos_token, template.eos_token) if token and token in text]
    return tuple(dict.fromkeys(found))


def check_separators(tokenizer: Tokenizer, template: ChatTemplate) -> None:
    """Checks that tokenizer and template belong together.

    A separator that the tokenizer cuts into pieces of plain text is one that its model has never seen: masks
    and prompts would look right and be wrong.

    Raises:
        ValueError: if a separator is not one token.
    """
    unknown = [mark for mark in template_separators(template) if len(tokenizer.encode(mark)) != 1]
    if unknown:
        raise ValueError(
            f"the chat template writes {', '.join(map(repr, unknown))}, which the tokenizer does not know as one "
            "token; template and tokenizer must come from the same model"
        )


def _today() -> datetime.date:
    return datetime.date.today()


def _parse_date(date: str | None) -> datetime.date:
    if date is None:
        return _today()
    try:
        return datetime.date.fromisoformat(date)
    except ValueError as error:
        raise ValueError(f"`date` must be a day as YYYY-MM-DD; got {date!r}") from error


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationMarks, jinja2.ext.loopcontrols]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.filters["tojson"] = _to_json
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes "<" and ">" for web pages.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
