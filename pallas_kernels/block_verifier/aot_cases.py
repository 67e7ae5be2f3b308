"""The two passes at real shapes, as programs to compile for a chip (`pallas_kernels.aot`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._platform import Implementation
from pallas_kernels.aot import Case
from pallas_kernels.block_verifier import api, chains
from pallas_kernels.block_verifier.laws import Laws, Pairs
from pallas_kernels.block_verifier.shapes import VerifierShape, get_shape

OPS = ("row_statistics", "log_normalisers", "residual_masses", "residual_blocks")
PASS_1 = OPS[:2]
# Tokens of a block of the two-level draw: the power of two at or above the root of these vocabularies.
BLOCK_WIDTH = 512


def case(op: str, shape_name: str, implementation: str | None = "mosaic_gpu") -> Case:
    """One pass at one of `shapes.NAMED_SHAPES`.

    Args:
        op: "row_statistics" (pass 1), "log_normalisers" (pass 1 without its look-up of tokens), "residual_masses"
            (pass 2, one sum a row) or "residual_blocks" (pass 2, sums of blocks of tokens).
        shape_name: name of the shape.
        implementation: as the operations take it.
    """
    arguments = {"op": op, "shape_name": shape_name, "implementation": implementation}
    name = f"{op} {shape_name} {implementation or 'by platform'}"
    return Case(name, "pallas_kernels.block_verifier.aot_cases:build", arguments)


def build(
    op: str, shape_name: str, implementation: Implementation | None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments' shapes."""
    shape = get_shape(shape_name)
    return function(op, shape, implementation), abstract_arguments(op, shape)


def function(op: str, shape: VerifierShape, implementation: Implementation | None) -> Callable[..., Any]:
    """One pass as a function of arrays, see `abstract_arguments`.

    Raises:
        ValueError: for an unknown operation.
    """
    if op not in OPS:
        raise ValueError(f"`op` must be one of {', '.join(OPS)}; got {op!r}")
    rows = chains.chain_rows(shape.batch, shape.num_drafts, shape.draft_length)

    def statistics(target: Any, draft: Any, tokens: Any) -> Any:
        found = api.row_statistics(target, draft, tokens, *rows, implementation=implementation)
        normalisers = found.target.log_normaliser, found.draft.log_normaliser
        # XLA leaves out what is not returned.
        return normalisers if op == "log_normalisers" else (*normalisers, found.target_log_prob, found.draft_log_prob)

    def residuals(target: Any, draft: Any, target_normaliser: Any, draft_normaliser: Any, log_weight: Any) -> Any:
        return api.residual_sums(
            Laws(target, target_normaliser),
            Laws(draft, draft_normaliser),
            Pairs(*rows, log_weight=log_weight),
            width=BLOCK_WIDTH if op == "residual_blocks" else None,
            implementation=implementation,
        )

    return statistics if op in PASS_1 else residuals


def abstract_arguments(op: str, shape: VerifierShape) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Shapes of the arrays: both logits, then tokens (pass 1) or normalisers and weights (pass 2)."""
    num_targets, num_drafts = shape.num_target_rows, shape.num_draft_rows
    logits = tuple(
        jax.ShapeDtypeStruct((rows, shape.vocab_size), jnp.dtype(shape.dtype)) for rows in (num_targets, num_drafts)
    )
    if op in PASS_1:
        return (*logits, jax.ShapeDtypeStruct((num_drafts,), jnp.int32))
    return (*logits, *(jax.ShapeDtypeStruct((rows,), jnp.float32) for rows in (num_targets, num_drafts, num_drafts)))
