"""Chat in a terminal: colours by origin, nothing of the model's control characters, history."""

from __future__ import annotations

import io
import re
from typing import Any

import jax
import pytest

from eval import generate
from eval.conversation import answer_lines, converse
from eval.generate import Chat, choose_system, closing_line
from eval.loading import LoadedSystem
from eval.terminal import SOURCE_NAMES, Painter, use_color
from specjax.decoding import Completion, Engine, Request, SamplingParams, StepRecord
from specjax.testing.tiny_models import TabularDrafter


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def engine(chat_target: Any) -> Engine:
    table = TabularDrafter(chat_target.config.vocab_size)
    params = table.init_params(jax.random.key(3))
    # The sizes of the benchmark's tests, so that compiled functions are shared.
    return Engine(chat_target, table, params, cache_length=128, draft_length=2)


def chat(target: Any, engine: Engine, *, color: bool = False, system: str | None = None) -> tuple[Chat, io.StringIO]:
    out = io.StringIO()
    return Chat(target, engine, SamplingParams(max_new_tokens=12), out, Painter(color), system), out


def plain(text: str) -> str:
    return re.sub("\x1b\\[[0-9;]*m", "", text)


def test_streamed_text_is_the_answer(chat_target: Any, engine: Engine) -> None:
    own, out = chat(chat_target, engine)
    own.warm_up()
    completion = own.ask("hello world")
    shown = out.getvalue()
    assert "\x1b" not in shown
    assert len(completion.token_ids) > 0
    # Control characters of a random model are shown as the replacement character.
    assert shown == Painter(False).paint(completion.text, "target") + "\n"


def test_colours_name_the_origin_and_change_no_letter(chat_target: Any, engine: Engine) -> None:
    own, out = chat(chat_target, engine, color=True)
    completion = own.ask("hello world")
    shown = out.getvalue()
    assert plain(shown) == Painter(False).paint(completion.text, "target") + "\n"
    assert ("\x1b[33m" in shown) == ("recovered" in completion.token_sources)
    assert ("\x1b[32m" in shown) == ("accepted" in completion.token_sources)


def test_second_turn_includes_the_first_answer(chat_target: Any, engine: Engine) -> None:
    own, _ = chat(chat_target, engine, system="be kind")
    first = own.ask("hello")
    second = own.ask("and?")
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert len(second.prompt_ids) > len(first.prompt_ids) + 2
    own.restart()
    assert own.ask("hello").prompt_ids == first.prompt_ids


def test_a_question_that_does_not_fit_is_told_and_forgotten(chat_target: Any, engine: Engine) -> None:
    own, _ = chat(chat_target, engine)
    first = own.ask("hello")
    with pytest.raises(ValueError, match="must fit into the context of 128 tokens"):
        own.ask("hello " * 200)
    own.restart()
    assert own.ask("hello").prompt_ids == first.prompt_ids


