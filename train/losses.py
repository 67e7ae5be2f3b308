"""Forward KL from the target's law to the draft's, over the whole vocabulary, without ever holding all logits.

The loss of draft step i at entry t is KL(target law || draft law) for the token t + 2 + i. It is computed chunk by
chunk of positions, fused with the last product of both heads: logits of one chunk exist at a time, and the gradients
are made in the same sweep, since the weight of every term is known beforehand. The target's law of a position is
computed once and serves all draft steps.

With u = exp(draft logit - max), s = sum(u), and E_p, E_q the means of the head's columns under target and draft law,

    KL = sum(p log p) - h . E_p + max + log s,   dKL/dh = E_q - E_p,   dKL/dmatrix = h (q - p)^T,

so that s and E_q come from one product of u with the head's matrix, and no array of differences q - p is formed.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

_SUM_LANES = 128


@flax.struct.dataclass
class PairStatistics:
    """What is known of every (draft step, entry) pair, weighted or not.

    Attributes:
        divergence: KL(target law || draft law) in nats, or the value of another objective.
        acceptance: sum over tokens of min(target, draft): the chance that a sampled draft is accepted; 0 where it was
            not measured.
        top1: 1 where target and draft agree on the most likely token; 0 where it was not measured.
        ceiling: the target's mass over the tokens that can be drafted; None where that is all of them.
        recall: 1 where the target's most likely token can be drafted; None as for `ceiling`.
    """

    divergence: Float[Array, "*pairs"]
    acceptance: Float[Array, "*pairs"]
    top1: Float[Array, "*pairs"]
    ceiling: Float[Array, "*pairs"] | None = None
    recall: Float[Array, "*pairs"] | None = None


@jax.custom_vjp
def weighted_forward_kl(
    states: Float[Array, "chunks steps windows entries inner"],
    matrix: Float[Array, "inner vocab"],
    target_states: Float[Array, "chunks windows positions width"],
    target_matrix: Float[Array, "width vocab"],
    weights: Float[Array, "chunks steps windows entries"],
    measured: Bool[Array, "chunks"],
) -> tuple[Float[Array, ""], PairStatistics]:
    """Weighted sum of KL(target || draft) over draft steps and windows of consecutive entries.

    Products take operands in the dtype of `matrix` (draft) and `target_matrix` (target) and accumulate in float32;
    everything else is float32. Differentiable in `states` and `matrix` only; the target and the weights count as
    constants, and the statistics carry no gradient.

    Peak memory is about 4 * windows * (positions + 2 * entries) * V bytes, whatever the number of chunks and steps.

    Args:
        states: input of the draft head's last product, [C, S, n, G, k]: C chunks of n windows of G entries.
        matrix: the draft head's last matrix, [k, V].
        target_states: the target's final hidden states, [C, n, G + S - 1, d]; step i of entry g has the law of
            position g + i of its window.
        target_matrix: the target's head, [d, V].
        weights: weight of each pair, [C, S, n, G] float32; 0 leaves a pair out of the sum.
        measured: chunks whose acceptance and top-1 agreement are wanted, [C]; they take another pass or two over the
            logits, a quarter of a training step on a CPU.

    Returns:
        The sum, [], and the statistics of all pairs, [C, S, n, G], those of weight 0 included.
    """
    arguments = (states, matrix, target_states, target_matrix, weights, measured)
    loss, statistics, _ = _sweep(*arguments, with_gradients=False)
    return loss, statistics


def _forward(states, matrix, target_states, target_matrix, weights, measured):
    arguments = (states, matrix, target_states, target_matrix, weights, measured)
    loss, statistics, gradients = _sweep(*arguments, with_gradients=True)
    return (loss, statistics), (gradients, target_states, target_matrix, weights)


def _backward(residuals, cotangents):
    (states_gradient, matrix_gradient), target_states, target_matrix, weights = residuals
    scale = cotangents[0]
    return (
        (states_gradient * scale.astype(states_gradient.dtype)),
        (matrix_gradient * scale.astype(matrix_gradient.dtype)),
        jnp.zeros_like(target_states),
        jnp.zeros_like(target_matrix),
        jnp.zeros_like(weights),
        None,
    )


weighted_forward_kl.defvjp(_forward, _backward)


def _sweep(states, matrix, target_states, target_matrix, weights, measured, *, with_gradients: bool):
    """One pass over the chunks; the gradients are those of the weighted sum."""
    inner, vocab_size = matrix.shape
    # A row of ones below the matrix makes its product with unnormalised laws give their sums as well.
    columns = jnp.concatenate((matrix, jnp.ones((1, vocab_size), matrix.dtype)), axis=0)

    def chunk(matrix_gradient, inputs):
        hidden, target_hidden, weight, is_measured = inputs
        target = _target_laws(target_hidden, target_matrix, columns)
        # Each law of the target is subtracted once, with the sum of the states of all steps that it serves.
        served = jnp.zeros((*target_hidden.shape[:2], inner), jnp.float32)
        outputs, state_gradients = [], []
        for step in range(hidden.shape[0]):
            served_positions = slice(step, step + hidden.shape[2])
            law = jax.tree.map(lambda leaf, positions=served_positions: leaf[:, positions], target)
            statistics, unnormalised, normaliser, draft_mean = _draft_laws(
                hidden[step], matrix, columns, law, is_measured
            )
            outputs.append(statistics)
            if with_gradients:
                scale = weight[step][..., None]
                state_gradients.append((scale * (draft_mean - law.mean)).astype(hidden.dtype))
                weighted = scale * hidden[step].astype(jnp.float32)
                matrix_gradient += outer(weighted / normaliser, unnormalised, matrix.dtype)
                served = served.at[:, served_positions].add(weighted)
        if with_gradients:
            matrix_gradient -= outer(served / target.normaliser, target.unnormalised, matrix.dtype)
        statistics = jax.tree.map(lambda *steps: jnp.stack(steps), *outputs)
        return matrix_gradient, (statistics, jnp.stack(state_gradients) if with_gradients else None)

    start = jnp.zeros((inner, vocab_size) if with_gradients else (), jnp.float32)
    matrix_gradient, (statistics, states_gradient) = lax.scan(chunk, start, (states, target_states, weights, measured))
    loss = jnp.sum(weights * statistics.divergence)
    gradients = (states_gradient, matrix_gradient.astype(matrix.dtype)) if with_gradients else None
    return loss, statistics, gradients


@flax.struct.dataclass
class _TargetLaws:
    """Laws of a chunk's positions: `unnormalised / normaliser`, [n, P, V] over [n, P, 1]; their negative entropies
    [n, P]; the means of the draft head's columns under them, [n, P, k]."""

    unnormalised: Array
    normaliser: Array
    negative_entropy: Array
    mean: Array


