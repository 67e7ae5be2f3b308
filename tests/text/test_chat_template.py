"""Chat templates in the sandbox, prompts, and templates that do not belong to the tokenizer."""

from __future__ import annotations

import datetime

import pytest

from specjax.testing.tiny_tokenizer import CHATML_TEMPLATE, CHATML_TEMPLATE_WITH_MARKS, tiny_tokenizer
from specjax.text import chat_template
from specjax.text.chat_template import (
    ChatTemplate,
    check_separators,
    encode_prompt,
    require_template,
    template_separators,
)

TINY = tiny_tokenizer()
USER = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "world"}
DATED = "{{ 'Today: ' ~ strftime_now('%d %b %Y') ~ '\\n' }}" + CHATML_TEMPLATE


def test_chatml_text() -> None:
    template = ChatTemplate(CHATML_TEMPLATE)
    assert template.render([USER, ANSWER]) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nworld<|im_end|>\n"
    )
    assert template.render([USER], add_generation_prompt=True) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert template.render([]) == ""


def test_prompt_is_the_rendering_with_the_next_header() -> None:
    ids = encode_prompt(TINY, ChatTemplate(CHATML_TEMPLATE), [USER])
    assert TINY.decode(ids, skip_special_tokens=False) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_usual_helpers_are_there() -> None:
    source = (
        "{% for m in messages %}\n"
        "    {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "{{ m | tojson }}{{ bos_token }}{{ eos_token }}\n"
        "    {% if loop.index > 2 %}{% break %}{% endif %}\n"
        "{% endfor %}"
    )
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "<é & 'x'>"}]
    text = ChatTemplate(source, "<b>", "<e>").render(messages)
    assert text == '{"role": "user", "content": "<é & \'x\'>"}<b><e>\n'


def test_marks_do_not_change_the_text() -> None:
    marked = ChatTemplate(CHATML_TEMPLATE_WITH_MARKS)
    plain = ChatTemplate(CHATML_TEMPLATE)
    messages = [USER, ANSWER, USER, {"role": "assistant", "content": ""}]
    assert (marked.has_generation_marks, plain.has_generation_marks) == (True, False)
    assert marked.render(messages, True) == plain.render(messages, True)
    rendered = marked.render_with_spans(messages)
    assert rendered is not None
    text, spans = rendered
    assert text == plain.render(messages)
    assert [text[start:end] for start, end in spans] == ["world<|im_end|>", "<|im_end|>"]


def test_marks_that_a_filter_works_on_are_not_trusted() -> None:
    source = (
        "{% for m in messages %}{% set block %}{% generation %}{{ m.content }}{% endgeneration %}{% endset %}"
        "[{{ block | trim }}]{% endfor %}"
    )
    template = ChatTemplate(source)
    assert template.has_generation_marks
    assert template.render_with_spans([{"role": "assistant", "content": " x "}]) is None
    assert template.render_with_spans([{"role": "assistant", "content": "x"}]) == ("[x]", [(1, 2)])


def test_template_cannot_reach_the_machine_or_change_messages() -> None:
    with pytest.raises(ValueError, match="refuses the conversation"):
        ChatTemplate("{{ messages.__class__.__mro__[1].__subclasses__() }}").render([USER])
    with pytest.raises(ValueError, match="refuses the conversation"):
        ChatTemplate("{{ messages.append(1) }}").render([USER])
    message = dict(USER)
    with pytest.raises(ValueError, match="refuses the conversation"):
        ChatTemplate("{{ messages[0].update({'content': 'x'}) }}").render([message])
    assert message == USER


def test_refusals_and_failures_are_one_line() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="the chat template refuses the conversation: roles must alternate"):
        template.render([USER])
    with pytest.raises(ValueError, match="refuses the conversation"):
        ChatTemplate("{{ messages[0]['content'] + 1 }}").render([USER])
    with pytest.raises(ValueError, match="chat template, line 2: "):
        ChatTemplate("a\n{% if %}")
    with pytest.raises(ValueError, match="`source` of a chat template must not be empty"):
        ChatTemplate("  ")


def test_missing_template_is_one_clear_error() -> None:
    with pytest.raises(ValueError, match="the model has no chat template"):
        require_template(None)
    with pytest.raises(ValueError, match="the model has no chat template"):
        encode_prompt(TINY, None, [USER])


def test_case_t11_date_in_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    day = 1
    monkeypatch.setattr(chat_template, "_today", lambda: datetime.date(2025, 3, day))
    first = ChatTemplate(DATED)
    first_ids = encode_prompt(TINY, first, [USER])
    assert "Today: 01 Mar 2025\n" in TINY.decode(first_ids)
    day = 2
    # An object keeps its day; only a new one sees the next.
    assert encode_prompt(TINY, first, [USER]) == first_ids
    second = ChatTemplate(DATED)
    assert encode_prompt(TINY, second, [USER]) != first_ids
    # What was cached under the first day's digest isn't taken for the second's.
    assert (first.uses_date, first.date, second.date) == (True, "2025-03-01", "2025-03-02")
    assert first.digest != second.digest
    # Pinned, the day of the run does not matter.
    pinned = ChatTemplate(DATED, date="2025-03-01")
    assert encode_prompt(TINY, pinned, [USER]) == first_ids
    assert pinned.digest == first.digest
    # A template that writes no date has the same digest on every day.
    assert ChatTemplate(CHATML_TEMPLATE, date="2025-03-01").digest == ChatTemplate(CHATML_TEMPLATE).digest
    assert not ChatTemplate(CHATML_TEMPLATE).uses_date


@pytest.mark.parametrize("date", ["tomorrow", "2025-13-01", "01.03.2025", ""])
def test_dates_that_are_none(date: str) -> None:
    with pytest.raises(ValueError, match="`date` must be a day as YYYY-MM-DD"):
        ChatTemplate(DATED, date=date)


def test_digest_changes_with_what_decides_the_text() -> None:
    digests = {
        ChatTemplate(CHATML_TEMPLATE).digest,
        ChatTemplate(CHATML_TEMPLATE + " ").digest,
        ChatTemplate(CHATML_TEMPLATE, "<|im_start|>").digest,
        ChatTemplate(CHATML_TEMPLATE, None, "<|im_end|>").digest,
    }
    assert len(digests) == 4


def test_case_t8_separators_of_another_model() -> None:
    source = CHATML_TEMPLATE.replace("<|im_end|>", "<|eot_id|>")
    template = ChatTemplate(source)
    assert template_separators(template) == ("<|im_start|>", "<|eot_id|>")
    with pytest.raises(ValueError, match=r"the chat template writes '<\|eot_id\|>', which the tokenizer does not know"):
        encode_prompt(TINY, template, [USER])


def test_case_t8_separators_put_together_by_the_template() -> None:
    template = ChatTemplate("{% for m in messages %}{{ '<|' ~ m.role ~ '|>' ~ m.content }}{% endfor %}")
    assert template_separators(template) == ("<|user|>", "<|assistant|>")
    with pytest.raises(ValueError, match=r"'<\|user\|>', '<\|assistant\|>'"):
        check_separators(TINY, template)


def test_case_t8_beginning_and_end_tokens_count_where_they_are_written() -> None:
    source = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="'<s>'"):
        check_separators(TINY, ChatTemplate(source, "<s>", "</s>"))
    check_separators(TINY, ChatTemplate(source, "<|im_start|>", "</s>"))


def test_case_t8_messages_hold_no_separators() -> None:
    messages = [{"role": "user", "content": "what is <|eot_id|>?"}]
    assert encode_prompt(TINY, ChatTemplate(CHATML_TEMPLATE), messages)
