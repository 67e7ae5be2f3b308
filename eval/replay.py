"""A drafter for checks: it drafts known answers, each token wrong with a chosen probability."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Key

from specjax.drafters.base import ToLaws
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
        known, drafts = params["known"], params["drafts"]
        slots = jnp.arange(state.history.shape[1], dtype=jnp.int32)
        fits = jnp.pad(known, ((0, 0), (0, max(0, len(slots) - known.shape[1]))), constant_values=-1)[:, : len(slots)]
        same = (fits == state.history[:, None]) | (slots >= state.count[:, None, None])
        same = same.all(axis=2)
        text, found = jnp.argmax(same, axis=1), same.any(axis=1)
        ahead = state.count[:, None] + jnp.arange(tree.max_depth, dtype=jnp.int32)
        tokens = jnp.where(
            ahead < drafts.shape[1], drafts[text[:, None], jnp.minimum(ahead, drafts.shape[1] - 1)], jnp.int32(0)
        )
        # One-hot at the drafted token.
        laws = jnp.where(jnp.arange(self.vocab_size, dtype=jnp.int32) == tokens[..., None], jnp.float32(0), -jnp.inf)
        proposal = Proposal(
            tokens=jnp.concatenate((last_token[:, None].astype(jnp.int32), tokens), axis=1),
            draft_log_laws=laws,
            max_depth=jnp.where(found, jnp.minimum(max_depth, tree.max_depth), 0).astype(jnp.int32),
            tree=tree,
        )
        return proposal, state


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
    if not 0 <= error_rate < 1:
        raise ValueError(f"`error_rate` must be at least 0 and below 1; got {error_rate}")
    random = np.random.default_rng(seed)
    known = np.full((len(texts), max(map(len, texts))), -1, np.int32)
    for row, text in enumerate(texts):
        known[row, : len(text)] = text
    others = (known + random.integers(1, vocab_size, known.shape)) % vocab_size
    drafts = np.where(random.random(known.shape) < error_rate, others, np.maximum(known, 0))
    return {"known": jnp.asarray(known), "drafts": jnp.asarray(drafts, jnp.int32)}
