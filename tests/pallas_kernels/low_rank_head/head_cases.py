"""Small heads and the comparison with the reference that every implementation has to pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.low_rank_head import prepare_weights, reference
from pallas_kernels.low_rank_head.weights import PreparedHead

TEMPERATURES = (1.0, 0.0, 0.5, 2.0)


def make_head(
    *,
    vocab_size: int = 300,
    hidden_size: int = 96,
    rank: int | None = 40,
    num_valid: int = 270,
    dtype: Any = jnp.bfloat16,
) -> PreparedHead:
    """A head whose invalid tokens have by far the greatest logits, and whose tokens 5, 100 and 200 are equal."""
    down_key, last_key = jax.random.split(jax.random.key(7))
    inner = hidden_size if rank is None else rank
    last = jax.random.normal(last_key, (inner, vocab_size), jnp.float32) * jnp.float32(2 * inner**-0.5)
    last = last.at[:, num_valid:].mul(20.0).at[:, 100].set(last[:, 5]).at[:, 200].set(last[:, 5])
    if rank is None:
        params = {"kernel": last.astype(dtype)}
    else:
        down = jax.random.normal(down_key, (hidden_size, rank), jnp.float32) * jnp.float32(hidden_size**-0.5)
        params = {"down": down.astype(dtype), "up": last.astype(dtype)}
    return prepare_weights(params, vocab_size=vocab_size, num_valid_tokens=num_valid)


def make_hidden(head: PreparedHead, batch: int) -> jax.Array:
    """States whose first row makes the equal tokens the greatest."""
    hidden = jax.random.normal(jax.random.key(8), (batch, head.hidden_size), jnp.float32)
    token = head.rows[5].astype(jnp.float32)
    token = (
        jnp.matmul(head.down[: head.hidden_size].astype(jnp.float32), token)
        if head.down is not None
        else token[: head.hidden_size]
    )
    return hidden.at[0].set(token * jnp.float32(4.0))


def row_keys(batch: int) -> jax.Array:
    return jax.random.split(jax.random.key(9), batch)


def temperatures(batch: int) -> jax.Array:
    return jnp.asarray([TEMPERATURES[row % len(TEMPERATURES)] for row in range(batch)], jnp.float32)


def check_draw(draw: Any, expected: Any) -> None:
    np.testing.assert_array_equal(draw.token, expected.token)
    np.testing.assert_allclose(draw.logsumexp, expected.logsumexp, rtol=0, atol=1e-5)
    np.testing.assert_allclose(draw.log_prob, expected.log_prob, rtol=0, atol=2e-5)


def check_greedy(draw: Any, hidden: jax.Array, head: PreparedHead) -> None:
    check_draw(draw, reference.greedy(hidden, head))
    assert int(draw.token[0]) == 5


def check_sample(draw: Any, hidden: jax.Array, head: PreparedHead) -> None:
    batch = hidden.shape[0]
    check_draw(draw, reference.sample(hidden, head, row_keys(batch), temperatures(batch)))


def check_logits(logits: jax.Array, hidden: jax.Array, head: PreparedHead) -> None:
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reference.logits(hidden, head), rtol=0, atol=2e-5)
