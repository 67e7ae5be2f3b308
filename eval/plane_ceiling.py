"""How much of the target's law a truncated head can reach at all: the ceiling of its acceptance.

A token that a head cannot draft has probability 0 under the draft's law, so that acceptance at a position, the sum over
tokens of min(p, q), is at most the target's mass over the tokens that can be drafted. At temperature 0 that mass is 1
or 0. It is averaged over all positions of the target's own answers; a head whose set depends on the state is asked at
each of them for the first draft that it would make there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.plane_heads import PlaneHead
from specjax.decoding import LawParams, to_log_laws
from specjax.drafters.base import begin
from specjax.heads import get_head
from specjax.models import KVCache, ModelConfig, compute_logits, forward
from specjax.types import DraftTree

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


class Ceilings:
    """Masses over what several heads can draft, by one forward of the target over each answer."""

    def __init__(
        self, target: Any, heads: Sequence[PlaneHead], supports: Mapping[str, str | None], *, length: int, most: int
    ) -> None:
        """Keeps the sets.

        Args:
            target: a loaded target.
            heads: truncated heads, by `kind_of_support`.
            supports: that kind, by name.
            length: tokens of the longest prompt with its answer; all are padded to it.
            most: tokens of the longest answer.
        """
        self._target, self._length, self._most = target, length, most
        self._fixed = [head for head in heads if supports[head.name] == FIXED]
        self._moving = [head for head in heads if supports[head.name] == BY_STATE]
        sets = np.zeros((len(self._fixed), target.config.vocab_size), np.float32)
        for row, head in zip(sets, self._fixed, strict=True):
            row[np.asarray(get_head(head.config.kind).support(head.system.params["head"]))] = 1.0
        self._sets = jnp.asarray(sets)
        # Drafters of one directory read the same layers.
        self._layers = tuple(self._moving[0].pair[0].feature_layers) if self._moving else ()

    def masses(self, prompt_ids: Sequence[int], answer_ids: Sequence[int], temperature: float) -> dict[str, float]:
        """Sum over an answer's positions of the mass that each head can draft, by mark."""
        tokens = np.zeros((1, self._length), np.int32)
        text = [*prompt_ids, *answer_ids]
        tokens[0, : len(text)] = text
        at = (self._target.params, jnp.asarray(tokens), jnp.int32(len(prompt_ids) - 1))
        laws, features = _target_pass(
            self._target.config, self._layers, self._most, *at, jnp.int32(len(answer_ids)), jnp.float32(temperature)
        )
        by_set = np.asarray((laws @ self._sets.T).sum(axis=0))
        masses = dict(zip((head.mark for head in self._fixed), map(float, by_set), strict=True))
        for head in self._moving:
            drafter, params = head.pair
            masses[head.mark] = float(_drafted_mass(drafter, params, *at[1:], laws, features))
        return masses


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _target_pass(
    config: ModelConfig,
    layers: tuple[int, ...],
    most: int,
    params: Any,
    tokens: jax.Array,
    first: jax.Array,
    count: jax.Array,
    temperature: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The target's laws of an answer's tokens, [most, V] with zeros behind its end, and features [1, S, F]."""
    length = tokens.shape[1]
    cache = KVCache.zeros(config, 1, length, params["embed_tokens"].dtype)
    output = forward(params, config, tokens, cache, jnp.zeros(1, jnp.int32), feature_layers=layers)
    steps = jnp.arange(most, dtype=jnp.int32)
    hidden = output.hidden[0, jnp.minimum(first + steps, length - 1)]
    laws = dataclasses.replace(LawParams.greedy(1), temperature=temperature[None])
    log_laws = to_log_laws(compute_logits(params, config, hidden)[None], laws)[0]
    return jnp.where(steps[:, None] < count, jnp.exp(log_laws), 0.0), output.features


@functools.partial(jax.jit, static_argnums=0)
def _drafted_mass(
    drafter: Any,
    params: Any,
    tokens: jax.Array,
    first: jax.Array,
    laws: jax.Array,
    features: jax.Array,
) -> jax.Array:
    """Mass of the laws, zero behind the answer's end, over what the drafter could draft first; summed."""
    tree = DraftTree.chains(1, 1)
    length = tokens.shape[1]
    # At temperature 0 a draft's law is one token; at 1 it shows all that could be drafted.
    open_laws = dataclasses.replace(LawParams.greedy(1), temperature=jnp.ones(1, jnp.float32))
    state = drafter.init_state(1, length + tree.num_nodes, tree)
    state = begin(drafter, params, state, tokens[:, 0])
    state = drafter.extend(params, state, tokens=tokens[:, 1:], features=features[:, :-1], count=first[None])

    def ask(state: Any, at: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        step, law = at
        here = jnp.minimum(first + step, length - 2)
        proposal, state = drafter.propose(
            jax.random.key(0)[None],
            params,
            state,
            last_token=tokens[:, here],
            tree=tree,
            max_depth=jnp.ones(1, jnp.int32),
            to_laws=lambda logits: to_log_laws(logits, open_laws),
        )
        state = drafter.extend(
            params,
            state,
            tokens=jax.lax.dynamic_slice_in_dim(tokens, here + 1, 1, axis=1),
            features=jax.lax.dynamic_slice_in_dim(features, here, 1, axis=1),
            count=jnp.ones(1, jnp.int32),
        )
        return state, jnp.where(jnp.isfinite(proposal.draft_log_laws[0, 0]), law, 0.0).sum()

    _, masses = jax.lax.scan(ask, state, (jnp.arange(laws.shape[0], dtype=jnp.int32), laws))
    return masses.sum()


def ceiling_rows(masses: Mapping[str | int, tuple[float, int]]) -> list[dict[str, Any]]:
    """Masses and counts by question as rows for the log."""
    return [{"question_id": name, "mass": mass, "num_positions": count} for name, (mass, count) in masses.items()]
