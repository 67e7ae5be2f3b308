"""Small pairs of target and draft laws on which the law of a verification rule is computed exactly.

An instance gives the next-token law of target and draft after every prefix, so that a rule which is only right for laws
that do not depend on the position fails on it. Probabilities are float64 NumPy arrays, never logarithms.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping

import numpy as np

Prefix = tuple[int, ...]
Law = Callable[[Prefix], np.ndarray]


class UnknownPrefixError(ValueError):
    """An instance read from a file says nothing about a prefix."""


@dataclasses.dataclass(frozen=True)
class Instance:
    """Target and draft laws over a small vocabulary.

    Attributes:
        name: for tables and messages.
        vocab_size: number of tokens, V.
        target: law of the next token after a prefix, float64 [V].
        draft: the same for the draft.
        block_draft: the draft's law after (committed tokens, drafted tokens) where it depends on what is committed, as
            for drafters that read the target's features; None means `draft` of all tokens.
    """

    name: str
    vocab_size: int
    target: Law
    draft: Law
    block_draft: Callable[[Prefix, Prefix], np.ndarray] | None = None

    def drafted(self, committed: Prefix, drafted: Prefix) -> np.ndarray:
        """The draft's law after `drafted` in a block that starts after `committed`, [V]."""
        if self.block_draft is not None:
            return self.block_draft(committed, drafted)
        return self.draft((*committed, *drafted))

    def target_joint(self, length: int) -> dict[Prefix, float]:
        """Probability of each sequence of `length` tokens under the target."""
        law: dict[Prefix, float] = {(): 1.0}
        for _ in range(length):
            law = {
                (*prefix, token): mass * float(self.target(prefix)[token])
                for prefix, mass in law.items()
                for token in range(self.vocab_size)
            }
        return law


def from_tables(
    name: str, vocab_size: int, target: Mapping[Prefix, np.ndarray], draft: Mapping[Prefix, np.ndarray]
) -> Instance:
    """An instance from tables; laws that are equal after every prefix extend to all prefixes.

    Raises:
        UnknownPrefixError: later, when a prefix outside the tables is asked for and the laws depend on the prefix.
    """

    def lookup(table: Mapping[Prefix, np.ndarray], which: str) -> Law:
        first = next(iter(table.values()))
        constant = all(np.array_equal(first, law) for law in table.values())

        def law(prefix: Prefix) -> np.ndarray:
            if prefix in table:
                return table[prefix]
            if constant:
                return first
            raise UnknownPrefixError(f"`{which}` of instance {name!r} has no law after prefix {prefix}")

        return law

    return Instance(name, vocab_size, lookup(target, "target"), lookup(draft, "draft"))


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def _cached(law: Law) -> Law:
    known: dict[Prefix, np.ndarray] = {}

    def lookup(prefix: Prefix) -> np.ndarray:
        if prefix not in known:
            known[prefix] = law(prefix)
        return known[prefix]

    return lookup


def random_instance(vocab_size: int, seed: int, distance: float = 0.7) -> Instance:
    """Laws drawn anew for every prefix; `distance` 0 makes draft and target equal, 1 makes them independent."""

    def logits(which: int, prefix: Prefix) -> np.ndarray:
        # The length is part of the seed so that no prefix shares its seed with a shorter one.
        return 1.5 * np.random.default_rng([seed, which, vocab_size, len(prefix), *prefix]).normal(size=vocab_size)

    def draft(prefix: Prefix) -> np.ndarray:
        return _softmax((1 - distance) * logits(0, prefix) + distance * logits(1, prefix))

    return Instance(
        f"random_v{vocab_size}_s{seed}_d{round(100 * distance)}",
        vocab_size,
        _cached(lambda prefix: _softmax(logits(0, prefix))),
        _cached(draft),
    )


def _with_zero(law: Law, place: Callable[[Prefix], int]) -> Law:
    def masked(prefix: Prefix) -> np.ndarray:
        probs = law(prefix).copy()
        probs[place(prefix) % len(probs)] = 0
        return probs / probs.sum()

    return _cached(masked)


def _one_hot(law: Law) -> Law:
    return _cached(lambda prefix: np.eye(len(law(prefix)))[int(np.argmax(law(prefix)))])


def edge_instances(vocab_size: int = 3) -> dict[str, Instance]:
    """Instances at the edges: equal, disjoint and near laws, zeros and one-hot laws on either side, a scarce token.

    Args:
        vocab_size: at least 2.

    Returns:
        Instances by name; their laws depend on the whole prefix.
    """
    base = random_instance(vocab_size, seed=5)
    near = random_instance(vocab_size, seed=5, distance=0.02)

    def half(first: bool) -> Law:
        def law(prefix: Prefix) -> np.ndarray:
            keep = (np.arange(vocab_size) + len(prefix)) % 2 == (0 if first else 1)
            probs = np.where(keep, base.target(prefix), 0)
            return probs / probs.sum()

        return _cached(law)

    def scarce(prefix: Prefix) -> np.ndarray:
        probs = np.full(vocab_size, 0.98 / max(vocab_size - 1, 1))
        probs[(sum(prefix) + len(prefix)) % vocab_size] = 0.02
        return probs / probs.sum()

    first_zero = lambda prefix: sum(prefix) + len(prefix)  # noqa: E731
    other_zero = lambda prefix: sum(prefix) + len(prefix) + 1  # noqa: E731
    laws: dict[str, tuple[Law, Law]] = {
        "equal": (base.target, base.target),
        "near": (near.target, near.draft),
        "disjoint": (half(True), half(False)),
        "zeros_in_draft": (base.target, _with_zero(base.draft, first_zero)),
        "zeros_in_target": (_with_zero(base.target, first_zero), base.draft),
        "zeros_in_both": (_with_zero(base.target, first_zero), _with_zero(base.draft, other_zero)),
        "one_hot_draft": (base.target, _one_hot(base.draft)),
        "one_hot_target": (_one_hot(base.target), base.draft),
        "one_hot_both": (_one_hot(base.target), _one_hot(base.draft)),
        "scarce": (base.target, _cached(scarce)),
    }
    return {name: Instance(f"{name}_v{vocab_size}", vocab_size, *pair) for name, pair in laws.items()}


def padded_vocabulary(instance: Instance, vocab_size: int) -> Instance:
    """The same laws over a larger vocabulary whose new tokens have probability zero.

    Raises:
        ValueError: if `vocab_size` is below the instance's.
    """
    if vocab_size < instance.vocab_size:
        raise ValueError(f"`vocab_size` must be at least {instance.vocab_size}; got {vocab_size}")

    def pad(law: Law) -> Law:
        def padded(prefix: Prefix) -> np.ndarray:
            # Prefixes with new tokens never occur; any law does.
            known = tuple(token if token < instance.vocab_size else 0 for token in prefix)
            return np.pad(law(known), (0, vocab_size - instance.vocab_size))

        return _cached(padded)

    return Instance(instance.name, vocab_size, pad(instance.target), pad(instance.draft))


def all_prefixes(vocab_size: int, length: int) -> list[Prefix]:
    """All prefixes of at most `length` tokens, shortest first."""
    return [prefix for n in range(length + 1) for prefix in itertools.product(range(vocab_size), repeat=n)]
