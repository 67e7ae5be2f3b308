"""Every loss against a dense float64 one: values, gradients, restricted vocabularies, and what a head measures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.chunked_loss import Objective, Teacher, measure_agreement, weighted_objective
from train.losses import weighted_forward_kl
from train.objectives import LOSSES, pair_objective

CHUNKS, STEPS, WINDOWS, WINDOW, INNER, WIDTH, VOCAB = 2, 2, 2, 3, 5, 6, 40
BLEND = np.array([0.8, 0.3])
IDS = np.array([1, 2, 5, 11, 12, 30, 39])


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def dense_value_and_logit_gradient(name, log_p, logits, blend):
    """One pair in float64, by the formulas of the papers; `log_p` is not renormalised."""
    p, q = np.exp(log_p), np.exp(log_softmax(logits))
    renormalised = p / p.sum()
    kl, kl_gradient = np.sum(renormalised * (np.log(renormalised) - np.log(q))), q - renormalised
    alpha = np.minimum(p, q).sum()
    # TV = 1 - alpha; d alpha / d q is 1 where q < p, and the softmax takes its mean under q off again.
    below = (q < p).astype(float)
    tv, tv_gradient = 1 - alpha, -q * (below - np.sum(q * below))
    return {
        "kl": (kl, kl_gradient),
        "tv": (tv, tv_gradient),
        "lk": (-np.log(alpha), tv_gradient / alpha),
        "lk_hybrid": (blend * kl + (1 - blend) * tv, blend * kl_gradient + (1 - blend) * tv_gradient),
    }[name]


def problem(num_columns, *, scale=1.0, own_teacher=False, seed=0):
    generator = np.random.default_rng(seed)

    def normal(*shape):
        return scale * generator.standard_normal(shape)

    weights = generator.uniform(0, 1, (CHUNKS, STEPS, WINDOWS, WINDOW))
    teacher_shape = (STEPS, WINDOWS, WINDOW) if own_teacher else (WINDOWS, WINDOW + STEPS - 1)
    return {
        "states": normal(CHUNKS, STEPS, WINDOWS, WINDOW, INNER),
        "matrix": normal(INNER, num_columns),
        "teacher_states": normal(CHUNKS, *teacher_shape, WIDTH),
        "teacher_matrix": normal(WIDTH, VOCAB),
        "weights": np.where(weights < 0.3, 0, weights),
    }


def dense(name, problem, log_law_of):
    states_gradient, matrix_gradient = np.zeros(problem["states"].shape), np.zeros(problem["matrix"].shape)
    values = np.zeros(problem["weights"].shape)
    for index in np.ndindex(values.shape):
        chunk, step, window, entry = index
        teacher = problem["teacher_states"]
        hidden = teacher[index] if teacher.ndim == 5 else teacher[chunk, window, entry + step]
        logits = problem["states"][index] @ problem["matrix"]
        log_p = log_law_of(log_softmax(hidden @ problem["teacher_matrix"]))
        values[index], gradient = dense_value_and_logit_gradient(name, log_p, logits, BLEND[step])
        weight = problem["weights"][index]
        states_gradient[index] = weight * (problem["matrix"] @ gradient)
        matrix_gradient += weight * np.outer(problem["states"][index], gradient)
    return np.sum(problem["weights"] * values), values, (states_gradient, matrix_gradient)


def ours(objective, problem, columns=None, classes=None):
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in problem.items()}
    teacher = Teacher(
        arrays["teacher_states"],
        arrays["teacher_matrix"],
        None if columns is None else jnp.asarray(columns, jnp.int32),
        None if classes is None else jnp.asarray(classes, jnp.int32),
    )

    def loss(states, matrix):
        return weighted_objective(
            objective, states, matrix, teacher, arrays["weights"], jnp.asarray(BLEND, jnp.float32)
        )

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(arrays["states"], arrays["matrix"])


def assert_equal(ours, theirs):
    (loss, values), gradients = ours
    np.testing.assert_allclose(loss, theirs[0], rtol=1e-5)
    np.testing.assert_allclose(values, theirs[1], atol=3e-6, rtol=2e-5)
    for mine, other in zip(gradients, theirs[2], strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5 * np.abs(other).max())


# Scale 3 makes laws that are far apart: acceptance near zero, where "lk" must still be exact.
@pytest.mark.parametrize(
    ("name", "scale"),
    [(name, 3.0) for name in LOSSES] + [pytest.param(name, 1.0, marks=pytest.mark.slow) for name in LOSSES],
)
def test_values_and_gradients_over_the_whole_vocabulary(name, scale):
    instance = problem(VOCAB, scale=scale)
    assert_equal(ours(Objective(name), instance), dense(name, instance, lambda law: law))


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_over_a_part_of_the_vocabulary(name):
    instance = problem(len(IDS), scale=2.0)
    assert_equal(ours(Objective(name), instance, columns=IDS), dense(name, instance, lambda law: law[IDS]))


def test_a_teacher_of_its_own_for_every_pair():
    instance = problem(VOCAB, own_teacher=True)
    assert_equal(ours(Objective("kl"), instance), dense("kl", instance, lambda law: law))


def test_classes_of_tokens_have_the_mass_of_their_members():
    classes = np.arange(VOCAB) % 4
    instance = problem(4)

    def masses(law):
        return np.log(np.array([np.exp(law)[classes == c].sum() for c in range(4)]))

    assert_equal(ours(Objective("kl", num_classes=4), instance, classes=classes), dense("kl", instance, masses))


def test_top_classes_are_those_of_the_most_likely_tokens():
    classes, instance = np.arange(VOCAB) % 8, problem(8)
    (_, values), gradients = ours(Objective("top_classes", num_classes=8, num_top=3), instance, classes=classes)
    expected = np.zeros(instance["weights"].shape)
    states_gradient = np.zeros(instance["states"].shape)
    for index in np.ndindex(expected.shape):
        chunk, step, window, entry = index
        target = instance["teacher_states"][chunk, window, entry + step] @ instance["teacher_matrix"]
        positive = np.isin(np.arange(8), classes[np.argsort(-target)[:3]])
        probability = 1 / (1 + np.exp(-instance["states"][index] @ instance["matrix"]))
        expected[index] = -np.mean(np.log(np.where(positive, probability, 1 - probability)))
        states_gradient[index] = instance["weights"][index] * (instance["matrix"] @ (probability - positive) / 8)
    np.testing.assert_allclose(values, expected, rtol=1e-5)
    np.testing.assert_allclose(gradients[0], states_gradient, atol=1e-6)


def test_the_general_kl_equals_the_fused_one():
    instance = problem(VOCAB)
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in instance.items()}
    loss, statistics = jax.jit(weighted_forward_kl)(*arrays.values(), jnp.ones(CHUNKS, bool))
    (general, values), _ = ours(Objective("kl"), instance)
    np.testing.assert_allclose(general, loss, rtol=1e-5)
    np.testing.assert_allclose(values, statistics.divergence, rtol=1e-4, atol=1e-6)
    agreement = jax.jit(
        lambda a: measure_agreement(
            lambda hidden, step: hidden @ a["matrix"],
            a["states"],
            a["teacher_states"],
            a["teacher_matrix"],
            jnp.array([True, False]),
        )
    )(arrays)
    np.testing.assert_allclose(agreement.acceptance[0], statistics.acceptance[0], rtol=1e-5)
    np.testing.assert_array_equal(agreement.top1[0], statistics.top1[0])
    np.testing.assert_allclose(agreement.ceiling[0], 1, rtol=1e-5)
    # What was not asked for costs nothing and says nothing.
    assert not jnp.any(agreement.acceptance[1])


def test_acceptance_never_exceeds_the_ceiling_and_reaches_it_at_the_renormalised_target():
    generator = np.random.default_rng(3)
    target = jnp.asarray(generator.standard_normal((1, 1, 1, WIDTH)), jnp.float32)
    matrix = jnp.asarray(2 * generator.standard_normal((WIDTH, VOCAB)), jnp.float32)
    kept = jnp.zeros(VOCAB, bool).at[jnp.asarray(IDS)].set(True)
    for change, reaches in ((0.0, True), (20.0, False)):
        agreement = measure_agreement(
            lambda hidden, step, change=change: jnp.where(
                kept, hidden @ matrix + jnp.linspace(0, change, VOCAB), -jnp.inf
            ),
            target[:, None],
            target,
            matrix,
            jnp.ones(1, bool),
        )
        mass = float(jnp.sum(jnp.where(kept, jax.nn.softmax(target @ matrix), 0)))
        assert float(agreement.ceiling[0, 0, 0, 0]) == pytest.approx(mass, rel=1e-5)
        assert (float(agreement.acceptance[0, 0, 0, 0]) == pytest.approx(mass, rel=1e-5)) is reaches
        assert float(agreement.acceptance[0, 0, 0, 0]) <= mass * (1 + 1e-5)


def test_recall_is_whether_the_most_likely_token_can_be_drafted():
    """Draft step 1 can draft all but the lowest of the target's most likely tokens, step 0 only that; one tie."""
    logits = jnp.array([[3.0, 1, 3, 0], [0, 1, 2, 9], [5, 1, 0, 4]], jnp.float32)
    best = np.array([0, 3, 0])
    is_best = jnp.arange(4) == best[:, None]
    agreement = measure_agreement(
        lambda hidden, step: jnp.where(is_best if step == 0 else ~is_best, 0.0, -jnp.inf)[None],
        jnp.zeros((1, 2, 1, 3, 4), jnp.float32),
        jnp.concatenate((logits, logits[-1:]))[None, None],
        jnp.eye(4, dtype=jnp.float32),
        jnp.ones(1, bool),
    )
    np.testing.assert_array_equal(agreement.recall[0, 0, 0], [1, 1, 1])
    # Step 1 of an entry has the law of the next position.
    kept = [best[1] != best[0], best[2] != best[1], best[2] != best[2]]
    np.testing.assert_array_equal(agreement.recall[0, 1, 0], kept)


