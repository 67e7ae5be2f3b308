"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.types import DraftTree, Proposal

State = Any
"""A drafter's memory: a pytree whose every leaf has the batch as its leading axis."""

ToLaws = Callable[[Float[Array, "batch nodes vocab"]], Float[Array, "batch nodes vocab"]]
"""Turns logits [B, n, V] into log laws by the rows' temperature and truncation."""


@runtime_checkable
class Drafter(Protocol):
    """A draft model's pure functions; the object itself is a frozen, hashable configuration.

    A row of the state belongs to one request. The engine makes an empty state, tells it the first token of
    the prompt (`begin`, where the drafter has that method), feeds the committed tokens (`extend`, the prompt
    first) and asks for drafts (`propose`). Between calls the state equals what a fresh run over the committed
    tokens would give: what `propose` wrote for drafts that were not accepted is overwritten or never read.

    With n tokens fed, tokens 0 to n of the text are known, and token n is the last committed one, whose key
    is not in the target's cache yet. In `extend` the features of position i come with token i + 1.

    Attributes:
        name: for reports.
        deterministic: drafts are no random draws, and their laws are one-hot.
        feature_layers: layers of the target whose outputs `extend` needs; () is none.
    """

    name: str
    deterministic: bool
    feature_layers: tuple[int, ...]

    def init_state(self, batch: int, max_length: int, tree: DraftTree) -> State:
        """An empty state.

        Args:
            batch: rows B.
            max_length: slots that the engine may touch in a row, in tokens: the longest text, plus one
                packed proposal behind it.
            tree: shape of all proposals.

        Returns:
            The state; every leaf is [B, ...].

        Raises:
            ValueError: if the drafter cannot hold `max_length` positions or cannot draft such a tree.
        """
        ...

    def extend(
        self,
        params: Any,
        state: State,
        *,
        tokens: Int[Array, "batch steps"],
        features: Float[Array, "batch steps width"],
        count: Int[Array, "batch"],
    ) -> State:
        """Feeds committed tokens.

        Args:
            params: the drafter's parameters.
            state: its state.
            tokens: committed tokens after those fed before, [B, D]; row b has `count[b]`, then padding.
            features: target features of the position before each token, [B, D, F]; F = 0 without layers.
            count: how many are real, [B]; 0 leaves a row's state unchanged in effect.

        Returns:
            The new state.
        """
        ...

    def propose(
        self,
        rng_keys: Key[Array, "batch"],
        params: Any,
        state: State,
        *,
        last_token: Int[Array, "batch"],
        tree: DraftTree,
        max_depth: Int[Array, "batch"],
        to_laws: ToLaws,
    ) -> tuple[Proposal, State]:
        """Drafts continuations.

        Args:
            rng_keys: one key a row, [B]; consumed.
            params: the drafter's parameters.
            state: its state.
            last_token: last committed token, [B].
            tree: static shape of the proposal.
            max_depth: most draft tokens a row may use, [B]; a drafter may lower it, never raise it.
            to_laws: makes the laws that tokens must be drawn from.

        Returns:
            A batched proposal (tokens [B, N+1], laws [B, num_internal, V], depth [B]) and the state.
        """
        ...


def begin(drafter: Drafter, params: Any, state: State, first_token: Int[Array, "batch"]) -> State:
    """Tells a fresh state the first token of the text, [B], which `extend` never brings.

    Drafters that work on (features, next token) pairs have no use for it; those that read the text itself
    (prompt lookup, a small language model) define `begin(params, state, first_token) -> state`.
    """
    method = getattr(drafter, "begin", None)
    return state if method is None else method(params, state, first_token)


def prepare(drafter: Drafter, params: Any) -> Any:
    """Parameters as the drafter wants them for decoding on this process's platform.

    Drafters whose head has a fused kernel there define `prepare(params) -> params`; for others they stay as they are.
    """
    method = getattr(drafter, "prepare", None)
    return params if method is None else method(params)


def one_hot_proposal(
    last_token: Int[Array, "batch"],
    drafts: Int[Array, "batch depth"],
    max_depth: Int[Array, "batch"],
    tree: DraftTree,
    vocab_size: int,
) -> Proposal:
    """A chain of tokens that are no random draws, each with a one-hot law; rows use their first `max_depth` ones."""
    tokens = jnp.arange(vocab_size, dtype=jnp.int32)
    return Proposal(
        tokens=jnp.concatenate((last_token[:, None].astype(jnp.int32), drafts), axis=1),
        draft_log_laws=jnp.where(tokens == drafts[..., None], jnp.float32(0), -jnp.inf),
        max_depth=max_depth.astype(jnp.int32),
        tree=tree,
    )


def empty_proposal(last_token: Int[Array, "batch"], tree: DraftTree, vocab_size: int) -> Proposal:
    """A proposal without drafts: every node below the root is absent."""
    batch = last_token.shape[0]
    root = last_token[:, None].astype(jnp.int32)
    return Proposal(
        tokens=jnp.pad(root, ((0, 0), (0, tree.num_nodes - 1))),
        draft_log_laws=jnp.zeros((batch, len(tree.internal), vocab_size), jnp.float32),
        max_depth=jnp.zeros(batch, jnp.int32),
        tree=tree,
    )
