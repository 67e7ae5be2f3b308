"""The fused loss against a dense float64 one: values, statistics, gradients, memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.losses import weighted_forward_kl

CHUNKS, STEPS, WINDOWS, WINDOW, INNER, WIDTH = 3, 2, 2, 4, 5, 6


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def dense(states, matrix, target_states, target_matrix, weights, measured=None):
    """Loss, statistics and gradients in float64, all logits at once."""
    states, matrix, target_states, target_matrix, weights = (
        np.asarray(x).astype(np.float64) for x in (states, matrix, target_states, target_matrix, weights)
    )
    divergence, acceptance, top1 = (np.zeros(weights.shape) for _ in range(3))
    states_gradient, matrix_gradient = np.zeros(states.shape), np.zeros(matrix.shape)
    for index in np.ndindex(weights.shape):
        chunk, step, window, entry = index
        log_p = log_softmax(target_states[chunk, window, entry + step] @ target_matrix)
        log_q = log_softmax(states[index] @ matrix)
        p, q = np.exp(log_p), np.exp(log_q)
        divergence[index] = np.sum(p * (log_p - log_q))
        acceptance[index] = np.minimum(p, q).sum()
        top1[index] = p.argmax() == q.argmax()
        states_gradient[index] = weights[index] * (matrix @ (q - p))
        matrix_gradient += weights[index] * np.outer(states[index], q - p)
    return np.sum(weights * divergence), (divergence, acceptance, top1), (states_gradient, matrix_gradient)


def problem(vocab_size, *, scale=1.0, dtype=jnp.float32):
    generator = np.random.default_rng(vocab_size)

    def normal(*shape):
        return jnp.asarray(scale * generator.standard_normal(shape), dtype)

    weights = jnp.asarray(generator.uniform(0, 1, (CHUNKS, STEPS, WINDOWS, WINDOW)), jnp.float32)
    weights = jnp.where(weights < 0.3, 0, weights)
    return (
        normal(CHUNKS, STEPS, WINDOWS, WINDOW, INNER),
        normal(INNER, vocab_size),
        normal(CHUNKS, WINDOWS, WINDOW + STEPS - 1, WIDTH),
        normal(WIDTH, vocab_size),
        weights,
        jnp.ones(CHUNKS, bool),
    )


def value_and_gradients(arguments):
    def loss(states, matrix):
        return weighted_forward_kl(states, matrix, *arguments[2:])

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*arguments[:2])


# 300 is no multiple of the lanes that sums are made in, 20 is below their number.
@pytest.mark.parametrize(("vocab_size", "scale"), [(20, 1.0), (300, 0.3), (300, 3.0)])
def test_value_statistics_and_gradients_equal_the_dense_reference(vocab_size, scale):
    arguments = problem(vocab_size, scale=scale)
    (loss, statistics), gradients = value_and_gradients(arguments)
    expected_loss, expected_statistics, expected_gradients = dense(*arguments)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(statistics.divergence, expected_statistics[0], atol=3e-5, rtol=2e-5)
    np.testing.assert_allclose(statistics.acceptance, expected_statistics[1], atol=1e-5)
    np.testing.assert_array_equal(statistics.top1, expected_statistics[2])
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * np.abs(theirs).max())


def test_the_value_without_gradients_is_the_same():
    arguments = problem(300)
    loss, statistics = jax.jit(weighted_forward_kl)(*arguments)
    (expected_loss, expected_statistics), _ = value_and_gradients(arguments)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(statistics.divergence, expected_statistics.divergence, atol=1e-6)


def test_chunks_that_are_not_measured_still_count_in_the_loss():
    *arguments, everything = problem(300)
    measured = everything.at[1].set(False)
    (loss, statistics), gradients = value_and_gradients((*arguments, measured))
    (expected_loss, expected), expected_gradients = value_and_gradients((*arguments, everything))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(statistics.acceptance[1], 0)
    np.testing.assert_allclose(statistics.acceptance[2], expected.acceptance[2], rtol=1e-6)


def test_gradients_scale_with_what_follows():
    arguments = problem(20)
    scaled = jax.grad(lambda matrix: 3 * weighted_forward_kl(arguments[0], matrix, *arguments[2:])[0])(arguments[1])
    _, gradients = value_and_gradients(arguments)
    np.testing.assert_allclose(scaled, 3 * gradients[1], rtol=1e-5, atol=1e-7)


def test_equal_laws_have_no_divergence_and_no_gradient():
    states, matrix, _, _, weights, measured = problem(300)
    same = jnp.broadcast_to(states[:, :1, :, :1], states.shape)
    target = jnp.broadcast_to(same[:, 0, :, :1], (CHUNKS, WINDOWS, WINDOW + STEPS - 1, INNER))
    (loss, statistics), gradients = value_and_gradients((same, matrix, target, matrix, weights, measured))
    np.testing.assert_allclose(loss, 0, atol=1e-4)
    np.testing.assert_allclose(statistics.acceptance, 1, atol=1e-5)
    np.testing.assert_array_equal(statistics.top1, 1)
    for gradient in gradients:
        np.testing.assert_allclose(gradient, 0, atol=1e-5)


def test_case_t5_no_weight_gives_no_loss_and_no_gradient():
    *arrays, weights, measured = problem(300)
    (loss, _), gradients = value_and_gradients((*arrays, jnp.zeros_like(weights), measured))
    assert float(loss) == 0
    assert all(np.all(np.asarray(gradient) == 0) for gradient in gradients)


def test_extreme_logits_stay_finite():
    states, matrix, target_states, target_matrix, weights, measured = problem(300)
    (loss, statistics), gradients = value_and_gradients(
        (states * jnp.float32(100), matrix, target_states * jnp.float32(100), target_matrix, weights, measured)
    )
    expected, _, _ = dense(states * jnp.float32(100), matrix, target_states * jnp.float32(100), target_matrix, weights)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert np.all(statistics.acceptance >= 0)
    assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


def test_bfloat16_operands_stay_close_to_their_own_float64_value():
    arguments = problem(300, dtype=jnp.bfloat16)
    (loss, _), gradients = value_and_gradients(arguments)
    expected_loss, _, expected_gradients = dense(*arguments)
    np.testing.assert_allclose(loss, expected_loss, rtol=0.02)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_allclose(ours.astype(jnp.float32), theirs, atol=0.02 * np.abs(theirs).max())


def test_memory_does_not_grow_with_the_number_of_chunks():
    """Logits of one chunk exist at a time, forward and backward, whatever the batch."""

    def temporaries(chunks):
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in (
                (chunks, STEPS, WINDOWS, WINDOW, INNER),
                (INNER, 4096),
                (chunks, WINDOWS, WINDOW + STEPS - 1, WIDTH),
                (WIDTH, 4096),
                (chunks, STEPS, WINDOWS, WINDOW),
            )
        ] + [jax.ShapeDtypeStruct((chunks,), bool)]
        gradient = jax.grad(lambda *arguments: weighted_forward_kl(*arguments)[0], argnums=(0, 1))
        return jax.jit(gradient).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(2), temporaries(64)
    all_logits = 64 * STEPS * WINDOWS * WINDOW * 4096 * 4
    assert many < few + 64 * 1024
    assert many < all_logits / 8