def test_lk_of_a_certain_target_is_the_negative_log_likelihood():
    logits = jnp.asarray([0.3, -1.0, 2.0], jnp.float32)
    certain = jnp.asarray([-jnp.inf, 0.0, -jnp.inf], jnp.float32)
    value, gradient = jax.value_and_grad(lambda z: pair_objective("lk", certain, z, jnp.float32(1)))(logits)
    np.testing.assert_allclose(value, -jax.nn.log_softmax(logits)[1], rtol=1e-6)
    np.testing.assert_allclose(gradient, jax.nn.softmax(logits) - jnp.asarray([0.0, 1.0, 0.0]), atol=1e-6)


def test_an_acceptance_below_float32_still_has_a_loss_and_a_gradient():
    """exp(-200) is zero in float32; a plain log of the sum would be infinite and its gradient NaN."""
    logits = jnp.asarray([200.0, 0.0], jnp.float32)
    target = jnp.asarray([-jnp.inf, 0.0], jnp.float32)
    value, gradient = jax.value_and_grad(lambda z: pair_objective("lk", target, z, jnp.float32(1)))(logits)
    assert float(value) == pytest.approx(200)
    np.testing.assert_allclose(gradient, [1, -1], atol=1e-6)


@pytest.mark.parametrize("name", ["kl", "lk"])
def test_padded_ids_among_the_columns_have_no_mass(name):
    """Case H8: a column past the target's valid ids gets no probability and pulls nothing towards it."""
    instance = problem(len(IDS))
    instance["teacher_matrix"] = instance["teacher_matrix"][:, :35]
    # With the padded column's own logit out of the way the value is that of the other columns.
    low = dict(instance, matrix=instance["matrix"].copy())
    low["states"] = np.ones_like(instance["states"])
    low["matrix"][:, -1] = -50
    (_, values), gradients = ours(Objective(name), low, columns=IDS)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)
    expected = dense_value_and_logit_gradient(
        name,
        log_softmax(instance["teacher_states"][0, 0, 0] @ instance["teacher_matrix"])[IDS[:-1]],
        np.ones(INNER) @ instance["matrix"][:, :-1],
        BLEND[0],
    )[0]
    np.testing.assert_allclose(values[0, 0, 0, 0], expected, rtol=1e-5)


def test_unknown_losses_are_named():
    with pytest.raises(ValueError, match=r"`loss` must be one of .*; got 'l2'"):
        pair_objective("l2", jnp.zeros(3), jnp.zeros(3), jnp.float32(1))
