"""The scalar recursion of block verification, shared by the rules `block`, `greedy_block` and `traversal`.

Letters: p is the draft's law, q the target's; position i of a chain is the node after i drafted tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from specjax.verification.rows import log_one_minus_exp


def block_log_weights(
    log_ratio: Float[Array, "*chains length"], initial: Float[Array, "*chains"]
) -> Float[Array, "*chains length"]:
    """log w_i with w_i = min(1, w_{i-1} q(x_i)/p(x_i)): the chance that a prefix survives, before its residual.

    Args:
        log_ratio: log q(x_i) - log p(x_i) along each chain, [..., L].
        initial: log w_0, [...].

    Returns:
        log w_1 .. log w_L, [..., L].
    """

    def step(log_weight: Array, ratio: Array) -> tuple[Array, Array]:
        log_weight = jnp.minimum(log_weight + ratio, 0)
        return log_weight, log_weight

    _, weights = jax.lax.scan(step, initial, jnp.moveaxis(log_ratio, -1, 0))
    return jnp.moveaxis(weights, 0, -1)


def residual_acceptance(
    log_weight: Float[Array, "*shape"], residual_mass: Float[Array, "*shape"]
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """log h and log (1 - h) of h = S / (S + 1 - w), with h = 1 where both S and 1 - w are zero.

    Sun et al., "Block Verification Accelerates Speculative Decoding", ICLR 2025, equation (4).
    """
    log_missing = log_one_minus_exp(log_weight)
    log_mass = jnp.log(residual_mass)
    log_total = jnp.logaddexp(log_mass, log_missing)
    certain = log_missing == -jnp.inf
    log_accept = jnp.where(certain, 0, log_mass - jnp.where(certain, 0, log_total))
    log_reject = jnp.where(certain, -jnp.inf, log_missing - jnp.where(certain, 0, log_total))
    return log_accept, log_reject


def last_success_log_law(
    log_accept: Float[Array, "*chains length"],
    log_reject: Float[Array, "*chains length"],
    exists: Bool[Array, " length"],
) -> Float[Array, "*chains stops"]:
    """Law of the last success among independent trials; trials that do not exist never succeed.

    Args:
        log_accept: log-probability of success of trials 1..L, [..., L].
        log_reject: log-probability of failure, [..., L].
        exists: which trials exist, [L].

    Returns:
        Log-probability that trial i is the last success, i = 1..L, after that of no success at index 0, [..., L+1].
    """
    log_accept = jnp.where(exists, log_accept, -jnp.inf)
    log_reject = jnp.where(exists, log_reject, 0)
    fails_from = jax.lax.cumsum(log_reject, axis=log_reject.ndim - 1, reverse=True)
    none = fails_from[..., :1]
    fails_after = jnp.concatenate([fails_from[..., 1:], jnp.zeros_like(none)], axis=-1)
    return jnp.concatenate([none, log_accept + fails_after], axis=-1)
