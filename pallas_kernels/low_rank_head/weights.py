"""A head's weights in the layout that the kernels stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

# Rows are padded to whole tiles, once: the copy engine of Hopper wants whole tiles, and so does a TPU.
ROW_MULTIPLE = 128
# Columns are padded to the depth of one tensor core instruction.
RANK_MULTIPLE = 16
# The down-projection's depth is cut into parts for as many multiprocessors, each of whole blocks for tensor cores.
DEPTH_BLOCK = 64
MAX_DEPTH_PARTS = 16
DTYPES = (jnp.bfloat16, jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PreparedHead:
    """Weights of a head, ready for the kernels; made by `prepare_weights`.

    Attributes:
        down: down-projection [d_padded, k], or None for a full head (whose r is d). d is padded with zeros to the
            parts of `depth_parts`; k is r padded to a multiple of 16.
        rows: one row a token, [V_padded, k]; rows from `vocab_size` on are zeros.
        hidden_size: width of the hidden state, d.
        vocab_size: number of tokens, V.
        num_valid_tokens: ids from here on are never drawn and have logit -inf.
    """

    down: Float[Array, "d_padded k"] | None
    rows: Float[Array, "V_padded k"]
    hidden_size: int = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    num_valid_tokens: int = dataclasses.field(metadata={"static": True})

    @property
    def inner_size(self) -> int:
        """Width of a token's row, k."""
        return self.rows.shape[1]


def prepare_weights(
    params: Mapping[str, Float[Array, "inputs outputs"]],
    *,
    vocab_size: int | None = None,
    num_valid_tokens: int | None = None,
) -> PreparedHead:
    """Lays out a head's parameters for the kernels; once, when they are loaded.

    A head's matrices are stored [inputs, outputs]. The kernels stream whole tokens, so the last matrix is transposed
    to one row a token. Everything is padded with zeros: V to a multiple of 128, r to one of 16 (k), d to equal parts of
    whole 64s (`depth_parts`; 2880, 4096 and the like stay as they are).

        {"down": [d, r], "up": [r, V]}  ->  down [d_padded, k], rows = up^T [V_padded, k]
        {"kernel": [d, V]}              ->  down None,          rows = kernel^T [V_padded, k], r = d

    Args:
        params: the parameters of a low-rank or a full head, in bfloat16 or float32.
        vocab_size: expected V; None takes it from the parameters.
        num_valid_tokens: ids from here on are padding of the vocabulary; None means all are valid.

    Raises:
        ValueError: if the names, shapes or dtypes do not fit, or V is not the expected one.
    """
    names = set(params) if isinstance(params, Mapping) else {type(params).__name__}
    if names == {"down", "up"}:
        down, last = params["down"], params["up"]
    elif names == {"kernel"}:
        down, last = None, params["kernel"]
    else:
        raise ValueError(f"`params` must hold 'down' and 'up', or 'kernel'; got {sorted(names)}")
    for name, matrix in params.items():
        if not isinstance(matrix, jax.Array | np.ndarray):
            raise ValueError(f"`{name}` must be an array; got {type(matrix).__name__}")
        if matrix.ndim != 2 or 0 in matrix.shape:
            raise ValueError(f"`{name}` must be a matrix without empty sides; got shape {list(matrix.shape)}")
        _check_dtype(name, matrix)
    if down is not None and down.shape[1] != last.shape[0]:
        raise ValueError(f"`up` must have as many rows as `down` has columns, r={down.shape[1]}; got {last.shape[0]}")
    if down is not None and down.dtype != last.dtype:
        raise ValueError(f"`down` and `up` must have one dtype; got {down.dtype} and {last.dtype}")
    size = last.shape[1]
    if vocab_size is not None and vocab_size != size:
        raise ValueError(f"`vocab_size` must be the number of columns of the last matrix, {size}; got {vocab_size}")
    columns = (0, -last.shape[0] % RANK_MULTIPLE)
    head = PreparedHead(
        down=None if down is None else jnp.pad(down, ((0, _padded_depth(down.shape[0]) - down.shape[0]), columns)),
        rows=jnp.pad(last.T, ((0, -size % ROW_MULTIPLE), columns)),
        hidden_size=last.shape[0] if down is None else down.shape[0],
        vocab_size=size,
        num_valid_tokens=size if num_valid_tokens is None else num_valid_tokens,
    )
    check_head(head)
    return head


def check_head(head: PreparedHead) -> None:
    """Raises ValueError if the parts of a prepared head do not fit each other."""
    if head.rows.ndim != 2 or head.rows.shape[0] % ROW_MULTIPLE or head.rows.shape[0] < max(head.vocab_size, 1):
        raise ValueError(
            f"`rows` must be [V_padded, r], V_padded a multiple of {ROW_MULTIPLE} and at least `vocab_size`="
            f"{head.vocab_size}; got shape {list(head.rows.shape)}: use prepare_weights"
        )
    if not is_count(head.num_valid_tokens) or not 1 <= head.num_valid_tokens <= head.vocab_size:
        raise ValueError(
            f"`num_valid_tokens` must be an integer in [1, vocab_size={head.vocab_size}]; got {head.num_valid_tokens}"
        )
    if head.inner_size < 1 or head.inner_size % RANK_MULTIPLE:
        raise ValueError(
            f"the width of `rows` must be a multiple of {RANK_MULTIPLE}; got {head.inner_size}: use prepare_weights"
        )
    _check_dtype("rows", head.rows)
    depth = _padded_depth(head.hidden_size)
    if head.down is not None and head.down.shape != (depth, head.inner_size):
        raise ValueError(f"`down` must have shape {[depth, head.inner_size]}; got {list(head.down.shape)}")
    if head.down is None and not head.hidden_size <= head.inner_size < head.hidden_size + RANK_MULTIPLE:
        raise ValueError(
            f"without `down`, `rows` must be as wide as the hidden state, {head.hidden_size}; got {head.inner_size}"
        )
    if head.down is not None and head.down.dtype != head.rows.dtype:
        raise ValueError(f"`down` and `rows` must have one dtype; got {head.down.dtype} and {head.rows.dtype}")


def depth_parts(hidden_size: int) -> tuple[int, int]:
    """Into how many parts the depth of the down-projection is cut, and the size of one: up to 16, of whole 64s."""
    blocks = -(-hidden_size // DEPTH_BLOCK)
    if blocks <= MAX_DEPTH_PARTS:
        return blocks, DEPTH_BLOCK
    # Half as many parts would do: least padding first, then most parts.
    parts = min(range(MAX_DEPTH_PARTS, MAX_DEPTH_PARTS // 2 - 1, -1), key=lambda parts: -blocks % parts)
    return parts, -(-blocks // parts) * DEPTH_BLOCK


def _padded_depth(hidden_size: int) -> int:
    parts, size = depth_parts(hidden_size)
    return parts * size


def is_count(value: object) -> bool:
    """Whether a value counts something: an integer, and not a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_dtype(name: str, array: Array) -> None:
    if array.dtype not in [np.dtype(dtype) for dtype in DTYPES]:
        raise ValueError(f"`{name}` must be bfloat16 or float32; got {array.dtype}")
