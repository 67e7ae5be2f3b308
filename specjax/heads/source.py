"""What heads are made from, and what they hand to the training loss."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import numpy as np
from jaxtyping import Array, Float, Int

HEAD_INITS = ("random", "svd", "frequency_svd", "activation_aware")


@dataclasses.dataclass(frozen=True)
class HeadSource:
    """A dense head and what is known of the data: all that any head's start can depend on.

    Attributes:
        weight: dense head to start from, the target's or that of a trained drafter, [d, V]; None for a random start.
        method: how factors start, one of `HEAD_INITS`.
        covariance: second moment of the head's inputs, [d, d].
        answer_counts: how often each token occurs in the target's own answers, [V].
        corpus_counts: how often it occurs in a text that the target did not write, [V].
        num_valid_tokens: ids at or above it are padded rows; None means that all are tokens.
        special_ids: control tokens.
        byte_ids: tokens of one raw byte each.
        backbone_flops: operations of the drafter without its head for one token.

    Raises:
        ValueError: if the method is unknown or an array has the wrong shape.
    """

    weight: Any = None
    method: str = "random"
    covariance: Float[np.ndarray, "rows columns"] | None = None
    answer_counts: Int[np.ndarray, "vocab"] | None = None
    corpus_counts: Int[np.ndarray, "vocab"] | None = None
    num_valid_tokens: int | None = None
    special_ids: tuple[int, ...] = ()
    byte_ids: tuple[int, ...] = ()
    backbone_flops: int = 0

    def __post_init__(self) -> None:
        if self.method not in HEAD_INITS:
            raise ValueError(f"`head_init` must be one of {HEAD_INITS}; got {self.method!r}")

    def dense(self, hidden_size: int, vocab_size: int) -> np.ndarray:
        """The dense head as a float32 NumPy array [d, V].

        Raises:
            ValueError: if there is none, or it has another shape.
        """
        if self.weight is None:
            raise ValueError("`weight` must be given for a head that is made from a dense one; got None")
        if tuple(self.weight.shape) != (hidden_size, vocab_size):
            raise ValueError(
                f"the dense head must have shape {[hidden_size, vocab_size]}; got {list(self.weight.shape)}"
            )
        return np.asarray(self.weight).astype(np.float32, copy=False)


@flax.struct.dataclass
class LossPart:
    """One term of the training loss: a law over some columns, and what it must imitate.

    The law is softmax(states @ matrix). With `columns`, column j is token columns[j] and the other tokens have no
    column; with `classes`, column j stands for all tokens of class j. Without both, column j is token j.

    Attributes:
        states: inputs of the last product, [S, ..., k], one for each draft step S and entry.
        matrix: last matrix, [k, M].
        columns: token of each column, [M], ascending.
        classes: class of each token, [V].
        teacher_states: states of another head to imitate in the place of the target, [S, ..., d].
        teacher_matrix: its matrix, [d, V].
        weight: factor of the term.
        objective: name of the loss; "" is the one that the run asks for.
        num_top: for "top_classes", how many of the target's most likely tokens make their classes positive.
    """

    states: Float[Array, "steps *entries inner"]
    matrix: Float[Array, "inner columns"]
    columns: Int[Array, "columns"] | None = None
    classes: Int[Array, "vocab"] | None = None
    teacher_states: Float[Array, "steps *entries width"] | None = None
    teacher_matrix: Float[Array, "width vocab"] | None = None
    weight: float = flax.struct.field(pytree_node=False, default=1.0)
    objective: str = flax.struct.field(pytree_node=False, default="")
    num_top: int = flax.struct.field(pytree_node=False, default=1)
