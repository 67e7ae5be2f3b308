"""What goes into the engine and what comes out: sampling parameters, requests and completions."""

from __future__ import annotations

import dataclasses
import math
import numbers

FINISH_STOP = "stop"
FINISH_LENGTH = "length"
FINISH_CONTEXT = "context"
FINISH_ERROR = "error"  # followed by ": " and the reason

SOURCE_ACCEPTED = "accepted"
SOURCE_RECOVERED = "recovered"
SOURCE_BONUS = "bonus"
SOURCE_TARGET = "target"


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one request is decoded.

    Attributes:
        temperature: 0 is greedy (lowest index among equal maxima).
        top_k: keep the k most probable tokens; 0 is off, values above the vocabulary keep all.
        top_p: keep the smallest set of most probable tokens that reaches this probability; 1 is off.
        min_p: keep tokens with at least this fraction of the largest probability; 0 is off.
        seed: in [0, 2**32). The output is a function of prompt, parameters and seed alone.
        max_new_tokens: most tokens to generate; 0 returns an empty completion without a model call.
        stop_token_ids: tokens that end the text, beside the model's own end-of-text tokens. The token that
            ended it is the last of `Completion.token_ids`.
        stop_strings: texts that end the output. The text is cut before the string; the token ids end with
            the token that completed it, as they would when decoding one token at a time.
        ignore_eos: the model's own end-of-text tokens do not end the text (for measuring at equal lengths).
        num_speculative_tokens: draft length of this request, at most the engine's; None is the engine's, 0
            switches speculation off.

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    temperature: float | int = 0.0
    top_k: int = 0
    top_p: float | int = 1.0
    min_p: float | int = 0.0
    seed: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    num_speculative_tokens: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if not isinstance(value, numbers.Real) or isinstance(value, bool) or not math.isfinite(value):
                raise ValueError(f"`{name}` must be a finite number; got {value!r}")
        if self.temperature < 0:
            raise ValueError(f"`temperature` must be at least 0; got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be in (0, 1]; got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"`min_p` must be in [0, 1]; got {self.min_p}")
        _check_integer("top_k", self.top_k, 0, hint=" (0 switches it off)")
        _check_integer("seed", self.seed, 0, 2**32 - 1)
        _check_integer("max_new_tokens", self.max_new_tokens, 0)
        if self.num_speculative_tokens is not None:
            _check_integer("num_speculative_tokens", self.num_speculative_tokens, 0, hint=" (0 switches drafting off)")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0)
        if isinstance(self.stop_strings, str):
            raise ValueError(f"`stop_strings` must be a tuple of strings; got the string {self.stop_strings!r}")
        object.__setattr__(self, "stop_strings", tuple(self.stop_strings))
        for text in self.stop_strings:
            if not isinstance(text, str) or not text:
                raise ValueError(f"`stop_strings` must hold non-empty strings; got {text!r}")


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to complete.

    Attributes:
        id: name of the request, unique in a run.
        prompt_ids: token ids of the prompt, at least one.
        params: how to decode.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams = dataclasses.field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_ids", tuple(int(token) for token in self.prompt_ids))


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """What one target call did for one request. Tokens behind the end of the output count nowhere.

    Attributes:
        num_drafted: draft tokens that were verified (of them none behind the end).
        num_accepted: of these, accepted and committed.
        num_committed: tokens that entered the output: accepted ones and the recovered, bonus or plain one.
    """

    num_drafted: int
    num_accepted: int
    num_committed: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """The answer to a request.

    Attributes:
        request_id: name of the request.
        prompt_ids: its prompt.
        token_ids: generated tokens, the one that ended the output included.
        text: the generated text without special tokens, cut before a stop string.
        finish_reason: "stop" (stop token or string), "length" (`max_new_tokens`), "context" (the engine's
            cache length) or "error: " and the reason.
        steps: one record a target call.
        token_sources: for each token "accepted", "recovered", "bonus" or "target" (no draft in that call).
        seconds: time from the start of the prefill to the last token, prefill included.
        prefill_seconds: the part of it that the prefill took.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = FINISH_STOP
    steps: tuple[StepRecord, ...] = ()
    token_sources: tuple[str, ...] = ()
    seconds: float = 0.0
    prefill_seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the request ended with an error."""
        return self.finish_reason.startswith(FINISH_ERROR)


@dataclasses.dataclass(frozen=True)
class StreamEvent:
    """Newly committed tokens of one request.

    Attributes:
        request_id: name of the request.
        token_ids: the new tokens; may be empty in the last event.
        text: the text that became certain (text that could still turn into a stop string is held back).
        token_sources: as in `Completion`.
        completion: the whole answer, in a request's last event only.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    token_sources: tuple[str, ...]
    completion: Completion | None = None


def _check_integer(name: str, value: object, lowest: int, highest: int | None = None, *, hint: str = "") -> None:
    rule = f"at least {lowest}" if highest is None else f"in [{lowest}, {highest}]"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ValueError(f"`{name}` must be an integer{hint}; got {value!r}")
    if int(value) < lowest or (highest is not None and int(value) > highest):
        raise ValueError(f"`{name}` must be {rule}{hint}; got {value}")