def _target_laws(hidden: Array, matrix: Array, columns: Array) -> _TargetLaws:
    logits = product(hidden, matrix, 0)
    shifted = logits - jnp.max(logits, axis=-1, keepdims=True)
    unnormalised = jnp.exp(shifted)
    sums = product(unnormalised, columns, 1)
    normaliser = sums[..., -1:]
    mean_logit = _wide_sum(unnormalised * shifted) / normaliser[..., 0]
    return _TargetLaws(unnormalised, normaliser, mean_logit - jnp.log(normaliser[..., 0]), sums[..., :-1] / normaliser)


def _draft_laws(
    hidden: Array, matrix: Array, columns: Array, law: _TargetLaws, measured: Array
) -> tuple[PairStatistics, Array, Array, Array]:
    logits = product(hidden, matrix, 0)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    unnormalised = jnp.exp(logits - largest)
    sums = product(unnormalised, columns, 1)
    normaliser = sums[..., -1:]
    mean_logit = jnp.sum(hidden.astype(jnp.float32) * law.mean, axis=-1)
    divergence = law.negative_entropy - mean_logit + (largest + jnp.log(normaliser))[..., 0]

    def measure() -> tuple[Array, Array]:
        common = _wide_sum(jnp.minimum(law.unnormalised * (normaliser / law.normaliser), unnormalised))
        agree = jnp.any((law.unnormalised == 1) & (unnormalised == 1), axis=-1)
        return common / normaliser[..., 0], agree.astype(jnp.float32)

    nothing = jnp.zeros_like(divergence)
    acceptance, top1 = lax.cond(measured, measure, lambda: (nothing, nothing))
    statistics = PairStatistics(divergence, acceptance, top1)
    return statistics, unnormalised, normaliser, sums[..., :-1] / normaliser


def product(x: Array, matrix: Array, axis: int) -> Array:
    """x times a matrix, contracted over the matrix's `axis`; float32 result."""
    precision = lax.Precision.HIGHEST if matrix.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x.astype(matrix.dtype),
        matrix,
        (((x.ndim - 1,), (axis,)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def outer(left: Array, right: Array, dtype: jnp.dtype) -> Array:
    """Sum over all rows of outer products: [n, G, k], [n, G, V] to [k, V]."""
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        left.astype(dtype),
        right.astype(dtype),
        (((0, 1), (0, 1)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def _wide_sum(x: Array) -> Array:
    """Sum over the last axis in lanes: a plain sum is one long chain of additions, which a CPU cannot vectorise."""
    size = x.shape[-1]
    whole = size - size % _SUM_LANES
    lanes = x[..., :whole].reshape(*x.shape[:-1], whole // _SUM_LANES, _SUM_LANES)
    total = jnp.sum(jnp.sum(lanes, axis=-2), axis=-1)
    return total + jnp.sum(x[..., whole:], axis=-1) if whole < size else total
