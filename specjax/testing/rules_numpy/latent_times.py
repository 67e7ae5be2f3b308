"""The latent-time rules on given noise, by plain recursion. p is the draft's law, q the target's."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np

from specjax.types import DRAW_DETERMINISTIC, DraftTree


@dataclasses.dataclass(frozen=True)
class TreeNoise:
    """Everything random, by node; uniforms in (0, 1).

    Attributes:
        leaf: times of the nodes if they are leaves.
        child_token: gap tokens of the nodes as children.
        child_uniform: uniforms of their gap scores.
        node_token: gap tokens of the nodes that do not select the minimum.
        node_uniform: uniforms of their gap times.
    """

    leaf: np.ndarray
    child_token: np.ndarray
    child_uniform: np.ndarray
    node_token: np.ndarray
    node_uniform: np.ndarray


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A drafted tree with its laws.

    Attributes:
        tree: shape.
        tokens: token of each node.
        draft: p after each node, [N+1, V].
        target: q after each node, [N+1, V].
        max_depth: nodes at this depth are leaves.
    """

    tree: DraftTree
    tokens: np.ndarray
    draft: np.ndarray
    target: np.ndarray
    max_depth: int

    def ratio(self, parent: int, token: int) -> float:
        """p/q of a token after a node."""
        q = self.target[parent, token]
        return float(self.draft[parent, token] / q) if q > 0 else np.inf


def stop_by_latent_times(drafted: Drafted, noise: TreeNoise, uncapped: bool = False) -> tuple[int, int | None]:
    """The stop node and the gap token emitted there; no token after a leaf (the target's law decides there)."""

    def visit(node: int) -> tuple[float, int, int | None]:
        """Time of a node, and where the output below it stops."""
        children = drafted.tree.children[node]
        if not children or drafted.tree.depth[node] >= drafted.max_depth:
            return float(noise.leaf[node]), node, None
        below = [visit(child) for child in children]
        if drafted.tree.draws[node] == DRAW_DETERMINISTIC:
            token = int(noise.node_token[node])
            for child, result in zip(children, below, strict=True):
                if drafted.tokens[child] == token:
                    return result
            return float(noise.node_uniform[node]), node, token
        if uncapped and len(children) > 1:
            return _uncapped(drafted, noise, node, below)
        results = []
        for child, (time, stop, token) in zip(children, below, strict=True):
            score = drafted.ratio(node, int(drafted.tokens[child])) * time
            if score >= 1:
                token = int(noise.child_token[child])
                ratio = drafted.ratio(node, token)
                score, stop = ratio + noise.child_uniform[child] * (1 - ratio), node
            results.append((score, stop, token))
        score, stop, token = min(results, key=lambda result: result[0])
        return 1 - (1 - score) ** len(children), stop, token

    _, stop, token = visit(0)
    return stop, token


def _uncapped(
    drafted: Drafted, noise: TreeNoise, node: int, below: list[tuple[float, int, int | None]]
) -> tuple[float, int, int | None]:
    children = drafted.tree.children[node]
    p, q = drafted.draft[node], drafted.target[node]
    count = len(children)
    scores = [
        drafted.ratio(node, int(drafted.tokens[child])) * time
        for child, (time, _, _) in zip(children, below, strict=True)
    ]
    best = int(np.argmin(scores))
    time = uncapped_time(p, q, count, scores[best])
    if time < 1:
        return time, below[best][1], below[best][2]
    token = int(noise.node_token[node])
    share = min(1.0, uncapped_time(p, q, count, drafted.ratio(node, token)))
    return share + noise.node_uniform[node] * (1 - share), node, token


def uncapped_time(p: np.ndarray, q: np.ndarray, count: int, score: float) -> float:
    """H(score) = int_0^score n R^{n-1} with R(s) = sum_c (p(c) - s q(c))_+, by Gauss quadrature between corners."""
    if score >= 1:
        return 1.0
    with np.errstate(divide="ignore", invalid="ignore"):
        corners = np.where(q > 0, p / q, 0.0)
    ends = np.unique(np.concatenate([[0.0, score], corners[corners < score]]))
    points, weights = np.polynomial.legendre.leggauss(count)
    total = 0.0
    for low, high in itertools.pairwise(ends):
        at = low + (high - low) * (points + 1) / 2
        survival = np.maximum(p[None] - at[:, None] * q[None], 0).sum(axis=1)
        total += float(weights @ (count * survival ** (count - 1))) * (high - low) / 2
    return total


def stop_by_second_time(drafted: Drafted, chains: np.ndarray, noise: TreeNoise) -> int:
    """SpecTr-GBV on K chains, with times in the block's units (not relative to the nodes)."""
    draws: Callable[[int], float] = lambda node: float(noise.child_uniform[node])  # noqa: E731
    times = []
    for chain in chains:
        nodes = [0, *chain.tolist()][: drafted.max_depth + 1]
        z = [1.0]
        for parent, child in itertools.pairwise(nodes):
            z.append(z[-1] * drafted.ratio(parent, int(drafted.tokens[child])))
        n = [0.0] * len(nodes)
        n[-1] = float(noise.leaf[nodes[-1]]) * z[-1]
        for i in range(len(nodes) - 1, 0, -1):
            if n[i] < z[i - 1]:
                n[i - 1] = n[i]
            else:
                ratio = drafted.ratio(nodes[i - 1], int(noise.child_token[nodes[i]]))
                n[i - 1] = z[i - 1] * (ratio + draws(nodes[i]) * (1 - ratio))
        times.append((n, nodes))
    roots = [n[0] for n, _ in times]
    best = int(np.argmin(roots))
    threshold = sorted(roots)[1] if len(roots) > 1 else 1.0
    n, nodes = times[best]
    accepted = max((i for i in range(1, len(nodes)) if n[i] < threshold), default=0)
    return int(nodes[accepted])
