"""Verification of K drafted chains of L tokens, by rows: the shapes of benchmarks and of the block rules.

Row (b, k, i) of the target is its law after i tokens of chain k, i = 0..L; row (b, k, i) of the draft is the law that
token i + 1 of the chain was drawn from, i = 0..L-1.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels._platform import Implementation
from pallas_kernels.block_verifier.api import Statistics, residual_sums, row_statistics
from pallas_kernels.block_verifier.arguments import check_floats
from pallas_kernels.block_verifier.laws import Pairs


class ChainRows(NamedTuple):
    """Where the places of K chains are among the rows.

    Attributes:
        target_row: row of the target before each drafted token, int32 [B * K * L].
        draft_row: row of the draft it was drawn from, int32 [B * K * L].
    """

    target_row: np.ndarray
    draft_row: np.ndarray


def chain_rows(batch: int, num_drafts: int, draft_length: int) -> ChainRows:
    """Rows of the drafted tokens of all chains, chain after chain.

    Raises:
        ValueError: if there are no requests, no chains or no tokens.
    """
    for name, value in (("batch", batch), ("num_drafts", num_drafts), ("draft_length", draft_length)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1; got {value}")
    chain = np.arange(batch * num_drafts, dtype=np.int32)[:, None]
    place = np.arange(draft_length, dtype=np.int32)
    target = chain * np.int32(draft_length + 1) + place
    return ChainRows(target.reshape(-1), (chain * np.int32(draft_length) + place).reshape(-1))


def chain_statistics(
    target_logits: Float[Array, "batch drafts places vocab"],
    draft_logits: Float[Array, "batch drafts length vocab"],
    tokens: Int[Array, "batch drafts length"],
    *,
    inverse_temperature: Float[Array, " batch"] | None = None,
    implementation: Implementation | None = None,
) -> Statistics:
    """Pass 1 of K chains.

    Args:
        target_logits: bfloat16 or float32, [B, K, L+1, V].
        draft_logits: of the same dtype, [B, K, L, V].
        tokens: drafted tokens, int32 [B, K, L].
        inverse_temperature: one over each request's temperature, [B]; None for 1.
        implementation: see `row_statistics`.

    Returns:
        Statistics of the flattened rows.

    Raises:
        ValueError: if the arrays do not belong together, or B, K or L is zero.
        NotImplementedError: if the named implementation cannot serve.
    """
    if jnp.ndim(draft_logits) != 4 or jnp.ndim(target_logits) != 4:
        raise ValueError(
            "`target_logits` must be [B, K, L+1, V] and `draft_logits` [B, K, L, V]; "
            f"got {jnp.shape(target_logits)} and {jnp.shape(draft_logits)}"
        )
    batch, num_drafts, length, vocab_size = draft_logits.shape
    rows = chain_rows(batch, num_drafts, length)
    if target_logits.shape[:3] != (batch, num_drafts, length + 1):
        raise ValueError(
            f"`target_logits` must have shape [{batch}, {num_drafts}, {length + 1}, V]; got {target_logits.shape}"
        )
    if tokens.shape != (batch, num_drafts, length):
        raise ValueError(f"`tokens` must have shape [{batch}, {num_drafts}, {length}]; got {tokens.shape}")
    check_floats("inverse_temperature", inverse_temperature, (batch,))
    temperatures: list[Array | None] = [None, None]
    if inverse_temperature is not None:
        temperatures = [jnp.repeat(inverse_temperature, num_drafts * places) for places in (length + 1, length)]
    return row_statistics(
        target_logits.reshape(-1, target_logits.shape[3]),
        draft_logits.reshape(-1, vocab_size),
        tokens.reshape(-1),
        *rows,
        target_inverse_temperature=temperatures[0],
        draft_inverse_temperature=temperatures[1],
        implementation=implementation,
    )


def chain_residual_masses(
    statistics: Statistics,
    log_weight: Float[Array, "batch drafts length"],
    *,
    implementation: Implementation | None = None,
) -> Float[Array, "batch drafts length"]:
    """Pass 2 for block rules: sum_v max(w_i q(v) - p(v), 0) at places i = 0..L-1 of each chain.

    Args:
        statistics: from `chain_statistics`.
        log_weight: log w_0 .. log w_{L-1}, [B, K, L].
        implementation: see `residual_sums`.

    Returns:
        The masses, float32 [B, K, L].

    Raises:
        ValueError: if the weights are not those of the statistics' chains.
        NotImplementedError: if the named implementation cannot serve.
    """
    num_rows = statistics.draft.logits.shape[0]
    if jnp.ndim(log_weight) != 3 or jnp.size(log_weight) != num_rows:
        raise ValueError(
            f"`log_weight` must be [B, K, L], one number for each of {num_rows} drafted tokens; "
            f"got shape {list(jnp.shape(log_weight))}"
        )
    pairs = Pairs(*chain_rows(*log_weight.shape), log_weight=log_weight.reshape(-1))
    sums = residual_sums(statistics.target, statistics.draft, pairs, implementation=implementation)
    return sums.reshape(log_weight.shape)
