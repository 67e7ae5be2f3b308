"""Exact law of one iteration of a latent-time rule: the times are integrated, node by node, from the leaves up.

For every node and every prefix that can lead to it this computes the joint law of what the node emits and of its time,
with the tokens drafted below it summed over. Scores, node times, gap laws and gap times come from the functions that
the sampler calls; nothing is assumed about them but that densities are constant between the images of the corners,
which is checked on every piece, in units of probability.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.types import DraftTree
from specjax.verification.emissions import Emission
from specjax.verification.enumerate_drafts import LawTables
from specjax.verification.gap_draws import residual_masses
from specjax.verification.latent_times import (
    child_log_score,
    fill_gap,
    gap_time,
    minimum_log_time,
    node_selections,
)
from specjax.verification.multi_draft_block import MultiDraftBlockRule, is_last_level
from specjax.verification.start_curve import StartCurve

# Densities that differ by more than this much probability on a piece mean that the method does not apply to the rule.
_TOLERANCE = 1e-11
_MERGE = 1e-14
_NO_CORNERS = np.zeros(0)


@dataclasses.dataclass(frozen=True)
class TimeLaw:
    """Joint law of emitted tokens and a time, constant between breaks.

    Attributes:
        breaks: increasing, [m+1].
        density: for each emitted sequence its density on the pieces, [m].
    """

    breaks: np.ndarray
    density: dict[Prefix, np.ndarray]

    @property
    def total(self) -> np.ndarray:
        """Density of the time alone, [m]."""
        return np.sum(list(self.density.values()), axis=0)

    def masses(self) -> dict[Prefix, float]:
        """Law of the emitted tokens alone."""
        width = np.diff(self.breaks)
        return {tokens: float(density @ width) for tokens, density in self.density.items()}


class _PieceSum:
    """Collects (tokens, interval, mass) and spreads them over the union of all intervals' ends."""

    def __init__(self) -> None:
        self.parts: list[tuple[Prefix, np.ndarray, np.ndarray]] = []

    def add(self, tokens: Prefix, breaks: np.ndarray, density: np.ndarray) -> None:
        """Adds a piecewise constant density."""
        self.parts.append((tokens, breaks, density))

    def law(self, low: float = 0.0, high: float = 1.0) -> TimeLaw:
        """The sum."""
        ends = np.concatenate([np.array([low, high]), *(breaks for _, breaks, _ in self.parts)])
        breaks = _distinct(np.clip(ends, low, high))
        middles = (breaks[1:] + breaks[:-1]) / 2
        density: dict[Prefix, np.ndarray] = {}
        for tokens, own, values in self.parts:
            if len(own) < 2:
                continue
            piece = np.searchsorted(own, middles, side="right") - 1
            inside = (piece >= 0) & (piece < len(values))
            spread = np.where(inside, values[np.clip(piece, 0, len(values) - 1)], 0.0)
            density[tokens] = density.get(tokens, 0.0) + spread
        return TimeLaw(breaks, density)


def _distinct(ends: np.ndarray) -> np.ndarray:
    ends = np.unique(ends)
    keep = np.append(np.diff(ends) > _MERGE * np.maximum(1.0, np.abs(ends[1:])), True)
    return ends[keep]


