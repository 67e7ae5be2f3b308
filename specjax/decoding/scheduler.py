"""The host's side of a request: what was committed, where it ends, what the caller may see."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

from specjax.decoding import request as request_lib
from specjax.decoding import state as state_lib
from specjax.decoding.request import Completion, Request, SamplingParams, StepRecord, StreamEvent
from specjax.decoding.stopping import StopStrings
from specjax.models import ModelConfig
from specjax.text.tokenizer import StreamDecoder

_FINISH_REASONS = {
    state_lib.STOPPED: request_lib.FINISH_STOP,
    state_lib.OUT_OF_LENGTH: request_lib.FINISH_LENGTH,
    state_lib.OUT_OF_CONTEXT: request_lib.FINISH_CONTEXT,
    state_lib.NOT_FINITE: f"{request_lib.FINISH_ERROR}: the target's logits are not finite",
}


@dataclasses.dataclass(frozen=True)
class Limits:
    """What an engine can serve.

    Attributes:
        config: the target's configuration.
        cache_length: most tokens of a request, prompt included.
        draft_length: longest draft.
        max_stop_ids: most stop tokens of a request, the model's own included.
        has_tokenizer: whether text can be made.
    """

    config: ModelConfig
    cache_length: int
    draft_length: int
    max_stop_ids: int
    has_tokenizer: bool

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """All tokens that end a request, without repetition."""
        own = () if params.ignore_eos else self.config.eos_token_ids
        return tuple(dict.fromkeys((*own, *params.stop_token_ids)))

    def refusal(self, request: Request) -> str | None:
        """Why a request cannot be served, or None."""
        vocab_size = self.config.num_valid_tokens or self.config.vocab_size
        params = request.params
        if not request.prompt_ids:
            return "`prompt_ids` must have at least one token; got none"
        for name, token_ids in (("prompt_ids", request.prompt_ids), ("stop_token_ids", params.stop_token_ids)):
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    return f"`{name}` must be in [0, {vocab_size}), the target's vocabulary; got {token_id}"
        if len(request.prompt_ids) > self.cache_length:
            return (
                f"`prompt_ids` must fit into the context of {self.cache_length} tokens; got {len(request.prompt_ids)}"
            )
        if (params.num_speculative_tokens or 0) > self.draft_length:
            return (
                f"`num_speculative_tokens` must be at most the engine's draft length {self.draft_length}; "
                f"got {params.num_speculative_tokens}"
            )
        if len(self.stop_ids(params)) > self.max_stop_ids:
            return (
                f"`stop_token_ids` and the model's own must be at most {self.max_stop_ids}; "
                f"got {len(self.stop_ids(params))}"
            )
        if params.stop_strings and not self.has_tokenizer:
            return "`stop_strings` must be empty for a target without a tokenizer"
        return None

    def immediate(self, request: Request) -> Completion | None:
        """The completion of a request that needs no model call, or None."""
        reason = self.refusal(request)
        if reason is not None:
            return Completion(request.id, request.prompt_ids, finish_reason=f"{request_lib.FINISH_ERROR}: {reason}")
        if request.params.max_new_tokens == 0:
            return Completion(request.id, request.prompt_ids, finish_reason=request_lib.FINISH_LENGTH)
        if len(request.prompt_ids) == self.cache_length:
            return Completion(request.id, request.prompt_ids, finish_reason=request_lib.FINISH_CONTEXT)
        return None


class RunningRequest:
    """One request while it occupies a slot."""

    def __init__(self, request: Request, tokenizer: Any | None) -> None:
        self.request = request
        self.finished = False
        self.prefill_seconds = 0.0
        self._started = time.perf_counter()
        self._token_ids: list[int] = []
        self._sources: list[str] = []
        self._steps: list[StepRecord] = []
        self._decoder = None if tokenizer is None else StreamDecoder(tokenizer)
        self._stop = StopStrings(request.params.stop_strings)

    def prefilled(self) -> None:
        """Notes that the prompt is in the cache."""
        self.prefill_seconds = time.perf_counter() - self._started

    def take(self, tokens: Sequence[int], num_drafted: int, num_accepted: int, status: int) -> StreamEvent:
        """Adds what one target call committed.

        Args:
            tokens: committed tokens, the device's stop tests already applied.
            num_drafted: length of the draft in that call.
            num_accepted: how many of it were accepted, before any cut.
            status: the row's status after the call.

        Returns:
            What the caller may see now.
        """
        num_kept, cut = self._read_text(tokens)
        tokens = tokens[:num_kept]
        last = _last_source(num_drafted, num_accepted)
        sources = [request_lib.SOURCE_ACCEPTED if i < num_accepted else last for i in range(num_kept)]
        if tokens:
            if num_kept <= num_accepted:  # cut inside the draft: the rest of it counts nowhere
                num_drafted = num_accepted = num_kept
            self._steps.append(StepRecord(num_drafted, num_accepted, num_kept))
        self._token_ids.extend(tokens)
        self._sources.extend(sources)
        reason = request_lib.FINISH_STOP if cut else _FINISH_REASONS.get(status)
        self.finished = reason is not None
        if self.finished and not cut and self._decoder is not None:
            # What a half-finished character becomes at the end.
            self._stop.push(self._decoder.finish())
        text = self._stop.release(last=self.finished)
        completion = None if reason is None else self._complete(reason)
        return StreamEvent(self.request.id, tuple(tokens), text, tuple(sources), completion)

    def _read_text(self, tokens: Sequence[int]) -> tuple[int, bool]:
        """How many tokens remain, and whether a stop string cut them."""
        if self._decoder is None:
            return len(tokens), False
        if not self.request.params.stop_strings:
            self._stop.push(self._decoder.push(tokens))
            return len(tokens), False
        for index, token in enumerate(tokens):
            if self._stop.push(self._decoder.push([token])):
                return index + 1, True
        return len(tokens), False

    def _complete(self, reason: str) -> Completion:
        return Completion(
            request_id=self.request.id,
            prompt_ids=self.request.prompt_ids,
            token_ids=tuple(self._token_ids),
            text=self._stop.text,
            finish_reason=reason,
            steps=tuple(self._steps),
            token_sources=tuple(self._sources),
            seconds=time.perf_counter() - self._started,
            prefill_seconds=self.prefill_seconds,
        )


def _last_source(num_drafted: int, num_accepted: int) -> str:
    """Source of the token that a call adds to the accepted ones."""
    if num_drafted == 0:
        return request_lib.SOURCE_TARGET
    return request_lib.SOURCE_BONUS if num_accepted >= num_drafted else request_lib.SOURCE_RECOVERED
