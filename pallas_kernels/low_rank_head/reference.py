"""What every implementation must give: plain float32 operations, slow and obvious.

Hidden states are rounded to the weights' dtype, and so is the state between the two products, as on every
implementation; both products and everything after them are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Key

from pallas_kernels.low_rank_head.statistics import HeadDraw, bounded, checked
from pallas_kernels.low_rank_head.weights import PreparedHead


def logits(hidden: Float[Array, "batch d"], head: PreparedHead) -> Float[Array, "batch vocab"]:
    """Float32 logits; -inf where a token is not valid."""
    state = hidden.astype(head.rows.dtype)
    if head.down is not None:
        state = _product(state, head.down[: head.hidden_size]).astype(head.rows.dtype)
    values = _product(state, head.rows[: head.vocab_size, : state.shape[1]].T)
    return jnp.where(jnp.arange(head.vocab_size) < head.num_valid_tokens, values, -jnp.inf)


def greedy(hidden: Float[Array, "batch d"], head: PreparedHead) -> HeadDraw:
    """The lowest of the most likely tokens."""
    return _draw(logits(hidden, head), None)


def sample(
    hidden: Float[Array, "batch d"],
    head: PreparedHead,
    rng_keys: Key[Array, "batch"],
    temperature: Float[Array, "batch"],
) -> HeadDraw:
    """The Gumbel maximum with the noise of `jax.random.gumbel(rng_keys[b], (V,))`; temperature 0 adds none."""
    hot = (temperature > 0)[:, None]
    values = logits(hidden, head) / jnp.where(hot, bounded(temperature)[:, None], 1.0)
    noise = jax.vmap(lambda key: jax.random.gumbel(key, (head.vocab_size,), jnp.float32))(rng_keys)
    return _draw(values, jnp.where(hot, noise, 0.0))


def top_candidates(hidden: Float[Array, "batch d"], head: PreparedHead, count: int) -> tuple[Array, Array]:
    """Ids and logits of the `count` greatest logits, the lower id first among equals."""
    values = logits(hidden, head)
    order = jnp.argsort(-values, axis=-1, stable=True)[:, :count]
    return order.astype(jnp.int32), jnp.take_along_axis(values, order, axis=-1)


def _draw(values: Float[Array, "batch vocab"], noise: Float[Array, "batch vocab"] | None) -> HeadDraw:
    token = jnp.argmax(values if noise is None else values + noise, axis=-1)
    logsumexp = jax.nn.logsumexp(values, axis=-1)
    log_prob = jnp.take_along_axis(values, token[:, None], axis=-1)[:, 0] - logsumexp
    return checked(token, log_prob, logsumexp)


def _product(left: Array, right: Array) -> Array:
    return jnp.matmul(left.astype(jnp.float32), right.astype(jnp.float32), precision=lax.Precision.HIGHEST)