def test_conversation_ends_with_the_input(
    chat_target: Any, engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own, out = chat(chat_target, engine)
    typed = iter(["hello", "hello " * 200, "/new", "hello", "/exit", "never read"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(typed))
    converse(own, Painter(False), out)
    assert next(typed) == "never read"
    assert out.getvalue().count("tokens in") == 2
    assert capsys.readouterr().err.count("error: ") == 1

    def end(prompt: str) -> str:
        raise EOFError

    monkeypatch.setattr("builtins.input", end)
    converse(own, Painter(False), out)


def test_every_line_of_a_pipe_is_answered(chat_target: Any, engine: Engine) -> None:
    own, out = chat(chat_target, engine)
    remarks = io.StringIO()
    lines = [b"\n", b"hello\r\n", b"  \n", b"hello " * 200 + b"\n", b"/new\n", b"hello"]
    assert answer_lines(own, lines, remarks) == 1
    told = remarks.getvalue()
    assert told.count("> hello") == 3
    assert told.count("tokens in") == 2
    assert "error: standard input, line 4: `prompt_ids` must fit into the context" in told
    # Both conversations begin alike, and a question without an answer leaves nothing behind.
    answers = out.getvalue()
    assert answers == 2 * answers[: len(answers) // 2]
    assert answer_lines(own, [b"/new\n", b"hello\n", b"/exit\n", b"hello\n"], remarks) == 0
    assert out.getvalue() == 3 * answers[: len(answers) // 2]


def test_a_pipe_that_is_no_utf8_is_named(chat_target: Any, engine: Engine) -> None:
    own, _ = chat(chat_target, engine)
    with pytest.raises(ValueError, match="standard input, line 2: must be UTF-8 text; got invalid start byte"):
        answer_lines(own, [b"\n", b"a\xff\n"], io.StringIO())


def test_a_compilation_is_told_unless_the_prompt_warmed_up(chat_target: Any) -> None:
    table = TabularDrafter(chat_target.config.vocab_size)
    params = table.init_params(jax.random.key(3))
    # A context that no other test has, so that nothing is compiled yet.
    fresh = Engine(chat_target, table, params, cache_length=120, draft_length=2)
    own, _ = chat(chat_target, fresh)
    own.warm_up("hello")
    assert "compilation" not in own.describe(own.ask("hello"))
    own.restart()
    assert "compilation" in own.describe(own.ask("hello world, " * 4))


def test_a_token_without_room_for_a_draft_has_a_named_source(chat_target: Any, engine: Engine) -> None:
    request = Request("a", (1, 2), SamplingParams(max_new_tokens=1))
    (completion,) = engine.generate([request])
    assert completion.token_sources == ("target",)
    assert "target" in SOURCE_NAMES


def test_closing_line_counts_decoding_apart_from_the_prompt() -> None:
    completion = Completion(
        "a",
        (1, 2, 3),
        token_ids=(4,) * 10,
        finish_reason="length",
        steps=(StepRecord(2, 2, 3),) * 2 + (StepRecord(2, 1, 2),) * 2,
        token_sources=("accepted",) * 10,
        seconds=2.5,
        prefill_seconds=0.5,
    )
    line = closing_line(completion)
    assert "10 tokens in 4 steps, tau 2.50, 5.0 tokens/s" in line
    assert "prompt of 3 read in 0.50 s, cut at --max_new_tokens" in line
    empty = closing_line(Completion("a", (1,)))
    assert "0 tokens in 0 steps;" in empty
    assert "tau" not in empty
    assert "read in 0.50 s, compilation for this prompt length included, cut" in closing_line(completion, compiled=True)


def test_colour_is_chosen_by_flag_terminal_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert use_color("auto", Terminal())
    assert not use_color("auto", io.StringIO())
    assert use_color("always", io.StringIO())
    assert not use_color("never", Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_color("auto", Terminal())
    assert use_color("always", Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not use_color("auto", Terminal())
    with pytest.raises(ValueError, match="`--color` must be one of"):
        use_color("sometimes", Terminal())


def test_control_characters_of_a_model_do_not_reach_the_terminal() -> None:
    assert Painter(False).paint("a\x1b[2Jb\r\n\tc", "accepted") == "a\ufffd[2Jb\ufffd\n\tc"
    assert Painter(True).paint("", "accepted") == ""
    assert Painter(True).paint("x", "accepted") == "\x1b[32mx\x1b[0m"
    assert Painter(True).paint("x", "target") == "x"
    assert Painter(False).key() == ""
    assert Painter(True).key().endswith("  the target's own, nothing was drafted")


def test_the_trained_drafter_comes_before_prompt_lookup() -> None:
    trained, lookup = LoadedSystem("slim", None, None), LoadedSystem("ngram", None, None)
    assert choose_system({"slim": trained, "ngram": lookup}) is trained
    assert choose_system({"ngram": lookup}) is lookup
    assert choose_system({}) is None
    with pytest.raises(ValueError, match="must name one drafter; got slim, full"):
        choose_system({"slim": trained, "full": LoadedSystem("full", None, None)})
    assert generate.NGRAM == "ngram"
