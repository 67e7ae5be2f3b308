"""What was measured: one record a (system, turn), one timing a (system, group of turns decoded side by side)."""

from __future__ import annotations

import dataclasses

from specjax.decoding.request import Completion

PLAIN = "plain"


@dataclasses.dataclass(frozen=True)
class Variant:
    """One way of decoding.

    Attributes:
        system: name of the drafter, or "plain".
        draft_length: drafts a step, 0 for plain decoding.
        temperature: of sampling.
    """

    system: str
    draft_length: int
    temperature: float

    @property
    def is_plain(self) -> bool:
        """Whether nothing is drafted."""
        return self.system == PLAIN

    @property
    def label(self) -> str:
        """Short name, as in tables: "plain", "slim L=4"."""
        return self.system if self.is_plain else f"{self.system} L={self.draft_length}"

    @property
    def model_id(self) -> str:
        """Name in answer files: unique within a result."""
        return f"{self.system}-L{self.draft_length}-T{self.temperature:g}"


@dataclasses.dataclass(frozen=True)
class TurnRecord:
    """One answer.

    Attributes:
        question_id: the conversation.
        category: its kind.
        turn: 0-based turn within the conversation.
        group: the group it was decoded in.
        completion: the engine's completion: tokens, sources, steps, reason, times.
    """

    question_id: str | int
    category: str
    turn: int
    group: int
    completion: Completion

    @property
    def key(self) -> tuple[str | int, int]:
        """The (question, turn) that records of two variants share."""
        return self.question_id, self.turn


@dataclasses.dataclass(frozen=True)
class GroupTiming:
    """Times of one group, summed over its turns and repetitions.

    Attributes:
        group: index.
        category: the kind that all its questions have.
        prefill_seconds: feeding the prompts.
        decode_seconds: the rest; all new tokens come in it.
        num_tokens: new tokens.
        num_calls: calls of the engine's step.
    """

    group: int
    category: str
    prefill_seconds: float
    decode_seconds: float
    num_tokens: int
    num_calls: int

    @property
    def wall_seconds(self) -> float:
        """Prefill and decoding together."""
        return self.prefill_seconds + self.decode_seconds
