"""Masks written by hand for every way in which a search for the assistant's text goes wrong."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.testing.tiny_tokenizer import CHATML_TEMPLATE, CHATML_TEMPLATE_WITH_MARKS, tiny_tokenizer
from specjax.text.chat_template import ChatTemplate, Message
from specjax.text.loss_mask import (
    EncodedConversation,
    check_supervised_ratio,
    encode_conversation,
    supervised_ratio,
)
from specjax.text.tokenizer import Tokenizer

# One token a byte, so that an expected mask can be written as pieces of text.
BYTES = tiny_tokenizer(merges=())
MERGED = tiny_tokenizer()
PLAIN = ChatTemplate(CHATML_TEMPLATE)
MARKED = ChatTemplate(CHATML_TEMPLATE_WITH_MARKS)

both_templates = pytest.mark.parametrize("template", [PLAIN, MARKED], ids=["prefix", "marks"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, str]:
    return {"role": "system", "content": text}


def tool(text: str) -> dict[str, str]:
    return {"role": "tool", "content": text}


def check(template: ChatTemplate, messages: list[dict[str, str]], expected: list[tuple[str, bool]]) -> None:
    """`expected`: the whole text in pieces, each with whether it is supervised."""
    token_ids: list[int] = []
    mask: list[bool] = []
    for text, supervised in expected:
        ids = BYTES.encode(text)
        token_ids += ids
        mask += [supervised] * len(ids)
    encoded = encode_conversation(BYTES, template, messages)
    assert encoded.token_ids.dtype == np.int32
    assert encoded.loss_mask.dtype == np.bool_
    assert encoded.token_ids.tolist() == token_ids
    assert encoded.loss_mask.tolist() == mask


HEADER = "<|im_start|>assistant\n"


@both_templates
def test_case_t2_a_answer_repeats_the_question(template: ChatTemplate) -> None:
    check(
        template,
        [user("hello"), assistant("hello"), user("hello"), assistant("hello hello")],
        [
            ("<|im_start|>user\nhello<|im_end|>\n" + HEADER, False),
            ("hello<|im_end|>", True),
            ("\n<|im_start|>user\nhello<|im_end|>\n" + HEADER, False),
            ("hello hello<|im_end|>", True),
            ("\n", False),
        ],
    )


@both_templates
def test_case_t2_b_empty_answer(template: ChatTemplate) -> None:
    check(
        template,
        [user("x"), assistant(""), user("y"), assistant("z")],
        [
            ("<|im_start|>user\nx<|im_end|>\n" + HEADER, False),
            ("<|im_end|>", True),
            ("\n<|im_start|>user\ny<|im_end|>\n" + HEADER, False),
            ("z<|im_end|>", True),
            ("\n", False),
        ],
    )


@both_templates
def test_case_t2_c_ends_with_the_user(template: ChatTemplate) -> None:
    check(
        template,
        [user("x"), assistant("y"), user("z")],
        [
            ("<|im_start|>user\nx<|im_end|>\n" + HEADER, False),
            ("y<|im_end|>", True),
            ("\n<|im_start|>user\nz<|im_end|>\n", False),
        ],
    )


@both_templates
def test_case_t2_d_header_inside_the_texts(template: ChatTemplate) -> None:
    # Special strings in a message become special tokens, but never turn into turns.
    check(
        template,
        [user("assistant\nno" + HEADER + "no<|im_end|>"), assistant("yes" + HEADER + "<|im_end|>yes")],
        [
            ("<|im_start|>user\nassistant\nno" + HEADER + "no<|im_end|><|im_end|>\n" + HEADER, False),
            ("yes" + HEADER + "<|im_end|>yes<|im_end|>", True),
            ("\n", False),
        ],
    )


@both_templates
def test_case_t2_e_two_answers_in_a_row(template: ChatTemplate) -> None:
    check(
        template,
        [user("x"), assistant("one"), assistant("two")],
        [
            ("<|im_start|>user\nx<|im_end|>\n" + HEADER, False),
            ("one<|im_end|>", True),
            ("\n" + HEADER, False),
            ("two<|im_end|>", True),
            ("\n", False),
        ],
    )


@both_templates
def test_case_t2_f_tool_message_between(template: ChatTemplate) -> None:
    check(
        template,
        [user("x"), assistant("call"), tool("result"), assistant("done")],
        [
            ("<|im_start|>user\nx<|im_end|>\n" + HEADER, False),
            ("call<|im_end|>", True),
            ("\n<|im_start|>tool\nresult<|im_end|>\n" + HEADER, False),
            ("done<|im_end|>", True),
            ("\n", False),
        ],
    )


@both_templates
def test_case_t2_g_system_only(template: ChatTemplate) -> None:
    check(template, [system("be brief")], [("<|im_start|>system\nbe brief<|im_end|>\n", False)])


@both_templates
def test_case_t2_h_characters_of_many_bytes(template: ChatTemplate) -> None:
    check(
        template,
        [user("👩‍👧 é"), assistant("漢字 e\u0301 👩‍👧")],
        [
            ("<|im_start|>user\n👩‍👧 é<|im_end|>\n" + HEADER, False),
            ("漢字 e\u0301 👩‍👧<|im_end|>", True),
            ("\n", False),
        ],
    )


@both_templates
def test_case_t2_i_spaces_at_both_ends(template: ChatTemplate) -> None:
    check(
        template,
        [user("  x  "), assistant("  \ny \n")],
        [
            ("<|im_start|>user\n  x  <|im_end|>\n" + HEADER, False),
            ("  \ny \n<|im_end|>", True),
            ("\n", False),
        ],
    )


def test_case_t1_template_without_marks_is_masked_all_the_same() -> None:
    assert not PLAIN.has_generation_marks
    messages = [system("s"), user("u"), assistant("a"), user("v"), assistant("b")]
    with_marks, without = (encode_conversation(BYTES, template, messages) for template in (MARKED, PLAIN))
    assert without.loss_mask.tolist() == with_marks.loss_mask.tolist()
    assert without.num_supervised == 4
    assert BYTES.decode(without.token_ids[without.loss_mask], skip_special_tokens=False) == "a<|im_end|>b<|im_end|>"


def test_case_t1_marks_that_cover_nothing_are_not_believed() -> None:
    source = CHATML_TEMPLATE + "{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    template = ChatTemplate(source)
    assert template.has_generation_marks
    encoded = encode_conversation(BYTES, template, [user("u"), assistant("a")])
    assert encoded.num_supervised == 2


def test_marks_that_close_before_the_end_of_turn() -> None:
    source = CHATML_TEMPLATE_WITH_MARKS.replace(
        "{%- generation -%}{{ message['content'] ~ '<|im_end|>' }}{%- endgeneration -%}",
        "{%- generation -%}{{ message['content'] }}{%- endgeneration -%}{{ '<|im_end|>' }}",
    )
    assert source != CHATML_TEMPLATE_WITH_MARKS
    messages = [user("u"), assistant("a"), assistant(""), user("v")]
    encoded = encode_conversation(BYTES, ChatTemplate(source, None, "<|im_end|>"), messages)
    supervised = BYTES.decode(encoded.token_ids[encoded.loss_mask], skip_special_tokens=False)
    assert supervised == "a<|im_end|><|im_end|>"


def masked_pieces(tokenizer: Tokenizer, template: ChatTemplate, messages: list[Message]) -> list[tuple[str, bool]]:
    encoded = encode_conversation(tokenizer, template, messages)
    texts = [str(tokenizer.token_of(token_id)) for token_id in encoded.token_ids]
    return list(zip(texts, encoded.loss_mask.tolist(), strict=True))


@both_templates
def test_token_that_joins_header_and_answer_is_the_headers(template: ChatTemplate) -> None:
    # The header's newline and the answer's first space are one token, so that the tokens of the prompt are no
    # prefix of those of the conversation.
    pieces = masked_pieces(MERGED, template, [user("u"), assistant("  x")])
    assert pieces[-6:] == [("t", False), ("ĊĠ", False), ("Ġ", True), ("x", True), ("<|im_end|>", True), ("Ċ", False)]


@both_templates
def test_answer_that_is_swallowed_by_the_header(template: ChatTemplate) -> None:
    pieces = masked_pieces(MERGED, template, [user("u"), assistant("\n")])
    assert pieces[-4:] == [("t", False), ("ĊĊ", False), ("<|im_end|>", True), ("Ċ", False)]


def test_turns_without_a_special_token_between_them() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    pieces = masked_pieces(BYTES, template, [user("u"), assistant("a"), user("v")])
    supervised = "".join(text for text, inside in pieces if inside)
    # The blank line is how such a turn ends.
    assert supervised == "aĊĊ"


DEFAULT_SYSTEM = (
    "{% if messages and messages[0].role != 'system' %}{{ '<|im_start|>system\\nbe kind<|im_end|>\\n' }}{% endif %}"
)


def test_default_system_text_is_not_supervised() -> None:
    template = ChatTemplate(DEFAULT_SYSTEM + CHATML_TEMPLATE)
    check(
        template,
        [user("u"), assistant("be kind")],
        [
            ("<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\nu<|im_end|>\n" + HEADER, False),
            ("be kind<|im_end|>", True),
            ("\n", False),
        ],
    )


def test_case_t3_answer_before_any_question_is_an_error_where_it_is_ambiguous() -> None:
    template = ChatTemplate(DEFAULT_SYSTEM + CHATML_TEMPLATE)
    with pytest.raises(ValueError, match="message 0: the chat template writes this turn differently"):
        encode_conversation(BYTES, template, [assistant("a"), user("u")])
    # With a template that adds nothing of its own, the turn is plain to see.
    encoded = encode_conversation(BYTES, PLAIN, [assistant("a"), user("u")])
    assert encoded.num_supervised == 2


def test_template_that_rewrites_earlier_turns_is_refused_or_marked() -> None:
    body = "{{ m.content if loop.last else 'old' }}"
    source = "{%% for m in messages %%}{{ '<|im_start|>' ~ m.role ~ '\\n' }}%s{{ '<|im_end|>' }}{%% endfor %%}"
    messages = [user("u"), assistant("a"), user("v"), assistant("b")]
    with pytest.raises(ValueError, match=r"message 1: .*use a template with {% generation %} marks"):
        encode_conversation(BYTES, ChatTemplate(source % body), messages)
    marked = "{% if m.role == 'assistant' %}{% generation %}" + body + "{% endgeneration %}{% else %}x{% endif %}"
    encoded = encode_conversation(BYTES, ChatTemplate(source % marked, None, "<|im_end|>"), messages)
    supervised = BYTES.decode(encoded.token_ids[encoded.loss_mask], skip_special_tokens=False)
    assert supervised == "old<|im_end|>b<|im_end|>"


def test_no_template_and_no_messages() -> None:
    with pytest.raises(ValueError, match="the model has no chat template"):
        encode_conversation(BYTES, None, [user("u")])
    encoded = encode_conversation(BYTES, PLAIN, [])
    assert encoded.token_ids.shape == encoded.loss_mask.shape == (0,)


def test_case_t8_wrong_separators_raise_instead_of_masking() -> None:
    template = ChatTemplate(CHATML_TEMPLATE.replace("im_start", "turn_start"))
    with pytest.raises(ValueError, match=r"'<\|turn_start\|>', which the tokenizer does not know"):
        encode_conversation(BYTES, template, [user("u"), assistant("a")])


def test_case_t8_supervised_ratio_has_a_threshold() -> None:
    full = EncodedConversation(np.zeros(4, np.int32), np.asarray([False, True, True, False]))
    none = EncodedConversation(np.zeros(96, np.int32), np.zeros(96, np.bool_))
    assert supervised_ratio([full, none]) == 0.02
    assert check_supervised_ratio([full, none], minimum=0.02) == 0.02
    assert supervised_ratio([]) == 0.0
    with pytest.raises(ValueError, match=r"only 2\.00% of the tokens are supervised, less than 5\.00%"):
        check_supervised_ratio([full, none], minimum=0.05)
    with pytest.raises(ValueError, match="hardly any assistant text"):
        check_supervised_ratio([none])
