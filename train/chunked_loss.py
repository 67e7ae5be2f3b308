"""Any objective over pairs of laws, chunk by chunk of positions, and the acceptance that a head's logits give.

`losses.weighted_forward_kl` is the hand-fused form of the most common case. Here the objective is a function of one
chunk's logits, which is differentiated with respect to these logits alone; the two products around it are done by
hand. Gradients are made in the sweep over the chunks, as there, so that only one chunk's logits exist at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from specjax.sampling import lowest_argmax
from train.losses import outer, product
from train.objectives import TOP_CLASSES, pair_objective


@dataclasses.dataclass(frozen=True)
class Objective:
    """What is static about a term of the loss.

    Attributes:
        name: see `objectives.pair_objective`.
        num_classes: classes of tokens; 0 if columns are tokens.
        num_top: tokens whose classes are positive, for "top_classes".
    """

    name: str
    num_classes: int = 0
    num_top: int = 1


@flax.struct.dataclass
class Teacher:
    """The law to imitate, and how the draft's columns relate to its tokens.

    Attributes:
        states: [C, n, G + S - 1, d], step i of entry g has the law of position g + i; or [C, S, n, G, d], each entry
            has its own.
        matrix: [d, V].
        columns: token of each column of the draft, [M]; None without.
        classes: class of each token, [V]; None without.
    """

    # Not annotated by shape: transformations put placeholders into such trees.
    states: Any
    matrix: Any
    columns: Any = None
    classes: Any = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_objective(
    objective: Objective,
    states: Float[Array, "chunks steps windows entries inner"],
    matrix: Float[Array, "inner columns"],
    teacher: Teacher,
    weights: Float[Array, "chunks steps windows entries"],
    blend: Float[Array, "steps"],
) -> tuple[Float[Array, ""], Float[Array, "chunks steps windows entries"]]:
    """Weighted sum of an objective over draft steps and windows of consecutive entries.

    Differentiable in `states` and `matrix` only; the values of single pairs carry no gradient.

    Args:
        objective: the objective, static.
        states: input of the draft head's last product, [C, S, n, G, k].
        matrix: that product's matrix, [k, M].
        teacher: the laws to imitate.
        weights: weight of each pair, [C, S, n, G] float32.
        blend: share of KL of each draft step in "lk_hybrid", [S].

    Returns:
        The sum, [], and the value of each pair, [C, S, n, G], those of weight 0 included.
    """
    loss, values, _ = _sweep(objective, states, matrix, teacher, weights, blend, with_gradients=False)
    return loss, values


def _forward(objective, states, matrix, teacher, weights, blend):
    loss, values, gradients = _sweep(objective, states, matrix, teacher, weights, blend, with_gradients=True)
    return (loss, values), gradients


def _backward(objective, gradients, cotangents):
    states_gradient, matrix_gradient = (g * cotangents[0].astype(g.dtype) for g in gradients)
    return states_gradient, matrix_gradient, None, None, None


weighted_objective.defvjp(_forward, _backward)


def _sweep(objective, states, matrix, teacher, weights, blend, *, with_gradients: bool):
    def chunk(matrix_gradient, inputs):
        hidden, teacher_hidden, weight = inputs
        shared = None if teacher_hidden.ndim == 4 else _log_laws(objective, teacher_hidden, teacher)
        values, state_gradients = [], []
        for step in range(hidden.shape[0]):
            if shared is None:
                log_target = _log_laws(objective, teacher_hidden[step], teacher)
            else:
                log_target = shared[:, step : step + hidden.shape[2]]
            evaluate = functools.partial(_evaluate, objective.name, log_target, blend[step])
            logits = product(hidden[step], matrix, 0)
            if not with_gradients:
                values.append(evaluate(logits))
                continue
            value, pull_back = jax.vjp(evaluate, logits)
            (logits_gradient,) = pull_back(weight[step])
            values.append(value)
            state_gradients.append(product(logits_gradient, matrix, 1).astype(hidden.dtype))
            matrix_gradient += outer(hidden[step], logits_gradient, matrix.dtype)
        return matrix_gradient, (jnp.stack(values), jnp.stack(state_gradients) if with_gradients else None)

    start = jnp.zeros(matrix.shape if with_gradients else (), jnp.float32)
    matrix_gradient, (values, states_gradient) = lax.scan(chunk, start, (states, teacher.states, weights))
    loss = jnp.sum(weights * values)
    return loss, values, (states_gradient, matrix_gradient.astype(matrix.dtype)) if with_gradients else None


def _evaluate(name: str, log_target: Array, blend: Array, logits: Array) -> Array:
    return pair_objective(name, log_target, logits, blend)


def _log_laws(objective: Objective, hidden: Array, teacher: Teacher) -> Array:
    """The teacher's log probabilities of the draft's columns, not renormalised, [n, P, M]."""
    logits = product(hidden, teacher.matrix, 0)
    if objective.num_classes and teacher.classes is not None:
        members = jax.nn.one_hot(teacher.classes, objective.num_classes, dtype=jnp.float32)
        if objective.name == TOP_CLASSES:
            top = lax.top_k(logits, min(objective.num_top, logits.shape[-1]))[1]
            return jnp.log(jnp.max(members[top], axis=-2))
        return jnp.log(product(jax.nn.softmax(logits, axis=-1), members, 0))
    log_laws = jax.nn.log_softmax(logits, axis=-1)
    if teacher.columns is None:
        return log_laws
    # A padded id among the columns is past the end of the law: it has no probability.
    return jnp.take(log_laws, teacher.columns, axis=-1, mode="fill", fill_value=-jnp.inf)


@flax.struct.dataclass
class Agreement:
    """How well each pair's draft law serves.

    Attributes:
        acceptance: sum over tokens of min(target, draft), the target not renormalised.
        top1: 1 where both have the same lowest most likely token.
        ceiling: the target's mass over the tokens that the draft can propose: what acceptance cannot exceed.
        recall: 1 where the draft can propose the target's most likely token.
    """

    acceptance: Float[Array, "*pairs"]
    top1: Float[Array, "*pairs"]
    ceiling: Float[Array, "*pairs"]
    recall: Float[Array, "*pairs"]


def measure_agreement(
    logits_of: Callable[[Any, int], Float[Array, "windows entries vocab"]],
    hidden: Float[Array, "chunks steps windows entries width"],
    target_states: Float[Array, "chunks windows positions target"],
    target_matrix: Float[Array, "target vocab"],
    measured: Bool[Array, "chunks"],
) -> Agreement:
    """Compares the laws that tokens are really drafted from with the target's.

    Args:
        logits_of: logits [n, G, V] of a step's states [n, G, d] and the step's number; -inf where no token can be
            drafted.
        hidden: normed states, [C, S, n, G, d].
        target_states: the target's final hidden states, [C, n, G + S - 1, d].
        target_matrix: the target's head, [d, V].
        measured: chunks that are wanted, [C]; others give zeros.

    Returns:
        The agreement of all pairs, [C, S, n, G], without gradient.
    """
    hidden, target_states = lax.stop_gradient((hidden, target_states))
    shape = hidden.shape[1:4]

    def compare(chunk_hidden: Array, chunk_target: Array) -> Agreement:
        log_target = jax.nn.log_softmax(product(chunk_target, target_matrix, 0), axis=-1)
        steps = []
        for step in range(shape[0]):
            law = log_target[:, step : step + shape[2]]
            logits = logits_of(chunk_hidden[step], step)
            common = jnp.minimum(law, jax.nn.log_softmax(logits, axis=-1))
            best = lowest_argmax(law)
            own = jnp.take_along_axis(logits, best[..., None], axis=-1)[..., 0]
            steps.append(
                Agreement(
                    jnp.sum(jnp.exp(common), axis=-1),
                    (best == lowest_argmax(logits)).astype(jnp.float32),
                    jnp.sum(jnp.where(logits > -jnp.inf, jnp.exp(law), 0), axis=-1),
                    (own > -jnp.inf).astype(jnp.float32),
                )
            )
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *steps)

    def chunk(inputs: tuple[Array, Array, Array]) -> Agreement:
        chunk_hidden, chunk_target, is_measured = inputs
        nothing = jnp.zeros(shape, jnp.float32)
        return lax.cond(is_measured, compare, lambda *_: Agreement(*[nothing] * 4), chunk_hidden, chunk_target)

    return lax.map(chunk, (hidden, target_states, measured))
