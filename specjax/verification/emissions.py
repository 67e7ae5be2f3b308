"""What an iteration emits, and a table that adds up the probabilities of equal emissions."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.testing.instances import Prefix

# Carries that differ by less are one state of the iteration.
_CARRY_DECIMALS = 9


@dataclasses.dataclass(frozen=True)
class Emission:
    """One possible result of an iteration.

    Attributes:
        accepted: accepted drafted tokens.
        next_token: the token after them.
        probability: float64.
        carry: the carry for the next iteration.
    """

    accepted: Prefix
    next_token: int
    probability: float
    carry: Any = ()

    @property
    def tokens(self) -> Prefix:
        """All emitted tokens."""
        return (*self.accepted, self.next_token)


class EmissionTable:
    """Adds up weighted outcomes of many drafts."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sums: dict[bytes, tuple[float, Any]] = {}

    def add(self, codes: np.ndarray, mass: np.ndarray, carries: Any) -> None:
        """Adds outcomes.

        Args:
            codes: code of the accepted prefix (see `LawTables`), [T, C].
            mass: probability of draft, choice and next token, [T, C, V].
            carries: the carry after each of them, leaves [T or more, C, V, ...].
        """
        draft, choice, token = np.nonzero(mass)
        weight = mass[draft, choice, token]
        leaves, structure = jax.tree.flatten(carries)
        leaves = [np.asarray(leaf)[: len(mass)] for leaf in leaves]
        chosen = [leaf[draft, choice, token].reshape(len(weight), -1) for leaf in leaves]
        keys = np.column_stack([codes[draft, choice], token, *(np.round(leaf, _CARRY_DECIMALS) for leaf in chosen)])
        # Infinities and NaN of a carry compare as bytes; adding 0 makes the two zeros one.
        rows = np.ascontiguousarray(keys.astype(np.float64) + 0.0)
        _, first, group = np.unique(
            rows.view([("", rows.dtype)] * rows.shape[1]), return_index=True, return_inverse=True
        )
        sums = np.bincount(group.reshape(-1), weights=weight)
        for index, total in zip(first, sums, strict=True):
            place = (draft[index], choice[index], token[index])
            known, carry = self._sums.get(rows[index].tobytes(), (0.0, None))
            if carry is None:
                carry = (int(codes[place[:2]]), int(place[2]), [leaf[place] for leaf in leaves])
            self._sums[rows[index].tobytes()] = (known + float(total), carry)
        self._structure = structure

    def emissions(self) -> list[Emission]:
        """The distinct emissions."""
        return [
            Emission(
                decode_prefix(code, self._vocab_size),
                token,
                mass,
                jax.tree.unflatten(self._structure, [jnp.asarray(leaf) for leaf in leaves]),
            )
            for mass, (code, token, leaves) in self._sums.values()
        ]


def decode_prefix(code: int, vocab_size: int) -> Prefix:
    """The prefix that belongs to a code: 0 for none, `code * V + token + 1` for one more token."""
    tokens: list[int] = []
    while code > 0:
        code, token = divmod(code - 1, vocab_size)
        tokens.append(token)
    return tuple(reversed(tokens))
