"""The two passes over the laws of a verification.

Letters: p is the draft's law, q the target's. Pass 1 (`row_statistics`) makes logits into laws: normalisers, and the
log-probabilities of the drafted tokens. Between the passes a rule computes weights w from these few numbers. Pass 2
(`residual_sums`) adds up max(w q - p, 0): over whole rows, which block rules compare, or over blocks of tokens, from
which `draw_residuals` draws a token in proportion to its residual with noise for about 2 sqrt(V) places instead of V.
Each pass reads each law once; the row at the stop position is pass 2 once more, with one pair.

NaN or +inf anywhere in a row make its statistics and sums NaN. A row of -inf everywhere has the normaliser -inf, log-
probabilities of -inf, and counts as a law without mass in pass 2. Temperatures must be positive and finite: greedy laws
are one-hot and need no pass. What jax's arrays hold is not looked at, since that would wait for the device. A number
that is no temperature there gives NaN or a law of no meaning in its own row, numbers of rows and tokens that are not
there give results of no meaning, and weights too large for float32 (log w > 88) give NaN or infinity.

Implementations (`pallas_kernels._platform`): "mosaic_gpu" on Hopper where V is a multiple of 128 (bfloat16) or 64
(float32) and blocks of tokens are too, "pallas" on TPU, "xla" everywhere else; float64 is served by "xla" alone. Rows
shorter than `SHORT_ROW` are left to XLA unless another implementation is named: they would not gain a microsecond.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels._platform import Implementation, check_name, choose, unavailable
from pallas_kernels.block_verifier import xla
from pallas_kernels.block_verifier.arguments import (
    check_floats,
    check_laws,
    check_logits,
    check_pairs,
    check_rows,
    check_width,
)
from pallas_kernels.block_verifier.batching import normalisers_of_requests, sums_of_requests
from pallas_kernels.block_verifier.laws import Laws, Pairs, Vector, exponents, group_size, row_scales, scaled_log_probs

STATISTICS = "block_verifier.row_statistics"
RESIDUALS = "block_verifier.residual_sums"
SHORT_ROW = 2048
TPU_LANES = 128


class Statistics(NamedTuple):
    """Pass 1.

    Attributes:
        target: q with its normalisers, as pass 2 reads it.
        draft: p, the same.
        target_log_prob: log q of each drafted token, float32 [N].
        draft_log_prob: log p of each drafted token, float32 [N].
    """

    target: Laws
    draft: Laws
    target_log_prob: Array
    draft_log_prob: Array


def row_statistics(
    target_logits: Float[Array, "target_rows vocab"],
    draft_logits: Float[Array, "draft_rows vocab"],
    tokens: Int[Array, " drafted"],
    target_row: Vector,
    draft_row: Vector,
    *,
    target_inverse_temperature: Float[Array, " target_rows"] | None = None,
    draft_inverse_temperature: Float[Array, " draft_rows"] | None = None,
    implementation: Implementation | None = None,
) -> Statistics:
    """Pass 1: log-normalisers of all rows, and the log-probabilities of drafted tokens.

    Args:
        target_logits: bfloat16 or float32, [T, V].
        draft_logits: of the same dtype, [D, V].
        tokens: drafted tokens, int32 [N].
        target_row: the target's row that each token is looked up in, int32 [N].
        draft_row: the draft's row, int32 [N].
        target_inverse_temperature: one over the temperature of each of the target's rows, [T]; None for 1.
        draft_inverse_temperature: the same of the draft's rows, [D].
        implementation: None for the one of the platform that the program is lowered for.

    Returns:
        The laws, ready for pass 2, and the tokens' log-probabilities, all in float32 (float64 for float64 logits).

    Raises:
        ValueError: for empty or mismatching arguments; the message names the argument.
        NotImplementedError: if the named implementation cannot serve; the message says why.
    """
    check_logits(target_logits, draft_logits)
    check_rows("target_row", target_row, target_logits.shape[0])
    check_rows("draft_row", draft_row, draft_logits.shape[0], len(target_row))
    check_rows("tokens", tokens, target_logits.shape[1], len(target_row))
    check_floats("target_inverse_temperature", target_inverse_temperature, target_logits.shape[:1])
    check_floats("draft_inverse_temperature", draft_inverse_temperature, draft_logits.shape[:1])
    candidates: dict[str, Callable[..., Any]] = {"xla": xla.log_normalisers}
    for name in _kernels(implementation, target_logits):
        candidates[name] = _with_scales(normalisers_of_requests(_kernel(name, "log_normalisers")))
    _check_available(STATISTICS, implementation, _refusal(implementation, target_logits))
    run = choose(implementation, candidates, op=STATISTICS)
    temperatures = (target_inverse_temperature, draft_inverse_temperature)
    normalisers = run(target_logits, draft_logits, *temperatures)
    target, draft = (
        Laws(logits, normaliser, temperature)
        for logits, normaliser, temperature in zip(
            (target_logits, draft_logits), normalisers, temperatures, strict=True
        )
    )
    return Statistics(
        target, draft, _token_log_probs(target, target_row, tokens), _token_log_probs(draft, draft_row, tokens)
    )


def residual_sums(
    target: Laws,
    draft: Laws,
    pairs: Pairs,
    *,
    width: int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "pairs blocks"]:
    """Pass 2: sums of max(w q(v) - p(v), 0) over blocks of neighbouring tokens.

    Args:
        target: q, from `row_statistics`, or log-probabilities without normalisers.
        draft: p, of the same dtype and vocabulary.
        pairs: the pairs of rows, their weights, and whether p is taken away at all.
        width: tokens of a block; None for one sum over the whole row.
        implementation: None for the one of the platform that the program is lowered for.

    Returns:
        The sums, [pairs, ceil(V / width)], float32 (float64 for float64 logits).

    Raises:
        ValueError: for empty or mismatching arguments; the message names the argument.
        NotImplementedError: if the named implementation cannot serve; the message says why.
    """
    check_laws("target", target)
    check_laws("draft", draft)
    check_logits(target.logits, draft.logits)
    check_pairs(target, draft, pairs)
    check_width(width)
    width = target.logits.shape[1] if width is None else width
    static = pairs
    candidates: dict[str, Callable[..., Any]] = {
        "xla": lambda target, draft, pairs: xla.residual_sums(target, draft, _with_static_rows(pairs, static), width)
    }
    for name in _kernels(implementation, target.logits, width):
        kernel = functools.partial(_kernel(name, "residual_sums"), width=width)
        candidates[name] = _with_exponents(sums_of_requests(kernel))
    _check_available(RESIDUALS, implementation, _refusal(implementation, target.logits, width))
    return choose(implementation, candidates, op=RESIDUALS)(target, draft, pairs)


def _token_log_probs(laws: Laws, rows: Vector, tokens: Array) -> Array:
    return scaled_log_probs(laws, laws.logits[jnp.asarray(rows), tokens][:, None], rows)[:, 0]


def _kernels(implementation: str | None, logits: Any, width: int | None = None) -> list[str]:
    """The kernels that can serve the shapes and may be chosen."""
    if implementation is None and logits.shape[1] < SHORT_ROW:
        return []
    return [name for name in ("mosaic_gpu", "pallas", "interpret") if _refusal(name, logits, width) is None]


def _kernel(implementation: str, name: str) -> Callable[..., Any]:
    """A kernel by its name; its module is loaded when it is traced, so that programs on XLA alone load no Pallas."""

    def run(*arguments: Any, **options: Any) -> Any:
        from pallas_kernels.block_verifier import mosaic_gpu, portable

        if implementation == "mosaic_gpu":
            return getattr(mosaic_gpu, name)(*arguments, **options)
        return getattr(portable, name)(*arguments, interpret=implementation == "interpret", **options)

    return run


def _refusal(implementation: str | None, logits: Any, width: int | None = None) -> str | None:
    """Why an implementation cannot serve the shapes, or None."""
    if implementation in (None, "xla"):
        return None
    if logits.dtype not in (jnp.bfloat16, jnp.float32):
        return f"it reads bfloat16 and float32; got {logits.dtype}"
    vocab_size = logits.shape[1]
    if implementation == "mosaic_gpu":
        group = group_size(logits.dtype)
        if vocab_size % group:
            return f"rows of {logits.dtype} must be a multiple of {group} long; got {vocab_size}"
    elif implementation == "pallas":
        group = TPU_LANES
    else:
        return None
    if width is not None and width < vocab_size and width % group:
        return f"blocks of tokens must be a multiple of {group} long; got {width}"
    return None


def _check_available(op: str, implementation: str | None, reason: str | None) -> None:
    check_name(implementation)
    if implementation is not None and reason is not None:
        raise unavailable(op, implementation, reason)


def _with_scales(log_normalisers: Callable[..., Any]) -> Callable[..., Any]:
    """Takes inverse temperatures in place of the kernels' scales."""

    def run(target_logits: Array, draft_logits: Array, target: Array | None, draft: Array | None) -> Any:
        return log_normalisers(target_logits, draft_logits, row_scales(target), row_scales(draft))

    return run


def _with_exponents(sums: Callable[..., Any]) -> Callable[..., Any]:
    """Takes laws and pairs in place of the kernels' scales and offsets."""

    def run(target: Laws, draft: Laws, pairs: Pairs) -> Any:
        rows = jnp.stack([jnp.asarray(rows, jnp.int32) for rows in (pairs.target_row, pairs.draft_row)])
        return sums(target.logits, draft.logits, rows, jnp.stack(exponents(target, draft, pairs)))

    return run


def _with_static_rows(pairs: Pairs, static: Pairs) -> Pairs:
    """Row numbers that were known when the program was traced, again as numpy arrays."""
    known = {
        name: getattr(static, name)
        for name in ("target_row", "draft_row", "uses_draft")
        if isinstance(getattr(static, name), np.ndarray)
    }
    return pairs._replace(**known)
