"""Batches of requests as more rows: the kernels see one list of rows, `jax.vmap` over requests makes it longer.

Laws of a batch, [B, rows, V], are [B * rows, V] in memory already, so that nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jaxtyping import Array

Normalisers = Callable[[Array, Array, Array | None, Array | None], tuple[Array, Array]]
Sums = Callable[[Array, Array, Array, Array], Array]


def normalisers_of_requests(log_normalisers: Normalisers) -> Normalisers:
    """`(target_logits, draft_logits, target_scale, draft_scale) -> (normalisers, normalisers)` under `vmap`."""

    @custom_vmap
    def run(
        target_logits: Array, draft_logits: Array, target_scale: Array | None, draft_scale: Array | None
    ) -> tuple[Array, Array]:
        return log_normalisers(target_logits, draft_logits, target_scale, draft_scale)

    @run.def_vmap
    def _(
        size: int, batched: Sequence[bool | None], *arguments: Array | None
    ) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        flat = [
            None if argument is None else _joined(argument if has else _repeated(argument, size))
            for argument, has in zip(arguments, batched, strict=True)
        ]
        target, draft = run(*flat)
        return (target.reshape(size, -1), draft.reshape(size, -1)), (True, True)

    return run


def sums_of_requests(residual_sums: Sums) -> Sums:
    """`(target_logits, draft_logits, rows [2, pairs], scales [4, pairs]) -> sums [pairs, blocks]` under `vmap`."""

    @custom_vmap
    def run(target_logits: Array, draft_logits: Array, rows: Array, scales: Array) -> Array:
        return residual_sums(target_logits, draft_logits, rows, scales)

    @run.def_vmap
    def _(size: int, batched: Sequence[bool], *arguments: Array) -> tuple[Array, bool]:
        rows, scales = (
            argument if has else _repeated(argument, size)
            for argument, has in zip(arguments[2:], batched[2:], strict=True)
        )
        # Laws that all requests share stay as they are.
        flat_logits = [
            _joined(logits) if has else logits for logits, has in zip(arguments[:2], batched[:2], strict=True)
        ]
        first_rows = [
            first_row_of_requests(size, logits.shape[1] if has else 0)
            for logits, has in zip(arguments[:2], batched[:2], strict=True)
        ]
        rows = rows + jnp.stack(first_rows, axis=1)[:, :, None].astype(rows.dtype)
        sums = run(
            *flat_logits, *(jnp.moveaxis(values, 0, 1).reshape(values.shape[1], -1) for values in (rows, scales))
        )
        return sums.reshape(size, -1, sums.shape[-1]), True

    return run


def first_row_of_requests(size: int, num_rows: int) -> Array:
    """Where the rows of each request begin in the joined list, [B]."""
    return num_rows * jnp.arange(size, dtype=jnp.int32)


def _repeated(values: Array, size: int) -> Array:
    return jnp.broadcast_to(values, (size, *values.shape))


def _joined(values: Array) -> Array:
    return jax.lax.collapse(values, 0, 2)
