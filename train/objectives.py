"""What a draft law is trained to be near, as functions of log probabilities: KL, acceptance (LK) and total variation.

The target's probabilities come restricted to the columns that the draft's law has, not renormalised: their sum is what
a head over a part of the vocabulary can win at most. With alpha = sum_v min(p_v, q_v) over those columns, which is the
chance that a sampled draft is accepted (Samarin et al., arXiv 2602.23881):

* "kl": KL(p~ || q) with p~ = p renormalised over the columns. For heads over the whole vocabulary p~ = p; for others
  it does not see the mass that is lost, see `specjax.heads.static_vocabulary`.
* "tv": 1 - alpha, the total variation between p and q where all of p is counted.
* "lk": -log alpha. Its gradient is that of "tv" over alpha, so that it does not fade while q is still far from p.
* "lk_hybrid": lambda * KL + (1 - lambda) * TV with lambda = exp(-eta * mean alpha), the mean of each draft step over
  the whole batch and without gradient: KL while acceptance is low, TV as it grows.

For laws over classes of tokens there is also "top_classes": binary cross entropies whose positives are the classes of
the target's most likely tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

LOSSES = ("kl", "lk_hybrid", "lk", "tv")
TOP_CLASSES = "top_classes"


def pair_objective(
    name: str,
    log_target: Float[Array, "*pairs columns"],
    draft_logits: Float[Array, "*pairs columns"],
    blend: Float[Array, ""],
) -> Float[Array, "*pairs"]:
    """Loss of each pair of laws, in nats for the KL and logarithmic ones.

    Args:
        name: one of `LOSSES`, or "top_classes".
        log_target: log probabilities under the target, -inf where there is none; for "top_classes" 0 for positive
            classes and -inf for others.
        draft_logits: logits of the draft, any shift.
        blend: share of KL in "lk_hybrid", lambda.

    Returns:
        The losses.

    Raises:
        ValueError: if there is no such objective.
    """
    if name == TOP_CLASSES:
        positive = jnp.isfinite(log_target)
        entropies = jax.nn.softplus(jnp.where(positive, -draft_logits, draft_logits))
        return jnp.mean(entropies, axis=-1)
    log_draft = jax.nn.log_softmax(draft_logits, axis=-1)
    if name == "kl":
        return _renormalised_kl(log_target, log_draft)
    if name == "lk":
        # In log space: an acceptance too small for float32 still has a finite loss and a gradient.
        return -jax.nn.logsumexp(jnp.minimum(log_target, log_draft), axis=-1)
    variation = 1 - jnp.sum(jnp.exp(jnp.minimum(log_target, log_draft)), axis=-1)
    if name == "tv":
        return variation
    if name == "lk_hybrid":
        return blend * _renormalised_kl(log_target, log_draft) + (1 - blend) * variation
    raise ValueError(f"`loss` must be one of {LOSSES}; got {name!r}")


def _renormalised_kl(log_target: Array, log_draft: Array) -> Array:
    log_target = jax.nn.log_softmax(log_target, axis=-1)
    possible = log_target > -jnp.inf
    difference = jnp.where(possible, log_target, 0) - jnp.where(possible, log_draft, 0)
    return jnp.sum(jnp.exp(log_target) * difference, axis=-1)
