"""Where two greedy texts part, and how near a tie the target was there."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import KVCache, ModelConfig, compute_logits, forward


@dataclasses.dataclass(frozen=True)
class Divergence:
    """First difference between plain and speculative decoding of one prompt.

    Attributes:
        position: index of the first differing new token.
        plain_token: token of plain decoding there; None where its text had ended.
        speculative_token: token of speculative decoding there; None where its text had ended.
        top_tokens: the target's two likeliest tokens there, from one forward over the whole prefix.
        gap: difference of their logits. Float32 rounding may flip a gap of about 1e-4 or less; a wrong rule
            does not care how large it is.
    """

    position: int
    plain_token: int | None
    speculative_token: int | None
    top_tokens: tuple[int, int]
    gap: float

    def to_json(self) -> dict[str, Any]:
        """Plain dict."""
        return dataclasses.asdict(self) | {"top_tokens": list(self.top_tokens)}


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """Index of the first difference, the shorter length included; None for equal sequences."""
    for index, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return index
    return None if len(left) == len(right) else min(len(left), len(right))


def find_divergence(
    target: Any, prompt_ids: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Divergence | None:
    """Compares the new tokens of two greedy runs.

    Args:
        target: with `params` and `config`.
        prompt_ids: the common prompt.
        plain: new tokens of plain decoding.
        speculative: new tokens of speculative decoding.

    Returns:
        None if they are equal, else the first difference with the gap of the target's two top logits.
    """
    position = first_difference(plain, speculative)
    if position is None:
        return None
    logits = next_logits(target, [*prompt_ids, *plain[:position]])
    second, first = np.argsort(logits, kind="stable")[-2:]
    return Divergence(
        position=position,
        plain_token=plain[position] if position < len(plain) else None,
        speculative_token=speculative[position] if position < len(speculative) else None,
        top_tokens=(int(first), int(second)),
        gap=float(logits[first] - logits[second]),
    )


def next_logits(target: Any, token_ids: Sequence[int]) -> np.ndarray:
    """The target's logits after a text, [V] float32, from one forward over all of it.

    Raises:
        ValueError: if the text is empty.
    """
    if not token_ids:
        raise ValueError("`token_ids` must hold at least one token; got none")
    # Powers of two keep the number of compilations small.
    length = max(16, 1 << (len(token_ids) - 1).bit_length())
    padded = np.zeros((1, length), np.int32)
    padded[0, : len(token_ids)] = token_ids
    logits = _last_logits(target.params, target.config, jnp.asarray(padded), jnp.int32(len(token_ids) - 1))
    return np.asarray(logits)


@functools.partial(jax.jit, static_argnames="config")
def _last_logits(params: Any, config: ModelConfig, tokens: jax.Array, last: jax.Array) -> jax.Array:
    cache = KVCache.zeros(config, 1, tokens.shape[1], params["embed_tokens"].dtype)
    hidden = forward(params, config, tokens, cache, jnp.zeros((1,), jnp.int32)).hidden
    return compute_logits(params, config, jnp.take(hidden[0], last, axis=0))