@dataclasses.dataclass
class NodeLaws:
    """Laws of all nodes of a tree, computed from the leaves up and kept.

    Attributes:
        rule: the rule.
        tree: shape of the proposal.
        tables: the laws that the rule verifies against.
        max_depth: nodes at this depth are leaves.
    """

    rule: MultiDraftBlockRule
    tree: DraftTree
    tables: LawTables
    max_depth: int

    def __post_init__(self) -> None:
        self.kinds = node_selections(self.tree, self.rule.selection)
        self.known: dict[tuple[Any, int, int], TimeLaw] = {}
        self.shapes = [self._shape(node) for node in range(self.tree.num_nodes)]

    def _shape(self, node: int) -> tuple:
        return (self.kinds[node], *(self._shape(child) for child in self.tree.children[node]))

    def node_law(self, node: int, code: int) -> TimeLaw:
        """Law of a node after the prefix with this code."""
        key = (self.shapes[node], self.tree.depth[node], code)
        if key not in self.known:
            self.known[key] = self._node_law(node, code)
        return self.known[key]

    def _node_law(self, node: int, code: int) -> TimeLaw:
        target = self.tables.target[code]
        kind = self.kinds[node] if self.tree.depth[node] < self.max_depth else "leaf"
        if kind == "leaf":
            return TimeLaw(np.array([0.0, 1.0]), {(y,): target[[y]] for y in np.flatnonzero(target).tolist()})
        if kind == "membership":
            return self._membership(node, code)
        if kind == "minimum":
            return self._minimum(node, code)
        with np.errstate(divide="ignore"):
            log_draft, log_target = np.log(self.tables.draft[code]), np.log(target)
        is_last = is_last_level(self.tree, node, np.int32(self.max_depth))
        curve = _curve_of(self.rule, len(self.tree.children[node]))(is_last, log_draft, log_target)
        return self._curve([self._children(child, code) for child in self.tree.children[node]], code, curve)

    def _children(self, child: int, code: int) -> dict[int, TimeLaw]:
        """Law of a drafted child for each token that it can carry."""
        tokens = np.flatnonzero(self.tables.draft[code]).tolist()
        return {token: self.node_law(child, self._code(code, token)) for token in tokens}

    def _code(self, code: int, token: int) -> int:
        return code * self.tables.target.shape[1] + token + 1

    def _log_ratio(self, code: int) -> np.ndarray:
        """log rho of every token, +inf where the target is zero."""
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.log(self.tables.draft[code]) - np.log(self.tables.target[code])
        return np.where(self.tables.target[code] > 0, ratio, np.inf)

    def _membership(self, node: int, code: int) -> TimeLaw:
        pieces = _PieceSum()
        order = np.argsort(-self.tables.draft[code], kind="stable").tolist()
        carried = dict(zip(order, self.tree.children[node], strict=False))
        for token in np.flatnonzero(self.tables.target[code]).tolist():
            mass = self.tables.target[code, token]
            if token not in carried:
                pieces.add((token,), np.array([0.0, 1.0]), np.array([mass]))
                continue
            law = self.node_law(carried[token], self._code(code, token))
            for tokens, density in law.density.items():
                pieces.add((token, *tokens), law.breaks, mass * density)
        return pieces.law()

    def gap_filled_scores(self, code: int, node: int = 0) -> list[TimeLaw]:
        """Law of each child's gap-filled score at a node of kind "minimum"; an overflow emits its gap token."""
        log_ratio = self._log_ratio(code)
        with np.errstate(divide="ignore"):
            log_target, log_draft = np.log(self.tables.target[code]), np.log(self.tables.draft[code])
        gap_law = np.asarray(_residual_masses(log_target, log_draft))
        return [
            self._gap_filled(self._children(child, code), code, log_ratio, gap_law)
            for child in self.tree.children[node]
        ]

    def _minimum(self, node: int, code: int) -> TimeLaw:
        scores = self.gap_filled_scores(code, node)
        count = np.float64(len(scores))

        def node_time(score: np.ndarray) -> np.ndarray:
            with np.errstate(divide="ignore"):
                return np.exp(_padded(_minimum_log_time, np.log(score), count))

        pieces = _PieceSum()
        for index, score in enumerate(scores):
            self._select(pieces, score, scores[:index] + scores[index + 1 :], node_time)
        return pieces.law()

    def _gap_filled(self, laws: dict[int, TimeLaw], code: int, log_ratio: np.ndarray, gap_law: np.ndarray) -> TimeLaw:
        pieces = _PieceSum()
        overflow = 0.0
        for token, law in laws.items():
            with np.errstate(divide="ignore"):
                ends = np.exp(_padded(_child_log_score, np.log(law.breaks), log_ratio[token]))
            # A time of 0 scores 0, also where the ratio is infinite.
            ends[0] = 0.0
            mass = self.tables.draft[code, token]
            inside, density, lost = _cut(law, ends, mass, 1.0)
            overflow += lost
            for tokens, values in density.items():
                pieces.add((token, *tokens), inside, values)
        if gap_law.any():
            share = gap_law / gap_law.sum()
            for token in np.flatnonzero(gap_law).tolist():
                ends = np.exp(np.asarray(_fill_gap(log_ratio[token], np.array([0.0, 0.5, 1.0]))))
                self._check(abs(ends[2] - 2 * ends[1] + ends[0]))
                pieces.add((token,), ends[[0, 2]], np.array([overflow * share[token] / (ends[2] - ends[0])]))
        else:
            self._check(overflow)
        return pieces.law()

    def _curve(self, children: list[dict[int, TimeLaw]], code: int, curve: StartCurve) -> TimeLaw:
        scores = [self._raw(laws, code, curve) for laws in children]
        pieces = _PieceSum()
        limits = np.asarray(_unit_scores(curve))
        for token in children[0]:

            def node_time(score: np.ndarray, token: int = token) -> np.ndarray:
                return _padded(_curve_time, score, curve, np.int32(token))

            for index, score in enumerate(scores):
                own = TimeLaw(score.breaks, {k: v for k, v in score.density.items() if k[0] == token})
                if own.density:
                    others = scores[:index] + scores[index + 1 :]
                    self._select(pieces, own, others, node_time, np.asarray(curve.corners), float(limits[token]))
        accepted = pieces.law()
        overflow = 1 - sum(accepted.masses().values())
        share = np.asarray(curve.share)
        masses = self.tables.target[code] * (1 - share)
        if masses.sum() > 0:
            for token in np.flatnonzero(masses).tolist():
                ends = np.asarray(_gap_time(share[token], np.array([0.0, 1.0])))
                mass = overflow * masses[token] / masses.sum()
                pieces.add((token,), ends, np.array([mass / (ends[1] - ends[0])]))
        else:
            self._check(abs(overflow))
        return pieces.law()

    def _raw(self, laws: dict[int, TimeLaw], code: int, curve: StartCurve) -> TimeLaw:
        """Law of one child's raw score; scores of excluded tokens are infinite and left out."""
        pieces = _PieceSum()
        highest = 0.0
        for token, law in laws.items():
            with np.errstate(divide="ignore"):
                ends = _padded(_curve_scores, np.log(law.breaks), curve, np.int32(token))
            if np.isinf(ends).any():
                continue
            highest = max(highest, float(ends[-1]))
            inside, density, _ = _cut(law, ends, self.tables.draft[code, token], np.inf)
            for tokens, values in density.items():
                pieces.add((token, *tokens), inside, values)
        return pieces.law(0.0, max(highest, 1.0))

    def _select(
        self,
        pieces: _PieceSum,
        own: TimeLaw,
        others: list[TimeLaw],
        node_time: Callable[[np.ndarray], np.ndarray],
        corners: np.ndarray = _NO_CORNERS,
        limit: float = np.inf,
    ) -> None:
        """Adds the event that this child has the smallest score, with the node's time instead of the score."""
        ends = np.concatenate([own.breaks, corners, *(law.breaks for law in others)])
        breaks = _distinct(np.clip(ends, own.breaks[0], min(own.breaks[-1], limit)))
        if len(breaks) < 2:
            return
        middles = (breaks[1:] + breaks[:-1]) / 2
        first = _win_probability(others, breaks[:-1], middles)
        second = _win_probability(others, middles, breaks[1:])
        times, middle_times = node_time(breaks), node_time(middles)
        width = np.diff(times)
        piece = np.clip(np.searchsorted(own.breaks, middles, side="right") - 1, 0, len(own.breaks) - 2)
        for tokens, density in own.density.items():
            mass = density[piece] * (first + second)
            # Constant density in the node's time: both halves of a piece hold mass in proportion to their length.
            left = density[piece] * first
            self._check(np.max(np.abs(left * width - mass * (middle_times - times[:-1]))))
            with np.errstate(invalid="ignore", divide="ignore"):
                values = np.where(width > 0, mass / width, 0.0)
            pieces.add(tokens, times, values)

    def _check(self, deviation: float) -> None:
        if deviation > _TOLERANCE:
            raise ArithmeticError(f"the rule's time density is not constant on a piece: off by {deviation:.3g}")


