"""EAGLE-3's vocabulary maps: `d2t` leads from a draft id to the target's, `t2d` marks the target ids that have one.

Published checkpoints store offsets, `target id = j + d2t[j]`; some tools write the target ids themselves. Small
vocabularies can be read both ways, so `t2d`, or the caller, decides.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Int

FORMS = ("offset", "absolute")


def maps_of_ids(
    ids: Int[np.ndarray, "draft"], vocab_size: int
) -> tuple[Int[np.ndarray, "draft"], Bool[np.ndarray, "vocab"]]:
    """The published maps of a draft vocabulary.

    Args:
        ids: target ids, ascending, [k].
        vocab_size: the target's V.

    Returns:
        `d2t` as offsets, [k] int64, and `t2d`, [V] bool.

    Raises:
        ValueError: if the ids are no ascending ids of the vocabulary.
    """
    _check_ids(ids.astype(np.int64), vocab_size, "ids")
    t2d = np.zeros(vocab_size, bool)
    t2d[ids] = True
    return ids.astype(np.int64) - np.arange(len(ids)), t2d


def ids_of_maps(
    d2t: Int[np.ndarray, "draft"] | None,
    vocab_size: int,
    draft_vocab_size: int,
    *,
    t2d: np.ndarray | None = None,
    form: str | None = None,
) -> Int[np.ndarray, "draft"]:
    """Target ids of a draft vocabulary, from a checkpoint's maps.

    Args:
        d2t: offsets or target ids, [k]; None if the checkpoint has none.
        vocab_size: the target's V.
        draft_vocab_size: k.
        t2d: which target ids are kept, [V] bool; None if the checkpoint has none.
        form: "offset" or "absolute"; None takes what agrees with `t2d`, and offsets where there is none.

    Returns:
        Ascending ids, [k] int32.

    Raises:
        ValueError: if `d2t` is missing (the first k ids are never assumed), has another length, gives no ascending
            ids of the vocabulary, or contradicts `t2d`.
    """
    if form is not None and form not in FORMS:
        raise ValueError(f"`form` of `d2t` must be one of {FORMS}; got {form!r}")
    if d2t is None:
        raise ValueError(
            f"`d2t` must be among the tensors of a head over {draft_vocab_size} of {vocab_size} tokens; got none: "
            "which tokens its rows stand for cannot be known"
        )
    if d2t.shape != (draft_vocab_size,):
        raise ValueError(f"`d2t` must have shape [{draft_vocab_size}]; got {list(d2t.shape)}")
    if t2d is not None and t2d.shape != (vocab_size,):
        raise ValueError(f"`t2d` must have shape [{vocab_size}]; got {list(t2d.shape)}")
    values = d2t.astype(np.int64)
    readings = {"offset": values + np.arange(draft_vocab_size), "absolute": values}
    guesses = ["offset"] if t2d is None else list(FORMS)
    tried = guesses if form is None else [form]
    problems = []
    for name in tried:
        try:
            _check_ids(readings[name], vocab_size, f"`d2t` read as {name}")
            if t2d is not None and not np.array_equal(np.flatnonzero(t2d), readings[name]):
                raise ValueError(f"`d2t` read as {name} must give the ids that `t2d` marks; got others")
        except ValueError as error:
            problems.append(str(error))
        else:
            return readings[name].astype(np.int32)
    hint = "" if form is not None or t2d is not None else " (say so if it holds target ids)"
    raise ValueError("; ".join(problems) + hint)


def _check_ids(ids: np.ndarray, vocab_size: int, name: str) -> None:
    if ids.ndim != 1 or len(ids) == 0 or np.any(np.diff(ids) <= 0) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ValueError(f"{name} must be increasing ids below {vocab_size}; got {ids[:4].tolist()}...")
