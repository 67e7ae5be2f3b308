"""What the operations refuse, on every implementation alike: argument, rule and value in each message."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_verifier.laws import Laws, Pairs

_LOGIT_DTYPES = (jnp.bfloat16, jnp.float32, jnp.float64)


def check_logits(target_logits: Any, draft_logits: Any) -> None:
    """Refuses rows that are not two sets of laws over one vocabulary.

    Raises:
        ValueError: for no rows, no vocabulary, two vocabularies, or dtypes that differ or are no logits.
    """
    for name, logits in (("target_logits", target_logits), ("draft_logits", draft_logits)):
        _check_array(name, logits)
        if jnp.ndim(logits) != 2 or 0 in jnp.shape(logits):
            raise ValueError(f"`{name}` must have shape [rows, V] with at least one row; got {jnp.shape(logits)}")
        if logits.dtype not in _LOGIT_DTYPES:
            raise ValueError(f"`{name}` must be bfloat16, float32 or float64; got {logits.dtype}")
    if target_logits.shape[1] != draft_logits.shape[1]:
        raise ValueError(
            "`draft_logits` must have the vocabulary of `target_logits`, "
            f"{target_logits.shape[1]} tokens; got {draft_logits.shape[1]}"
        )
    if target_logits.dtype != draft_logits.dtype:
        raise ValueError(
            f"`draft_logits` must have the dtype of `target_logits`, {target_logits.dtype}; got {draft_logits.dtype}"
        )


def check_laws(name: str, laws: Laws) -> None:
    """Refuses what is no `Laws`, and normalisers or temperatures that do not belong to the rows."""
    if not isinstance(laws, Laws):
        raise ValueError(f"`{name}` must be Laws; got {type(laws).__name__}")
    _check_array(f"{name}.logits", laws.logits)
    for field in ("log_normaliser", "inverse_temperature"):
        check_floats(f"{name}.{field}", getattr(laws, field), laws.logits.shape[:1])


def check_floats(name: str, values: Any, shape: tuple[int, ...]) -> None:
    """Refuses an optional array of another shape, or not of floats."""
    if values is None:
        return
    if jnp.shape(values) != shape or not isinstance(values, jax.Array | np.ndarray):
        raise ValueError(f"`{name}` must have shape {list(shape)}; got {list(jnp.shape(values))}")
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise ValueError(f"`{name}` must be floats; got {values.dtype}")


def check_rows(name: str, rows: Any, num_rows: int, count: int | None = None) -> None:
    """Refuses row numbers of a wrong shape or kind; static ones out of range, too.

    Args:
        name: of the argument.
        rows: the numbers.
        num_rows: rows that there are.
        count: how many numbers there must be; None for any positive number.
    """
    _check_array(name, rows)
    expected = "at least one entry" if count is None else f"{count} entries"
    if jnp.ndim(rows) != 1 or len(rows) == 0 or (count is not None and len(rows) != count):
        raise ValueError(f"`{name}` must have {expected}; got shape {jnp.shape(rows)}")
    if not jnp.issubdtype(rows.dtype, jnp.integer):
        raise ValueError(f"`{name}` must be integers; got {rows.dtype}")
    if isinstance(rows, np.ndarray) and not ((rows >= 0) & (rows < num_rows)).all():
        raise ValueError(f"`{name}` must be in [0, {num_rows}); got {rows.tolist()}")


def check_pairs(target: Laws, draft: Laws, pairs: Pairs) -> None:
    """Refuses pairs of rows that do not exist, and weights or flags that are not one a pair."""
    if not isinstance(pairs, Pairs):
        raise ValueError(f"`pairs` must be Pairs; got {type(pairs).__name__}")
    check_rows("pairs.target_row", pairs.target_row, target.logits.shape[0])
    count = len(pairs.target_row)
    check_rows("pairs.draft_row", pairs.draft_row, draft.logits.shape[0], count)
    check_floats("pairs.log_weight", pairs.log_weight, (count,))
    uses_draft = pairs.uses_draft
    if uses_draft is not None and (jnp.shape(uses_draft) != (count,) or uses_draft.dtype != bool):
        raise ValueError(
            f"`pairs.uses_draft` must be bool [{count}]; got {uses_draft.dtype} {list(jnp.shape(uses_draft))}"
        )


def check_width(width: int | None) -> None:
    """Refuses blocks without tokens."""
    if width is not None and (isinstance(width, bool) or not isinstance(width, int) or width < 1):
        raise ValueError(f"`width` must be a positive int or None; got {width!r}")


def _check_array(name: str, value: Any) -> None:
    if not isinstance(value, jax.Array | np.ndarray):
        raise ValueError(f"`{name}` must be an array; got {type(value).__name__}")
