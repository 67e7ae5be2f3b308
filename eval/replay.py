"""A drafter for checks: it drafts known answers, each token wrong with a chosen probability."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from specjax.drafters.base import ToLaws, one_hot_proposal
from specjax.drafters.ngram import NgramDrafter, NgramState
from specjax.types import DraftTree, Proposal


@dataclasses.dataclass(frozen=True)
class ReplayDrafter(NgramDrafter):
    """Drafts what a known text says next; a row whose text is none of the known ones drafts nothing.

    A trained drafter seldom has more than three drafts accepted, so the ends of long blocks are hardly ever kept with
    it. With this one every number of accepted drafts occurs, as often as `error_rate` of `replay_texts` wants, and
    drafts go on behind the end of the text. It keeps the committed text as prompt lookup does.
    """

    name: str = "replay"

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
        """Copies the known text's next tokens; depth 0 where no known text begins as the row does."""
        slots = jnp.arange(state.history.shape[1], dtype=jnp.int32)
        known = params["known"].at[:, slots].get(mode="fill", fill_value=-1)
        same = ((known == state.history[:, None]) | (slots >= state.count[:, None, None])).all(axis=2)
        text, found = jnp.argmax(same, axis=1), same.any(axis=1)
        ahead = state.count[:, None] + jnp.arange(tree.max_depth, dtype=jnp.int32)
        drafts = params["drafts"].at[text[:, None], ahead].get(mode="fill", fill_value=0)
        depth = jnp.where(found, jnp.minimum(max_depth, tree.max_depth), 0)
        return one_hot_proposal(last_token, drafts, depth, tree, self.vocab_size), state


def check_error_rate(name: str, value: float) -> None:
    """Refuses what is no share of wrong tokens.

    Args:
        name: of the setting, for the message.
        value: what it was given.

    Raises:
        ValueError: unless 0 <= `value` < 1.
    """
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` must be at least 0 and below 1; got {value}")


def replay_texts(
    texts: Sequence[Sequence[int]], *, error_rate: float, vocab_size: int, seed: int = 0
) -> dict[str, Int[Array, "texts slots"]]:
    """Parameters of a `ReplayDrafter`.

    Args:
        texts: token ids of each known text, prompt and answer.
        error_rate: probability that a draft is another token, uniform over those.
        vocab_size: of the target, V.
        seed: of the errors; which tokens are wrong is fixed, so that every run drafts the same.

    Returns:
        `known`: the texts, [T, S], -1 behind their ends; `drafts`: what is drafted at each position, [T, S].

    Raises:
        ValueError: without texts, or unless 0 <= `error_rate` < 1.
    """
    if not texts:
        raise ValueError("`texts` must hold at least one text")
    check_error_rate("error_rate", error_rate)
    random = np.random.default_rng(seed)
    known = np.full((len(texts), max(map(len, texts))), -1, np.int32)
    for row, text in enumerate(texts):
        known[row, : len(text)] = text
    others = (known + random.integers(1, vocab_size, known.shape)) % vocab_size
    drafts = np.where(random.random(known.shape) < error_rate, others, np.maximum(known, 0))
    return {"known": jnp.asarray(known), "drafts": jnp.asarray(drafts, jnp.int32)}
