"""Which tokens a head over a part of the vocabulary keeps: the most frequent, as many as a utility says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int


def count_tokens(tokens: Int[np.ndarray, "*tokens"], vocab_size: int) -> Int[np.ndarray, "vocab"]:
    """How often each id occurs, [V] int64.

    Raises:
        ValueError: if an id is outside the vocabulary.
    """
    flat = np.asarray(tokens).reshape(-1)
    if flat.size and (flat.min() < 0 or flat.max() >= vocab_size):
        raise ValueError(f"`tokens` must be in [0, {vocab_size}); got {flat.min()} to {flat.max()}")
    return np.bincount(flat, minlength=vocab_size).astype(np.int64)


def select_ids(
    counts: Int[np.ndarray, "vocab"],
    size: int,
    *,
    num_valid_tokens: int | None = None,
    forced: Iterable[int] = (),
) -> Int[np.ndarray, "size"]:
    """The most frequent ids, forced ones always among them.

    Equally frequent ids are taken lowest first, also those that never occurred: in vocabularies built by merging, low
    ids are the frequent pieces of text in general. So the result is the same on every machine and always full.

    Args:
        counts: occurrences, [V]; those of padded rows are ignored.
        size: ids to keep, k.
        num_valid_tokens: ids at or above it are padded rows, which are never kept; None means that all are tokens.
        forced: ids that are kept whatever their count, in the place of the rarest others; padded rows among them
            are left out.

    Returns:
        Distinct ids in ascending order, [k] int32.

    Raises:
        ValueError: if there are fewer tokens than `size`, or more forced ones.
    """
    vocab_size = counts.shape[0]
    valid = vocab_size if num_valid_tokens is None else num_valid_tokens
    if not 1 <= size <= valid:
        raise ValueError(f"`size` of a draft vocabulary must be in [1, {valid}]; got {size}")
    kept = sorted({int(token) for token in forced if token < valid})
    if len(kept) > size:
        raise ValueError(f"`size` of a draft vocabulary must hold its {len(kept)} forced ids; got {size}")
    # A stable sort: equal counts stay in the order of their ids.
    ranking = np.argsort(-np.asarray(counts[:valid], np.int64), kind="stable")
    others = ranking[~np.isin(ranking, kept)][: size - len(kept)]
    return np.sort(np.concatenate((np.asarray(kept, np.int64), others))).astype(np.int32)


def coverage(counts: Int[np.ndarray, "vocab"], ids: Int[np.ndarray, "size"]) -> float:
    """Share of all counted occurrences that the kept ids make up; 0 if nothing was counted."""
    total = int(counts.sum())
    return float(counts[ids].sum() / total) if total else 0.0


@dataclasses.dataclass(frozen=True)
class SizeChoice:
    """A vocabulary size by the coverage-latency utility.

    Attributes:
        size: chosen number of ids, k.
        coverage: share of occurrences that they cover, C(k).
        reduction: share of the drafter's operations that they save, R(k).
        utility: alpha * C + (1 - alpha) * R.
    """

    size: int
    coverage: float
    reduction: float
    utility: float


def choose_size(
    counts: Int[np.ndarray, "vocab"],
    *,
    backbone_flops: int,
    flops_per_id: int,
    alpha: float = 0.5,
    least_coverage: float = 0.0,
    smallest: int = 1,
    largest: int | None = None,
    num_valid_tokens: int | None = None,
) -> SizeChoice:
    """The size with the highest utility U(k) = alpha * C(k) + (1 - alpha) * R(k), by exact search (Ofir Ben Shoham,
    "Balancing Coverage and Draft Latency", arXiv 2603.05210).

    C(k) is the share of occurrences among the k most frequent ids, R(k) = 1 - FLOPs(k) / FLOPs(V) the drafter's saved
    operations. Every size is tried, which is one cumulative sum; the paper samples sizes with Optuna.

    Args:
        counts: occurrences of supervised tokens, [V].
        backbone_flops: operations of the drafter for one token, its head left out.
        flops_per_id: operations of one row of the head.
        alpha: importance of coverage, in [0, 1].
        least_coverage: constraint C(k) >= c_min, in [0, 1].
        smallest: smallest size that is considered.
        largest: largest one; None is the whole vocabulary.
        num_valid_tokens: ids at or above it do not count; None means that all do.

    Returns:
        The best size, the smallest of several; the utility is of the k most frequent ids, forced ones not considered.

    Raises:
        ValueError: if a number is out of range or no size meets the constraint.
    """
    valid = counts.shape[0] if num_valid_tokens is None else num_valid_tokens
    most = valid if largest is None else min(largest, valid)
    for name, value in (("alpha", alpha), ("least_coverage", least_coverage)):
        if not 0 <= value <= 1:
            raise ValueError(f"`{name}` must be in [0, 1]; got {value}")
    if not 1 <= smallest <= most:
        raise ValueError(f"`smallest` must be in [1, largest = {most}]; got {smallest}")
    if counts[:valid].sum() < 1:
        raise ValueError("`counts` must hold at least one occurrence; got none")
    sizes = np.arange(smallest, most + 1)
    covered = np.cumsum(np.sort(counts[:valid])[::-1]) / counts[:valid].sum()
    covered = covered[sizes - 1]
    whole = backbone_flops + flops_per_id * valid
    reduction = 1 - (backbone_flops + flops_per_id * sizes) / whole
    utility: Float[np.ndarray, "sizes"] = alpha * covered + (1 - alpha) * reduction
    allowed = covered >= least_coverage
    if not allowed.any():
        raise ValueError(
            f"`least_coverage` must be at most what {most} ids cover, {covered[-1]:.6f}; got {least_coverage}"
        )
    best = int(np.argmax(np.where(allowed, utility, -np.inf)))
    return SizeChoice(int(sizes[best]), float(covered[best]), float(reduction[best]), float(utility[best]))
