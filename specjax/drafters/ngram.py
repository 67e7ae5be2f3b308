"""Prompt lookup: drafts what followed the latest earlier occurrence of the text's last tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.base import ToLaws, one_hot_proposal
from specjax.types import DraftTree, Proposal


@flax.struct.dataclass
class NgramState:
    """The committed text.

    Attributes:
        history: tokens, [B, S].
        count: how many of them are committed, [B].
    """

    history: Int[Array, "batch slots"]
    count: Int[Array, "batch"]


@dataclasses.dataclass(frozen=True)
class NgramDrafter:
    """Looks the text's last n tokens up in the text itself, longest n first, latest occurrence first.

    The continuation is copied token by token, so that it may run into its own copy: after "a b a b" the
    draft is "a b a b ...". A row without a match drafts nothing. Needs no parameters.

    Attributes:
        vocab_size: of the target.
        max_ngram: longest n.
        min_ngram: shortest n.

    Raises:
        ValueError: unless 1 <= `min_ngram` <= `max_ngram` and `vocab_size` >= 1.
    """

    vocab_size: int
    max_ngram: int = 3
    min_ngram: int = 1
    name: str = "ngram"
    deterministic: bool = True
    feature_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.vocab_size < 1:
            raise ValueError(f"`vocab_size` must be at least 1; got {self.vocab_size}")
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                "`min_ngram` must be at least 1 and at most `max_ngram`; "
                f"got min_ngram {self.min_ngram} and max_ngram {self.max_ngram}"
            )

    def init_state(self, batch: int, max_length: int, tree: DraftTree) -> NgramState:
        """An empty text for each row."""
        _check_tree(tree)
        return NgramState(
            history=jnp.zeros((batch, max_length), jnp.int32),
            count=jnp.zeros(batch, jnp.int32),
        )

    def begin(self, params: Any, state: NgramState, first_token: Int[Array, "batch"]) -> NgramState:
        """Starts the text with its first token."""
        return NgramState(history=state.history.at[:, 0].set(first_token), count=jnp.ones_like(state.count))

    def extend(
        self,
        params: Any,
        state: NgramState,
        *,
        tokens: Int[Array, "batch steps"],
        features: Float[Array, "batch steps width"],
        count: Int[Array, "batch"],
    ) -> NgramState:
        """Appends `count` tokens to each row's text."""
        steps = jnp.arange(tokens.shape[1], dtype=jnp.int32)
        # Padding goes out of range and is dropped.
        slots = jnp.where(steps < count[:, None], state.count[:, None] + steps, state.history.shape[1])
        rows = jnp.arange(tokens.shape[0], dtype=jnp.int32)[:, None]
        history = state.history.at[rows, slots].set(tokens.astype(jnp.int32), mode="drop")
        return NgramState(history=history, count=state.count + count)

    def propose(
        self,
        rng_keys: Key[Array, "batch"],
        params: Any,
        state: NgramState,
        *,
        last_token: Int[Array, "batch"],
        tree: DraftTree,
        max_depth: Int[Array, "batch"],
        to_laws: ToLaws,
    ) -> tuple[Proposal, NgramState]:
        """Copies the continuation of the best match; depth 0 where there is none."""
        _check_tree(tree)
        source, found = self._find(state)
        steps = jnp.arange(tree.max_depth, dtype=jnp.int32)
        period = jnp.maximum(state.count - source, 1)
        slots = source[:, None] + steps % period[:, None]
        drafts = jnp.take_along_axis(state.history, jnp.where(found[:, None], slots, 0), axis=1)
        depth = jnp.where(found, jnp.minimum(max_depth, tree.max_depth), 0)
        return one_hot_proposal(last_token, drafts, depth, tree, self.vocab_size), state

    def _find(self, state: NgramState) -> tuple[Int[Array, "batch"], Bool[Array, "batch"]]:
        """Where each row's continuation starts, and whether there is one."""
        num_slots = state.history.shape[1]
        slots = jnp.arange(num_slots, dtype=jnp.int32)
        source = jnp.zeros_like(state.count)
        matches = jnp.ones(state.history.shape, bool)
        for n in range(1, self.max_ngram + 1):
            # matches[b, s]: the n tokens before slot s are the last n tokens of the text.
            tail = jnp.take_along_axis(state.history, jnp.maximum(state.count - n, 0)[:, None], axis=1)
            shifted = jnp.pad(state.history, ((0, 0), (n, 0)))[:, :num_slots]
            matches &= (shifted == tail) & (slots >= n) & (slots < state.count[:, None])
            if n >= self.min_ngram:
                latest = jnp.max(jnp.where(matches, slots, 0), axis=1)
                source = jnp.where(latest > 0, latest, source)
        return source, source > 0


def _check_tree(tree: DraftTree) -> None:
    if tree.parent != tuple(range(-1, tree.num_nodes - 1)):
        raise ValueError(f"the ngram drafter drafts one chain; `num_drafts` must be 1, got the tree {tree.parent}")
