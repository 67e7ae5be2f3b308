"""K-SEQ and recursive rejection at every token. p is the draft's law, q the target's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.testing.rules_numpy.outcomes import Outcomes, add

OneStep = Callable[[np.ndarray, np.ndarray, list[int]], tuple[dict[int, float], np.ndarray]]
"""(p, q, candidates) -> probability of accepting each token, and the mass of each token after all are rejected."""


def spectr(instance: Instance, drafts: tuple[Prefix, ...]) -> Outcomes:
    """K-SEQ; drafts that agree with the emitted tokens stay active."""
    return _sequence(instance, drafts, _k_sequential)


def recursive_rejection(instance: Instance, drafts: tuple[Prefix, ...]) -> Outcomes:
    """Recursive rejection with replacement; drafts that agree stay active."""
    return _sequence(instance, drafts, _recursive)


def recursive_rejection_distinct(p: np.ndarray, q: np.ndarray, candidates: list[int]) -> dict[int, float]:
    """Law of the emitted token for candidates that were drawn without replacement."""
    law: dict[int, float] = {}
    reached, residual, remaining = 1.0, q.copy(), p.copy()
    for x in candidates:
        accept = min(1.0, residual[x] / remaining[x])
        law[x] = law.get(x, 0.0) + reached * accept
        reached *= 1 - accept
        residual = _normalised(np.maximum(residual - remaining, 0), residual)
        remaining = remaining.copy()
        remaining[x] = 0
        remaining = _normalised(remaining, remaining)
    for y, mass in enumerate(residual):
        law[y] = law.get(y, 0.0) + reached * mass
    return law


def _sequence(instance: Instance, drafts: tuple[Prefix, ...], one_step: OneStep) -> Outcomes:
    outcomes: Outcomes = {}

    def walk(prefix: Prefix, reached: float) -> None:
        depth = len(prefix)
        if depth == len(drafts[0]):
            for y, mass in enumerate(instance.target(prefix)):
                add(outcomes, prefix, y, reached * mass)
            return
        candidates = [draft[depth] for draft in drafts if draft[:depth] == prefix]
        accepted, rest = one_step(instance.draft(prefix), instance.target(prefix), candidates)
        for x, mass in accepted.items():
            if mass > 0:
                walk((*prefix, x), reached * mass)
        for y, mass in enumerate(rest):
            add(outcomes, prefix, y, reached * mass)

    walk((), 1.0)
    return outcomes


def division_rate(p: np.ndarray, q: np.ndarray, count: int) -> float:
    """The rho of K-SEQ by bisection, upper end."""
    low, high = 1.0, float(count)
    for _ in range(60):
        rho = (low + high) / 2
        beta = np.minimum(p, q / rho).sum()
        low, high = (low, rho) if 1 - (1 - beta) ** count <= rho * beta else (rho, high)
    return high


def _k_sequential(p: np.ndarray, q: np.ndarray, candidates: list[int]) -> tuple[dict[int, float], np.ndarray]:
    count = len(candidates)
    rho = division_rate(p, q, count)
    taken = np.minimum(p, q / rho)
    beta = taken.sum()
    accepted: dict[int, float] = {}
    reached = 1.0
    for x in candidates:
        accept = min(1.0, q[x] / (rho * p[x]))
        accepted[x] = accepted.get(x, 0.0) + reached * accept
        reached *= 1 - accept
    scale = (1 - (1 - beta) ** count) / beta if beta > 0 else 0.0
    return accepted, reached * _normalised(np.maximum(q - taken * scale, 0), q)


def _recursive(p: np.ndarray, q: np.ndarray, candidates: list[int]) -> tuple[dict[int, float], np.ndarray]:
    accepted: dict[int, float] = {}
    reached, residual = 1.0, q
    for x in candidates:
        accept = min(1.0, residual[x] / p[x])
        accepted[x] = accepted.get(x, 0.0) + reached * accept
        reached *= 1 - accept
        residual = _normalised(np.maximum(residual - p, 0), residual)
    return accepted, reached * residual


def _normalised(masses: np.ndarray, fallback: np.ndarray) -> np.ndarray:
    return masses / masses.sum() if masses.sum() > 0 else fallback
