"""Small laws that the tests of the block verifier share."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.block_verifier import Laws, Pairs, reference

# The pairs use rows out of order and twice, a weight below 1, and one residual that is all of q.
TARGET_ROW = np.asarray([2, 0, 2, 1], np.int32)
DRAFT_ROW = np.asarray([0, 1, 1, 0], np.int32)
LOG_WEIGHT = np.asarray([-0.2, 0.0, -1.5, -0.1], np.float32)
USES_DRAFT = np.asarray([True, True, False, True])


class Example(NamedTuple):
    """Logits of three rows of the target and two of the draft, with temperatures."""

    target_logits: jax.Array
    draft_logits: jax.Array
    target_inverse_temperature: jax.Array
    draft_inverse_temperature: jax.Array

    @property
    def laws(self) -> tuple[Laws, Laws]:
        """The laws with the reference's normalisers."""
        return (
            Laws(
                self.target_logits,
                reference.log_normalisers(self.target_logits, self.target_inverse_temperature),
                self.target_inverse_temperature,
            ),
            Laws(
                self.draft_logits,
                reference.log_normalisers(self.draft_logits, self.draft_inverse_temperature),
                self.draft_inverse_temperature,
            ),
        )


def example(vocab_size: int, dtype: str, seed: int = 0) -> Example:
    """Peaked laws; the maximum moves along the row, and some tokens are excluded."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(5, vocab_size)) * 3 + np.linspace(-8, 8, vocab_size)
    logits[:, rng.integers(vocab_size, size=vocab_size // 8)] = -np.inf
    # The draft resembles a row of the target.
    logits[3:] = logits[[2, 0]] + rng.normal(size=(2, vocab_size))
    logits = jnp.asarray(logits, dtype)
    return Example(
        logits[:3], logits[3:], jnp.asarray([1.0, 0.5, 1.25], jnp.float32), jnp.asarray([1.25, 0.7], jnp.float32)
    )


def pairs() -> Pairs:
    """Four pairs of rows."""
    return Pairs(TARGET_ROW, DRAFT_ROW, jnp.asarray(LOG_WEIGHT), USES_DRAFT)


def exact_log_normalisers(logits: jax.Array, inverse_temperature: jax.Array) -> np.ndarray:
    """In float64, by numpy."""
    values = np.asarray(logits, np.float64) * np.asarray(inverse_temperature, np.float64)[:, None]
    with np.errstate(divide="ignore"):
        return np.log(np.sum(np.exp(values), axis=1))


def exact_residuals(values: Example) -> np.ndarray:
    """max(w q - p, 0) of the four pairs in float64, by numpy, [4, V]."""
    laws = []
    for logits, temperature in (
        (values.target_logits, values.target_inverse_temperature),
        (values.draft_logits, values.draft_inverse_temperature),
    ):
        scaled = np.asarray(logits, np.float64) * np.asarray(temperature, np.float64)[:, None]
        normalisers = exact_log_normalisers(logits, temperature)[:, None]
        laws.append(np.exp(np.where(normalisers == -np.inf, -np.inf, scaled) - np.maximum(normalisers, -1e300)))
    weighted = np.exp(LOG_WEIGHT.astype(np.float64))[:, None] * laws[0][TARGET_ROW]
    return np.maximum(weighted - np.where(USES_DRAFT[:, None], laws[1][DRAFT_ROW], 0), 0)


def exact_sums(values: Example, width: int) -> np.ndarray:
    """Sums of those over blocks."""
    residuals = exact_residuals(values)
    return np.add.reduceat(residuals, np.arange(0, residuals.shape[1], width), axis=1)
