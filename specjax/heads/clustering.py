"""Groups of tokens of equal size whose rows of a head point the same way: balanced spherical k-means, on the host."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def balanced_groups(
    rows: Float[np.ndarray, "tokens width"], num_groups: int, *, seed: int = 0, iterations: int = 8
) -> Int[np.ndarray, "groups size"]:
    """Groups tokens by the direction of their rows, all groups but for padding of one size.

    Equal sizes make a group one block of a fixed shape, which is what hardware reads fast. Tokens choose in the order
    of how much they lose by their second choice; a full group takes no more.

    Args:
        rows: one row of the head for each token, [n, d].
        num_groups: groups G, at most n.
        seed: of the first centres.
        iterations: rounds of assignment and new centres.

    Returns:
        Token numbers, ascending in each group, [G, ceil(n / G)] int32; unused places hold n.

    Raises:
        ValueError: if there are fewer tokens than groups, or none is asked for.
    """
    num_tokens = rows.shape[0]
    if not 1 <= num_groups <= num_tokens:
        raise ValueError(f"`num_groups` must be in [1, {num_tokens}]; got {num_groups}")
    directions = _unit(rows.astype(np.float32))
    generator = np.random.default_rng(seed)
    centres = directions[generator.choice(num_tokens, num_groups, replace=False)]
    size = -(-num_tokens // num_groups)
    owner = np.zeros(num_tokens, np.int64)
    for _ in range(iterations):
        owner = _assign(directions @ centres.T, size)
        sums = np.zeros_like(centres)
        np.add.at(sums, owner, directions)
        centres = _unit(sums)
    groups = np.full((num_groups, size), num_tokens, np.int32)
    for group in range(num_groups):
        members = np.flatnonzero(owner == group)
        groups[group, : len(members)] = members
    return groups


def _assign(scores: Float[np.ndarray, "tokens groups"], size: int) -> Int[np.ndarray, "tokens"]:
    """Each token to its best group that is not full, those with most to lose first."""
    num_tokens, num_groups = scores.shape
    scores = scores.copy()
    owner = np.full(num_tokens, -1, np.int64)
    space = np.full(num_groups, size)
    waiting = np.arange(num_tokens)
    while len(waiting):
        own = scores[waiting]
        choice = own.argmax(1)
        best_two = np.partition(own, -2, axis=1)[:, -2:] if num_groups > 1 else np.repeat(own, 2, axis=1)
        regret = best_two[:, 1] - best_two[:, 0]
        for group in range(num_groups):
            asking = np.flatnonzero(choice == group)
            taken = asking[np.argsort(-regret[asking], kind="stable")[: space[group]]]
            owner[waiting[taken]] = group
            space[group] -= len(taken)
        scores[:, space == 0] = -np.inf
        waiting = waiting[owner[waiting] < 0]
    return owner


def _unit(x: Float[np.ndarray, "rows width"]) -> Float[np.ndarray, "rows width"]:
    lengths = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.where(lengths > 0, lengths, 1)
