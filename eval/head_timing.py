"""What a draft head costs: alone on rotated buffers, and inside the drafter by taking it away."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from eval.timing import Timing, time_interleaved
from specjax.drafters.eagle3 import Eagle3Drafter
from specjax.heads.base import BaseHead, HeadConfig, get_head, register_head
from specjax.sampling import lowest_argmax

NO_HEAD = "none (timing only)"
FULL = "full"


class _NoHead(BaseHead):
    """Logits that cost no weights: one number of the hidden state plus the token's id.

    They depend on the hidden state and differ from token to token, so that nothing of the drafter or of the sampling
    behind the head can be optimised away.
    """

    def init(self, rng_key: Any, config: HeadConfig, dtype: Any = jnp.float32) -> dict[str, Any]:
        return {"slope": jnp.linspace(0.0, 1.0, config.vocab_size, dtype=jnp.float32)}

    def logits(self, params: dict[str, Any], hidden: Any, config: HeadConfig | None = None, position: int = 0) -> Any:
        return hidden[..., :1].astype(jnp.float32) + params["slope"]

    def num_params(self, config: HeadConfig) -> int:
        return 0

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        return 0

    def flops(self, config: HeadConfig, tokens: int) -> int:
        return 0


def without_head(drafter: Eagle3Drafter, params: Mapping[str, Any]) -> tuple[Eagle3Drafter, dict[str, Any]]:
    """The same drafter with a head that costs nothing: all else of a proposal remains."""
    _register_no_head()
    return _with_head(drafter, params, NO_HEAD)


def with_full_head(
    drafter: Eagle3Drafter, params: Mapping[str, Any], kernel: jax.Array
) -> tuple[Eagle3Drafter, dict[str, Any]]:
    """The same drafter with a full head of these weights, [d, V]; only their size matters for its cost."""
    full, params = _with_head(drafter, params, FULL, init=False)
    return full, {**params, "head": {"kernel": kernel}}


def _with_head(
    drafter: Eagle3Drafter, params: Mapping[str, Any], kind: str, *, init: bool = True
) -> tuple[Eagle3Drafter, dict[str, Any]]:
    config = drafter.config
    head = HeadConfig(kind, config.hidden_size, config.vocab_size)
    changed = dataclasses.replace(drafter, config=dataclasses.replace(config, head=head))
    head_params = get_head(kind).init(jax.random.key(0), head) if init else {}
    return changed, {**params, "head": head_params}


def _register_no_head() -> None:
    try:
        get_head(NO_HEAD)
    except ValueError:
        register_head(NO_HEAD, _NoHead())


def time_heads_alone(
    heads: Mapping[str, tuple[HeadConfig, Any]],
    *,
    batch: int = 1,
    rounds: int = 30,
    buffer_bytes: int = 256 * 2**20,
    max_copies: int = 64,
) -> dict[str, Timing]:
    """Times heads by themselves, logits and argmax of one position a row, interleaved in one run.

    Each call takes the next of several copies of the weights, so many that they do not stay in the processor's caches
    between calls: in a step the target's weights have passed through those caches in between as well.

    Args:
        heads: name to (configuration, parameters).
        batch: rows.
        rounds: calls of each head.
        buffer_bytes: least bytes of all copies of one head's weights together.
        max_copies: most copies of one head.

    Returns:
        Timings by name.
    """
    calls: dict[str, Callable[[], Any]] = {}
    for name, (config, params) in heads.items():
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        copies = max(2, min(max_copies, -(-buffer_bytes // max(size, 1))))
        buffers = [jax.tree.map(lambda leaf: leaf + jnp.zeros_like(leaf), params) for _ in range(copies)]
        keys = jax.random.split(jax.random.key(1), copies)
        # Ids have no say in the dtype of the states.
        dtype = next(leaf.dtype for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.floating))
        inputs = [jax.random.normal(key, (batch, 1, config.hidden_size), jnp.float32).astype(dtype) for key in keys]
        calls[name] = _rotating(config, list(zip(buffers, inputs, strict=True)))
    return time_interleaved(calls, rounds=rounds)


def _rotating(config: HeadConfig, buffers: list[tuple[Any, jax.Array]]) -> Callable[[], Any]:
    head = get_head(config.kind)
    call = jax.jit(lambda params, hidden: lowest_argmax(head.logits(params, hidden, config)))
    turn = itertools.cycle(buffers)
    return lambda: call(*next(turn))
