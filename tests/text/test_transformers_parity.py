"""Templates and masks against transformers, where it is installed."""

from __future__ import annotations

import pytest

from specjax.testing.tiny_tokenizer import CHATML_TEMPLATE, CHATML_TEMPLATE_WITH_MARKS, tiny_tokenizer
from specjax.text.chat_template import ChatTemplate, encode_prompt
from specjax.text.loss_mask import encode_conversation

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.parity

BYTES = tiny_tokenizer(merges=())

CONVERSATIONS = (
    [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello"}],
    [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}, {"role": "user", "content": "y"}],
    [
        {"role": "system", "content": "be <brief>"},
        {"role": "user", "content": "  'quoted' & \"more\"  "},
        {"role": "assistant", "content": "漢字 e\u0301 👩‍👧\n\n"},
        {"role": "tool", "content": '{"a": 1}'},
        {"role": "assistant", "content": "<|im_start|>assistant\nno"},
    ],
    [{"role": "system", "content": "only"}],
)

# Blocks on their own lines, loop controls, filters and whitespace control in the manner of published templates.
SPACIOUS = """{% set offset = 1 if messages and messages[0].role == 'system' else 0 %}
{% if offset %}
    {{- bos_token + messages[0]['content'] | trim + '\\n' }}
{% else %}
    {{- bos_token }}
{% endif %}
{% for message in messages[offset:] %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns = namespace(text=message.content.strip().upper()) %}
{{ loop.index ~ ' ' ~ message.role.title() ~ ': ' ~ ns.text ~ eos_token }}
    {{ message | tojson(indent=2) }}
{% endfor %}
{% if add_generation_prompt is defined and add_generation_prompt and not tools %}
Assistant:{% endif %}
"""

TEMPLATES = (CHATML_TEMPLATE, CHATML_TEMPLATE_WITH_MARKS, SPACIOUS)


def reference(template: str):
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=BYTES._backend, chat_template=template, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


@pytest.mark.parametrize("source", TEMPLATES, ids=["plain", "marks", "wide"])
@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("prompt", [False, True])
def test_templates_write_the_same_text(source: str, messages: list[dict[str, str]], prompt: bool) -> None:
    template = ChatTemplate(source, "<|im_start|>", "<|im_end|>")
    text = reference(source).apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
    assert template.render(messages, prompt) == text
    if prompt:
        ids = reference(source).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert encode_prompt(BYTES, template, messages) == ids


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_masks_by_prefixes_are_those_of_marks_elsewhere(messages: list[dict[str, str]]) -> None:
    expected = reference(CHATML_TEMPLATE_WITH_MARKS).apply_chat_template(
        messages, return_dict=True, return_assistant_tokens_mask=True
    )
    encoded = encode_conversation(BYTES, ChatTemplate(CHATML_TEMPLATE), messages)
    assert encoded.token_ids.tolist() == expected["input_ids"]
    assert encoded.loss_mask.astype(int).tolist() == expected["assistant_masks"]
