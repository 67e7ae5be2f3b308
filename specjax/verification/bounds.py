"""Bounds on the expected number of accepted draft tokens of one iteration, for K i.i.d. chains of L tokens.

Letters: p is the draft's law, q the target's, p_v and q_v their joint probabilities of a prefix v drafted in the
block, A(v) the probability that v is accepted. Rules differ in A only: E[accepted] = sum_v A(v). The linear programs
need SciPy (the `test` extra) and are for small vocabularies.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from specjax.testing.instances import Instance, Prefix


def prefix_probabilities(
    instance: Instance, draft_length: int, context: Prefix = ()
) -> tuple[dict[Prefix, float], dict[Prefix, float]]:
    """p_v and q_v of every prefix of at most `draft_length` tokens after `context`.

    Raises:
        ValueError: if `draft_length` is negative.
    """
    if draft_length < 0:
        raise ValueError(f"`draft_length` must be at least 0; got {draft_length}")
    draft: dict[Prefix, float] = {(): 1.0}
    target: dict[Prefix, float] = {(): 1.0}
    for length in range(draft_length):
        for prefix in list(itertools.product(range(instance.vocab_size), repeat=length)):
            p, q = instance.draft((*context, *prefix)), instance.target((*context, *prefix))
            for token in range(instance.vocab_size):
                draft[(*prefix, token)] = draft[prefix] * float(p[token])
                target[(*prefix, token)] = target[prefix] * float(q[token])
    return draft, target


def cic_bound(instance: Instance, draft_length: int, num_drafts: int, context: Prefix = ()) -> float:
    """sum_v q_v (1 - (1 - min(1, p_v/q_v))^K): the bound over couplings with conditionally independent drafts.

    Attained by the corrected SpecTr-GBV; for K = 1 it is the value of greedy block verification. It is not the optimum
    over all couplings. (SpecTr-GBV, arXiv 2604.25925, section 4.)

    Raises:
        ValueError: if `num_drafts` is below 1 or `draft_length` negative.
    """
    _check_num_drafts(num_drafts)
    draft, target = prefix_probabilities(instance, draft_length, context)
    return sum(
        q * (1 - (1 - min(draft[prefix] / q, 1.0)) ** num_drafts) for prefix, q in target.items() if prefix and q > 0
    )


def optimal_one_step(draft: Float[np.ndarray, " vocab"], target: Float[np.ndarray, " vocab"], num_drafts: int) -> float:
    """Largest acceptance probability of one token over all couplings of K i.i.d. drafts with the target.

    min over sets S of q(not S) + 1 - (1 - p(S))^K; the minimum is at a set of tokens of largest q/p, so one sort is
    enough.

    Raises:
        ValueError: if `num_drafts` is below 1, or the laws are not two distributions over one vocabulary.
    """
    _check_num_drafts(num_drafts)
    draft, target = np.asarray(draft, np.float64), np.asarray(target, np.float64)
    if draft.ndim != 1 or draft.shape != target.shape:
        raise ValueError(f"`draft` and `target` must have one shape [V]; got {draft.shape} and {target.shape}")
    for name, law in (("draft", draft), ("target", target)):
        if not (law.min() >= 0 and abs(law.sum() - 1) <= 1e-6):
            raise ValueError(f"`{name}` must hold probabilities that add up to 1; got {law.tolist()}")
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(draft > 0, target / draft, np.where(target > 0, np.inf, 0.0))
    order = np.argsort(-ratio, kind="stable")
    in_draft = np.concatenate([[0.0], np.cumsum(draft[order])])
    in_target = np.concatenate([[0.0], np.cumsum(target[order])])
    values = target.sum() - in_target + 1 - np.clip(1 - in_draft, 0.0, 1.0) ** num_drafts
    return float(values.min())


def optimum(instance: Instance, draft_length: int, num_drafts: int, *, with_carry: bool, context: Prefix = ()) -> float:
    """Largest expected number of accepted tokens over all couplings, by linear programming.

    A is realisable with K i.i.d. drafts iff it is super-additive along the tree and, for every antichain S (Hall),
    sum_{a in S} A(a) <= 1 - (1 - p(S))^K. It is lossless without carry-over iff A(vx) <= A(v) q(x|v), with carry-over
    iff A(v) <= q_v.

    Args:
        instance: the laws.
        draft_length: L.
        num_drafts: K.
        with_carry: whether rules may change the target of later iterations.
        context: committed tokens.

    Returns:
        The optimum.

    Raises:
        ImportError: if SciPy is not installed.
        ValueError: if the number of antichains is beyond 200,000, `num_drafts` below 1 or `draft_length` negative.
    """
    _check_num_drafts(num_drafts)
    from scipy.optimize import linprog
    from scipy.sparse import lil_matrix

    draft, target = prefix_probabilities(instance, draft_length, context)
    prefixes = [v for v in draft if v and draft[v] > 0 and target[v] > 0]
    if not prefixes:
        return 0.0
    index = {v: i for i, v in enumerate(prefixes)}
    antichains = _antichains((), index, draft_length, instance.vocab_size)
    rows: list[dict[int, float]] = []
    limits: list[float] = []
    for antichain in antichains:
        rows.append({index[v]: 1.0 for v in antichain})
        limits.append(1 - (1 - min(sum(draft[v] for v in antichain), 1.0)) ** num_drafts)
    for prefix in [(), *prefixes]:
        children = {index[(*prefix, x)]: 1.0 for x in range(instance.vocab_size) if (*prefix, x) in index}
        if prefix and children:
            rows.append({**children, index[prefix]: -1.0})
            limits.append(0.0)
        if not with_carry and prefix:
            for x in range(instance.vocab_size):
                child = (*prefix, x)
                if child in index:
                    rows.append({index[child]: 1.0, index[prefix]: -target[child] / target[prefix]})
                    limits.append(0.0)
    matrix = lil_matrix((len(rows), len(prefixes)))
    for number, row in enumerate(rows):
        for column, value in row.items():
            matrix[number, column] = value
    upper = [target[v] for v in prefixes]
    solution = linprog(
        -np.ones(len(prefixes)),
        A_ub=matrix.tocsr(),
        b_ub=np.asarray(limits),
        bounds=list(zip(np.zeros(len(upper)), upper, strict=True)),
        method="highs-ds",
        options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
    )
    if solution.status != 0:
        raise ArithmeticError(f"the linear program was not solved: {solution.message}")
    return -float(solution.fun)


def _check_num_drafts(num_drafts: int) -> None:
    if num_drafts < 1:
        raise ValueError(f"`num_drafts` must be at least 1; got {num_drafts}")


def _antichains(root: Prefix, index: dict[Prefix, int], draft_length: int, vocab_size: int) -> list[Sequence[Prefix]]:
    """All non-empty antichains of prefixes below `root`."""

    def below(prefix: Prefix) -> list[tuple[Prefix, ...]]:
        """Antichains within the subtree of `prefix`, the empty one included."""
        if prefix not in index:
            return [()]
        inner: list[tuple[Prefix, ...]] = [()]
        if len(prefix) < draft_length:
            inner = combine(prefix)
        return [*inner, (prefix,)]

    def combine(prefix: Prefix) -> list[tuple[Prefix, ...]]:
        sets: list[tuple[Prefix, ...]] = [()]
        for token in range(vocab_size):
            parts = below((*prefix, token))
            if len(sets) * len(parts) > 200_000:
                raise ValueError(
                    f"`vocab_size` {vocab_size} and `draft_length` {draft_length} give too many antichains"
                )
            sets = [(*one, *other) for one in sets for other in parts]
        return sets

    return [antichain for antichain in combine(root) if antichain]