def _cut(
    law: TimeLaw, ends: np.ndarray, mass: float, limit: float
) -> tuple[np.ndarray, dict[Prefix, np.ndarray], float]:
    """Moves a law to scores `ends` (linear between), keeps what lies below `limit`, and returns the mass beyond it."""
    times = np.diff(law.breaks)
    with np.errstate(divide="ignore", invalid="ignore"):
        width = np.diff(ends)
        slope = np.where((width > 0) & np.isfinite(width), times / width, 0.0)
    inside = np.minimum(ends, limit)
    density = {tokens: mass * values * slope for tokens, values in law.density.items()}
    kept = sum(float(values @ np.diff(inside)) for values in density.values()) if density else 0.0
    total = mass * sum(law.masses().values())
    return inside, density, max(total - kept, 0.0)


_quadrature = functools.cache(np.polynomial.legendre.leggauss)


def _win_probability(others: list[TimeLaw], low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Integral over [low, high] of P(all others score above); exact, their survivals are linear there."""
    points, weights = _quadrature(len(others) // 2 + 1)
    at = low[:, None] + (high - low)[:, None] * (points + 1) / 2
    product = np.ones_like(at)
    for law in others:
        below = np.concatenate([[0.0], np.cumsum(law.total * np.diff(law.breaks))])
        product = product * (1 - np.interp(at, law.breaks, below))
    return product @ weights * (high - low) / 2


def integrate_below(own: TimeLaw, others: list[TimeLaw]) -> float:
    """P(a time with law `own` lies below 1 and below independent times with the laws `others`)."""
    ends = np.concatenate([own.breaks, np.array([1.0]), *(law.breaks for law in others)])
    breaks = _distinct(np.clip(ends, own.breaks[0], min(own.breaks[-1], 1.0)))
    middles = (breaks[1:] + breaks[:-1]) / 2
    piece = np.clip(np.searchsorted(own.breaks, middles, side="right") - 1, 0, len(own.breaks) - 2)
    return float(own.total[piece] @ _win_probability(others, breaks[:-1], breaks[1:]))


def _padded(function: Callable[..., Any], values: np.ndarray, *others: Any) -> np.ndarray:
    """Applies a jitted function to an array of varying length; a few lengths only, so that little is compiled."""
    size = max(16, 1 << (len(values) - 1).bit_length())
    padded = np.concatenate([values, np.full(size - len(values), values[-1])])
    return np.array(function(padded, *others))[: len(values)]


_child_log_score = jax.jit(lambda log_time, log_ratio: child_log_score(log_ratio, log_time))
_minimum_log_time = jax.jit(minimum_log_time)
_fill_gap = jax.jit(fill_gap)
_gap_time = jax.jit(gap_time)
_residual_masses = jax.jit(lambda log_target, log_draft: residual_masses(log_target, log_draft, jnp.bool_(True)))
_curve_time = jax.jit(lambda score, curve, token: curve.node_time(token, score))
_curve_scores = jax.jit(lambda log_time, curve, token: curve.scores(token, log_time))


@jax.jit
def _unit_scores(curve: StartCurve) -> jax.Array:
    """For each token the score at which the node's time reaches 1, infinite if it does not."""
    tokens = jnp.arange(curve.ratio.shape[0], dtype=jnp.int32)
    usable = curve.ratio < jnp.inf
    end = curve.delay + jnp.where(usable, curve.ratio, 0)

    def bisect(_: Any, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = (low + high) / 2
        below = curve.node_time(tokens, middle) < 1
        return jnp.where(below, middle, low), jnp.where(below, high, middle)

    limit, _ = jax.lax.fori_loop(0, 80, bisect, (curve.delay, end))
    return jnp.where(usable & (curve.node_time(tokens, end) >= 1), limit, jnp.inf)


@functools.cache
def _curve_of(rule: MultiDraftBlockRule, num_children: int) -> Callable[..., StartCurve]:
    return jax.jit(functools.partial(rule.node_curve, num_children))


def times_iteration(
    rule: MultiDraftBlockRule, tree: DraftTree, instance: Instance, context: Prefix, max_depth: int
) -> list[Emission]:
    """What one iteration emits after `context`, with exact probabilities. Call it under 64-bit JAX.

    Raises:
        ValueError: if siblings of the tree are drawn in a way that latent times do not cover.
        ArithmeticError: if the rule's functions do not have the form that the integration needs.
    """
    enumeration = NodeLaws(rule, tree, LawTables.of(instance, context, tree.max_depth), max_depth)
    law = enumeration.node_law(0, 0)
    return [Emission(tokens[:-1], tokens[-1], mass) for tokens, mass in law.masses().items() if mass > 0]
