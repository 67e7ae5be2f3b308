"""How much of the target's law a truncated head can reach at all: the ceiling of its acceptance.

A token that a head cannot draft has probability 0 under the draft's law, so that acceptance at a position, the sum over
tokens of min(p, q), is at most the target's mass over the tokens that can be drafted. At temperature 0 that mass is 1
or 0. For a head with a fixed set it is averaged over all positions of the target's own answers; for one whose set
depends on the state over the first draft of every step of speculative decoding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.dissection import StepParts
from eval.plane_heads import PlaneHead
from specjax.decoding import LawParams, to_log_laws
from specjax.drafters.base import empty_proposal
from specjax.heads import get_head
from specjax.models import KVCache, ModelConfig, compute_logits, forward

FIXED = "fixed"
BY_STATE = "by state"


def kind_of_support(head: PlaneHead, num_valid_tokens: int | None) -> str | None:
    """Whether a head can draft only a fixed set of tokens, only a set that depends on the state, or all (None)."""
    implementation, params = get_head(head.config.kind), head.system.params["head"]
    if implementation.support(params) is not None:
        return FIXED
    hidden = jax.random.normal(jax.random.key(0), (1, head.config.hidden_size), jnp.float32)
    logits = np.asarray(implementation.logits(params, hidden, head.config))[:, :num_valid_tokens]
    return None if np.isfinite(logits).all() else BY_STATE


class FixedCeilings:
    """Masses over the fixed sets of several heads, by one forward of the target over each answer."""

    def __init__(self, target: Any, heads: Sequence[PlaneHead], *, length: int, max_new_tokens: int) -> None:
        """Keeps the sets.

        Args:
            target: a loaded target.
            heads: heads with a fixed set.
            length: tokens of the longest prompt with its answer; all are padded to it.
            max_new_tokens: longest answer.
        """
        self._target, self._length, self._max_new_tokens = target, length, max_new_tokens
        self._marks = [head.mark for head in heads]
        sets = np.zeros((len(heads), target.config.vocab_size), np.float32)
        for row, head in zip(sets, heads, strict=True):
            row[np.asarray(get_head(head.config.kind).support(head.system.params["head"]))] = 1.0
        self._sets = jnp.asarray(sets)

    def masses(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], temperature: float) -> dict[str, float]:
        """Sum over an answer's positions of the mass inside each head's set, by mark."""
        tokens = np.zeros((1, self._length), np.int32)
        text = [*prompt_ids, *answer_ids]
        tokens[0, : len(text)] = text
        masses = _masses(
            self._target.config,
            self._max_new_tokens,
            self._target.params,
            jnp.asarray(tokens),
            jnp.int32(len(prompt_ids) - 1),
            jnp.int32(len(answer_ids)),
            jnp.float32(temperature),
            self._sets,
        )
        return dict(zip(self._marks, map(float, np.asarray(masses)), strict=True))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _masses(
    config: ModelConfig,
    max_new_tokens: int,
    params: Any,
    tokens: jax.Array,
    first: jax.Array,
    count: jax.Array,
    temperature: jax.Array,
    sets: jax.Array,
) -> jax.Array:
    length = tokens.shape[1]
    cache = KVCache.zeros(config, 1, length, params["embed_tokens"].dtype)
    hidden = forward(params, config, tokens, cache, jnp.zeros(1, jnp.int32)).hidden[0]
    places = jnp.minimum(first + jnp.arange(max_new_tokens, dtype=jnp.int32), length - 1)
    laws = dataclasses.replace(LawParams.greedy(1), temperature=temperature[None])
    log_laws = to_log_laws(compute_logits(params, config, hidden[places])[None], laws)[0]
    inside = jnp.exp(log_laws) @ sets.T
    return jnp.where(jnp.arange(max_new_tokens)[:, None] < count, inside, 0.0).sum(axis=0)


def moving_mass(
    target: Any,
    head: PlaneHead,
    prompt_ids: Sequence[int],
    temperature: float,
    *,
    num_steps: int,
    cache_length: int,
) -> tuple[float, int]:
    """Mass over the tokens that a head can draft first, summed over steps of decoding one prompt.

    Args:
        target: a loaded target.
        head: its set may depend on the state.
        prompt_ids: the prompt.
        temperature: of the target's law and of the text that is decoded.
        num_steps: steps; fewer in a short context.
        cache_length: tokens that caches hold, at least the prompt's and two for each step.

    Returns:
        The sum and the number of steps.
    """
    drafter, drafter_params = head.pair
    parts = StepParts(target.config, drafter, 1)
    room = target.config.max_position_embeddings - len(prompt_ids)
    num_steps = max(1, min(num_steps, room // 2 - 1))
    state = parts.start(target.params, drafter_params, prompt_ids, 1, cache_length)
    # At temperature 0 a draft's law is one token; at 1 it shows all that could be drafted.
    open_laws = dataclasses.replace(LawParams.greedy(1), temperature=jnp.ones(1, jnp.float32))
    laws = dataclasses.replace(LawParams.greedy(1), temperature=jnp.full(1, temperature, jnp.float32))
    total, drafter_state, cache = 0.0, state.drafter_state, state.cache
    last, length, keys = state.last_token, state.length, state.rng_keys
    for step in range(num_steps):
        step_keys = jax.vmap(lambda key, number=step: jax.random.fold_in(key, number))(keys)
        proposal, drafter_state = parts.propose(drafter_params, drafter_state, step_keys, last, open_laws)
        logits, features, cache = parts.verify_forward(target.params, cache, proposal.tokens, length)
        law = np.exp(np.asarray(to_log_laws(logits[:, :1], laws))[0, 0])
        total += float(law[np.isfinite(np.asarray(proposal.draft_log_laws)[0, 0])].sum())
        # The text follows the target alone, so that all heads are asked at the same places.
        plain = empty_proposal(last, parts.tree, target.config.vocab_size)
        committed, count, last, length = parts.decide(step_keys, plain, logits, laws, length)
        drafter_state = parts.extend(drafter_params, drafter_state, committed, features, count)
    return total, num_steps


def ceiling_rows(masses: Mapping[str | int, tuple[float, int]]) -> list[dict[str, Any]]:
    """Masses and counts by question as rows for the log."""
    return [{"question_id": name, "mass": mass, "num_positions": count} for name, (mass, count) in masses.items()]
