"""Chat in the terminal with a trained drafter: tokens stream in the colour of their origin.

python -m eval.generate --run=RUN_DIR
python -m eval.generate --run=RUN_DIR --prompt="What is a transformer?"
python -m eval.generate --run=RUN_DIR < questions.txt > answers.txt
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any

from absl import flags

from eval import command_flags
from eval.command_line import run_command
from eval.conversation import answer_lines, converse
from eval.loading import NGRAM, LoadedSystem, load_command
from eval.terminal import COLOR_CHOICES, Painter, use_color
from specjax.decoding import Completion, Engine, Request, SamplingParams
from specjax.text.chat_template import encode_prompt
from specjax.text.tokenizer import StreamDecoder

# Readline makes the interactive prompt editable; some systems have none.
with contextlib.suppress(ImportError):
    import readline  # noqa: F401


class Chat:
    """A conversation with the target, speeded up by a drafter.

    Args:
        target: a loaded target with a chat template.
        engine: decodes one request at a time.
        params: how to sample.
        out: where answers go.
        painter: colours them.
        system: system message, or None.
    """

    def __init__(
        self, target: Any, engine: Engine, params: SamplingParams, out: Any, painter: Painter, system: str | None
    ) -> None:
        self._target = target
        self._engine = engine
        self._params = params
        self._out = out
        self._painter = painter
        self._system = system
        self._turns = 0
        self._compiled = False
        self.restart()

    def restart(self) -> None:
        """Forgets the conversation, the system message excepted."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def warm_up(self, text: str = "Hi") -> None:
        """Compiles the step, so that the first answer's rate is a decoding rate, and reading prompts of this length.

        Args:
            text: a question; it is not remembered.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = encode_prompt(self._target.tokenizer, self._target.chat_template, messages)
        # A prompt that cannot be served compiles nothing here and is told when it is asked.
        self._engine.generate([Request("warm-up", tuple(prompt), SamplingParams(max_new_tokens=2))])

    def ask(self, text: str) -> Completion:
        """Asks, streams the answer and remembers both.

        Raises:
            ValueError: if the request cannot be served, for example because the conversation no longer fits; the
                question is then forgotten.
        """
        messages = [*self._messages, {"role": "user", "content": text}]
        prompt = encode_prompt(self._target.tokenizer, self._target.chat_template, messages)
        request = Request(f"turn-{self._turns}", tuple(prompt), self._params)
        compile_count = self._engine.compile_count
        completion = self._stream(request)
        self._compiled = self._engine.compile_count > compile_count
        if completion.failed:
            raise ValueError(completion.finish_reason.partition(": ")[2])
        self._turns += 1
        self._messages = [*messages, {"role": "assistant", "content": completion.text}]
        return completion

    def describe(self, completion: Completion) -> str:
        """One line about the latest answer."""
        return closing_line(completion, compiled=self._compiled)

    def _stream(self, request: Request) -> Completion:
        decoder = StreamDecoder(self._target.tokenizer)
        completion: Completion | None = None
        last_source = "target"
        for event in self._engine.stream([request]):
            for token, source in zip(event.token_ids, event.token_sources, strict=True):
                self._out.write(self._painter.paint(decoder.push([token]), source))
                last_source = source
            self._out.flush()
            completion = event.completion or completion
        if completion is not None and completion.failed:
            return completion
        self._out.write(self._painter.paint(decoder.finish(), last_source) + "\n")
        self._out.flush()
        if completion is None:
            raise RuntimeError("the engine ended without a completion")
        return completion


def closing_line(completion: Completion, *, compiled: bool = False) -> str:
    """Tokens, rate and acceptance length of one answer.

    The rate is that of decoding: reading the prompt is told apart.

    Args:
        completion: the answer.
        compiled: whether reading the prompt compiled something, which the line then says.
    """
    tokens, steps = len(completion.token_ids), len(completion.steps)
    seconds = completion.seconds - completion.prefill_seconds
    rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds > 0 else ""
    drafted = any(step.num_drafted for step in completion.steps)
    tau = f", tau {sum(step.num_committed for step in completion.steps) / steps:.2f}" if steps and drafted else ""
    ended = {"length": ", cut at --max_new_tokens", "context": ", the context is full"}.get(
        completion.finish_reason, ""
    )
    prompt = f"prompt of {len(completion.prompt_ids)} read in {completion.prefill_seconds:.2f} s"
    if compiled:
        prompt += ", compilation for this prompt length included"
    return f"[{tokens} tokens in {steps} steps{tau}{rate}; {prompt}{ended}]"


def choose_system(systems: Mapping[str, LoadedSystem]) -> LoadedSystem | None:
    """The one drafter to use: the trained one before prompt lookup; None without any.

    Raises:
        ValueError: if several trained drafters were given.
    """
    trained = [system for name, system in systems.items() if name != NGRAM]
    if len(trained) > 1:
        raise ValueError(f"`--drafter` must name one drafter; got {', '.join(system.name for system in trained)}")
    return trained[0] if trained else systems.get(NGRAM)


def main() -> int:
    """The command; 1 if a piped question could not be answered."""
    values = flags.FLAGS
    if values.ngram and (values.run or values.drafter):
        raise ValueError("`--ngram` has no effect beside a trained drafter; leave out one of them")
    color = use_color(values.color, sys.stdout)
    if values.prompt is not None and not values.prompt.strip():
        raise ValueError("`--prompt` must not be empty")
    if values.prompt is None and sys.stdin is None:
        raise ValueError("`--prompt` must be given where standard input is closed")
    params = SamplingParams(
        temperature=values.temperature,
        top_k=values.top_k,
        top_p=values.top_p,
        min_p=values.min_p,
        seed=values.seed,
        max_new_tokens=values.max_new_tokens,
    )
    target, systems = load_command(**command_flags.source_arguments(), ngram=values.ngram)
    system = choose_system(systems)
    engine = Engine(
        target,
        system.drafter if system is not None else None,
        system.params if system is not None else None,
        cache_length=min(values.cache_length, target.config.max_position_embeddings),
        draft_length=values.draft_length,
    )
    painter = Painter(color)
    chat = Chat(target, engine, params, sys.stdout, painter, values.system)
    piped = values.prompt is None and not sys.stdin.isatty()
    print(painter.dim("[compiling ...]"), file=sys.stderr)
    chat.warm_up(values.prompt or "Hi")
    drafts = system is not None and values.draft_length > 0
    if drafts and color:
        # Standard output of a pipe holds answers and nothing else.
        print(painter.key(), file=sys.stderr if piped else sys.stdout)
    if values.prompt is not None:
        print(chat.describe(chat.ask(values.prompt)), file=sys.stderr)
    elif piped:
        return answer_lines(chat, sys.stdin.buffer, sys.stderr)
    else:
        converse(chat, painter, sys.stdout)
    return 0


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    command_flags.define_source()
    flags.DEFINE_bool("ngram", False, "Draft by prompt lookup, for a target without a trained drafter.")
    flags.DEFINE_string("prompt", None, "Ask this and end; without it, chat, or answer each line of a pipe.")
    flags.DEFINE_string("system", None, "System message.")
    flags.DEFINE_integer("draft_length", 4, "Drafts a step; 0 is plain decoding.", lower_bound=0)
    flags.DEFINE_float("temperature", 0.0, "0 is greedy.")
    flags.DEFINE_integer("top_k", 0, "Keep the k likeliest tokens; 0 is off.")
    flags.DEFINE_float("top_p", 1.0, "Keep the likeliest tokens of this total probability; 1 is off.")
    flags.DEFINE_float("min_p", 0.0, "Keep tokens of at least this share of the largest probability; 0 is off.")
    flags.DEFINE_integer("seed", 0, "Seed of sampling.")
    flags.DEFINE_integer("max_new_tokens", 512, "Longest answer.")
    flags.DEFINE_integer("cache_length", 1024, "Longest conversation, in tokens.", lower_bound=2)
    flags.DEFINE_enum("color", "auto", list(COLOR_CHOICES), "Colour by origin; auto: on a terminal without NO_COLOR.")


if __name__ == "__main__":
    define_flags()
    run_command(main)
