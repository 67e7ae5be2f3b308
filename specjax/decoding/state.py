"""The engine's device state: one pytree whose every leaf has the slots as its leading axis."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt

from specjax.decoding.laws import LawParams
from specjax.models import KVCache

RUNNING = 0
STOPPED = 1  # a stop token was committed
OUT_OF_LENGTH = 2  # `max_new_tokens` are committed
OUT_OF_CONTEXT = 3  # the row's cache is full
NOT_FINITE = 4  # the target gave no usable logits

NO_TOKEN = -1


@flax.struct.dataclass
class EngineState:
    """All that a step reads and writes; B slots.

    The text of a row has `length` + 1 committed tokens: the keys of the first `length` are in the cache,
    `last_token` is the one after them.

    Attributes:
        cache: the target's keys and values, [B, KV, S, head_dim] a layer.
        drafter_state: the drafter's memory.
        carry: the memory of each verifier of the program, reset with the row.
        last_token: last committed token, [B].
        length: committed tokens in the cache, [B].
        remaining: tokens that the row may still commit, [B].
        draft_length: longest draft of the row, [B]; 0 is plain decoding.
        stop_ids: tokens that end the row, padded with -1, [B, M].
        laws: temperature and truncation, [B] each.
        seed: of the row's request, [B].
        done: the row is finished or empty and commits nothing, [B].
    """

    cache: KVCache
    drafter_state: Any
    carry: Any
    last_token: Int[Array, "batch"]
    length: Int[Array, "batch"]
    remaining: Int[Array, "batch"]
    draft_length: Int[Array, "batch"]
    stop_ids: Int[Array, "batch stops"]
    laws: LawParams
    seed: UInt[Array, "batch"]
    done: Bool[Array, "batch"]

    def with_settings(self, settings: RowSettings) -> EngineState:
        """One row with what another request of the same prompt asks for."""
        settings = RowSettings(*map(jnp.asarray, settings))
        return dataclasses.replace(
            self,
            remaining=settings.remaining,
            draft_length=settings.draft_length,
            stop_ids=settings.stop_ids,
            laws=LawParams(settings.temperature, settings.top_k, settings.top_p, settings.min_p),
            seed=settings.seed,
        )


class RowSettings(NamedTuple):
    """What a request brings to its row, as NumPy or JAX arrays; every field is [1] but the last, [1, M].

    Named as in `EngineState` and `LawParams`.
    """

    remaining: Any
    draft_length: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    stop_ids: Any


def insert_row(state: EngineState, row: EngineState, slot: Int[Array, ""]) -> EngineState:
    """Replaces one slot by a state of one row, whatever the leaves are.

    Args:
        state: B slots.
        row: one slot; leaves [1, ...], in no direction longer than those of `state`. What a shorter leaf lacks
            becomes zeros, so that nothing of the slot's last request stays.
        slot: index in [0, B), [].

    Returns:
        The state with the row in place.
    """

    def insert(whole: Array, part: Array) -> Array:
        missing = [(0, wide - narrow) for wide, narrow in zip(whole.shape[1:], part.shape[1:], strict=True)]
        full = jnp.pad(part.astype(whole.dtype), [(0, 0), *missing])
        return jax.lax.dynamic_update_slice_in_dim(whole, full, slot, axis=0)

    return jax.tree.map(insert, state, row)
