"""The head at real shapes, as programs to compile for a chip (`pallas_kernels.aot`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._platform import Implementation
from pallas_kernels.aot import Case
from pallas_kernels.low_rank_head import api, shapes
from pallas_kernels.low_rank_head.weights import PreparedHead, prepare_weights

OPS = ("greedy", "sample", "logits", "top_candidates")
_CANDIDATES = 16


def case(op: str, shape_name: str, batch: int, implementation: Implementation | None = "mosaic_gpu") -> Case:
    """One operation at one of `shapes.SHAPES`."""
    arguments = {"op": op, "shape_name": shape_name, "batch": batch, "implementation": implementation}
    name = f"{op} {shape_name} B={batch} {implementation or 'by platform'}"
    return Case(name, "pallas_kernels.low_rank_head.aot_cases:build", arguments)


def build(
    op: str, shape_name: str, batch: int, implementation: Implementation | None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and its arguments' shapes, bfloat16."""
    shape = shapes.SHAPES[shape_name]
    hidden = jax.ShapeDtypeStruct((batch, shape.hidden_size), jnp.bfloat16)
    head = abstract_head(shape)
    named: dict[str, Any] = {"implementation": implementation}
    if op == "sample":
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
        temperature = jax.ShapeDtypeStruct((batch,), jnp.float32)
        return (
            lambda hidden, head, words, temperature: api.sample(
                hidden, head, jax.random.wrap_key_data(words), temperature=temperature, **named
            ),
            (hidden, head, jax.eval_shape(jax.random.key_data, keys), temperature),
        )
    if op == "top_candidates":
        return lambda hidden, head: api.top_candidates(hidden, head, _CANDIDATES, **named), (hidden, head)
    return lambda hidden, head: getattr(api, op)(hidden, head, **named), (hidden, head)


def abstract_head(shape: shapes.HeadShape, dtype: Any = jnp.bfloat16) -> PreparedHead:
    """A prepared head of shapes only."""
    if shape.rank is None:
        params = {"kernel": (shape.hidden_size, shape.vocab_size)}
    else:
        params = {"down": (shape.hidden_size, shape.rank), "up": (shape.rank, shape.vocab_size)}
    return jax.eval_shape(prepare_weights, {name: jax.ShapeDtypeStruct(sizes, dtype) for name, sizes in params.items()})
