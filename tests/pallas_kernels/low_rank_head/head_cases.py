"""Small heads and the comparison with the reference that every implementation has to pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.low_rank_head import prepare_weights, reference
from pallas_kernels.low_rank_head.statistics import HeadDraw
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


def states_of_no_token() -> tuple[jax.Array, PreparedHead]:
    """States and a head whose rows have logits of -inf everywhere, below -1e30 everywhere, and -inf but for token 9."""
    last = np.full((16, 130), -np.inf, np.float32)
    last[1] = -1e33
    last[2, 9] = 3
    head = prepare_weights({"kernel": jnp.asarray(np.where(np.isinf(last), -3e38, last), jnp.bfloat16)})
    hidden = np.zeros((3, 16), np.float32)
    # Products overflow to -inf.
    hidden[0, 0], hidden[1, 1], hidden[2, 2] = 1000, 1, 1000
    return jnp.asarray(hidden), head


def check_no_token(draw: HeadDraw) -> None:
    """The documented values of those rows."""
    assert np.asarray(draw.token).tolist() == [0, 0, 9]
    assert np.isnan(draw.log_prob[0])
    np.testing.assert_allclose(draw.log_prob[1], 0, atol=1e-6)
    assert draw.log_prob[2] == 0
    assert draw.logsumexp[0] == -np.inf
    np.testing.assert_allclose(draw.logsumexp[1], -1e33, rtol=1e-2)
    assert draw.logsumexp[2] == 3000


def check_extreme_temperatures(draw: HeadDraw, hidden: jax.Array, head: PreparedHead) -> None:
    """Rows of temperature NaN, -1, infinity, next to 0, and 0."""
    greedy = reference.greedy(hidden, head)
    np.testing.assert_array_equal(draw.token[np.asarray([0, 1, 3, 4])], greedy.token[np.asarray([0, 1, 3, 4])])
    for row in (0, 1, 4):
        np.testing.assert_allclose(draw.log_prob[row], greedy.log_prob[row], atol=2e-5)
    assert 0 <= int(draw.token[2]) < head.num_valid_tokens
    np.testing.assert_allclose(draw.log_prob[2], -np.log(head.num_valid_tokens), rtol=1e-5)
    # The logsumexp is near 1e6 there, where float32 has steps of 0.06.
    np.testing.assert_allclose(draw.log_prob[3], 0, atol=0.3)
