"""All drafts of a tree with their probabilities, and the laws at their nodes, for exact enumeration."""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax.testing.instances import Instance, Prefix
from specjax.types import DRAW_DETERMINISTIC, DRAW_WITHOUT_REPLACEMENT, DraftTree

_LARGEST_DEFECT = 1e-9


@dataclasses.dataclass(frozen=True)
class LawTables:
    """Laws after every prefix of at most `max_depth` drafted tokens, in the order of their codes.

    The code of the empty prefix is 0, that of a prefix with one more token `code * V + token + 1`.

    Attributes:
        target: float64 [codes, V].
        draft: float64 [codes, V]; the rows of the longest prefixes repeat the first, nothing is drafted after them.
    """

    target: np.ndarray
    draft: np.ndarray

    @classmethod
    def of(cls, instance: Instance, context: Prefix, max_depth: int) -> LawTables:
        """Reads the laws of an instance after `context`.

        Raises:
            ValueError: if a law has another length than the vocabulary, or is no probability distribution.
        """
        prefixes: list[Prefix] = [()]
        level: list[Prefix] = [()]
        for _ in range(max_depth):
            level = [(*prefix, token) for prefix in level for token in range(instance.vocab_size)]
            prefixes += level
        inner = [prefix if len(prefix) < max_depth or max_depth == 0 else () for prefix in prefixes]
        return cls(
            _stack(instance, "target", [instance.target((*context, *prefix)) for prefix in prefixes]),
            _stack(instance, "draft", [instance.drafted(context, prefix) for prefix in inner]),
        )


def _stack(instance: Instance, which: str, laws: list[np.ndarray]) -> np.ndarray:
    for law in laws:
        if np.shape(law) != (instance.vocab_size,):
            raise ValueError(
                f"`{which}` of instance {instance.name!r} must give {instance.vocab_size} probabilities; "
                f"got shape {np.shape(law)}"
            )
    rows = np.stack(laws)
    bad = ~((rows.min(axis=1) >= 0) & (np.abs(rows.sum(axis=1) - 1) <= _LARGEST_DEFECT))
    if bad.any():
        raise ValueError(
            f"`{which}` of instance {instance.name!r} must give probabilities that add up to 1; "
            f"got {rows[np.argmax(bad)].tolist()}"
        )
    return rows


@dataclasses.dataclass(frozen=True)
class Drafts:
    """All drafts of positive probability.

    Attributes:
        tokens: int32 [T, N+1]; the root's token is 0, and so are tokens below `max_depth`.
        codes: code of the prefix that ends at each node, int64 [T, N+1].
        probability: float64 [T].
    """

    tokens: np.ndarray
    codes: np.ndarray
    probability: np.ndarray


def all_drafts(tables: LawTables, tree: DraftTree, max_depth: int) -> Drafts:
    """Enumerates the tokens of all nodes down to `max_depth`, as the tree says they are drawn.

    Deterministic children are the most probable tokens of the draft's law, in order.
    """
    vocab_size = tables.target.shape[1]
    tokens = np.zeros((1, 1), np.int32)
    codes = np.zeros((1, 1), np.int64)
    probability = np.ones(1)
    for node in range(1, tree.num_nodes):
        if tree.depth[node] > max_depth:
            tokens = np.pad(tokens, ((0, 0), (0, 1)))
            codes = np.pad(codes, ((0, 0), (0, 1)))
            continue
        parent = tree.parent[node]
        law = _law_of_child(tables.draft[codes[:, parent]], tree, node, tokens)
        row, token = np.nonzero(law)
        probability = probability[row] * law[row, token]
        codes = np.column_stack([codes[row], codes[row, parent] * vocab_size + token + 1])
        tokens = np.column_stack([tokens[row], token.astype(np.int32)])
    return Drafts(tokens, codes, probability)


def _law_of_child(law: np.ndarray, tree: DraftTree, node: int, tokens: np.ndarray) -> np.ndarray:
    """Law of a node's token given its elder siblings, [T, V]."""
    parent = tree.parent[node]
    elder = [sibling for sibling in tree.children[parent] if sibling < node]
    if tree.draws[parent] == DRAW_DETERMINISTIC:
        order = np.argsort(-law, axis=1, kind="stable")
        return np.eye(law.shape[1])[order[:, len(elder)]]
    if tree.draws[parent] == DRAW_WITHOUT_REPLACEMENT:
        law = law.copy()
        for sibling in elder:
            law[np.arange(len(law)), tokens[:, sibling]] = 0
        total = law.sum(axis=1, keepdims=True)
        if (total == 0).any():
            raise ValueError(f"`tree` draws more children without replacement at node {parent} than the law supports")
        return law / total
    return law


def rule_laws(tables: LawTables, tree: DraftTree, drafts: Drafts, max_depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Log laws as a rule gets them: the draft's at the internal nodes [T, I, V], the target's at all nodes [T, N+1, V].

    A node whose children are deterministic carries the one-hot law of the first. Nodes at or below `max_depth`, whose
    children do not exist, carry the law of the root, which no rule may look at.
    """
    with np.errstate(divide="ignore"):
        target = np.log(tables.target)[drafts.codes]
        draft = np.log(tables.draft)[drafts.codes[:, list(tree.internal)]]
        for row, node in enumerate(tree.internal):
            if tree.draws[node] == DRAW_DETERMINISTIC and tree.depth[node] < max_depth:
                child = tree.children[node][0]
                draft[:, row] = np.log(np.eye(target.shape[-1])[drafts.tokens[:, child]])
    return draft, target
