"""Muon: orthogonal to the same degree as the plain iteration, and the same updates as optax's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.muon import orthogonalise, scale_by_muon


@pytest.mark.parametrize("shape", [(6, 40), (40, 6), (12, 12)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape):
    generator = np.random.default_rng(0)
    matrix = generator.standard_normal(shape).astype(np.float32)
    result = np.asarray(jax.jit(orthogonalise)(jnp.asarray(matrix)), np.float64)
    left, _, right = np.linalg.svd(matrix, full_matrices=False)
    rotated = left.T @ result @ right.T
    np.testing.assert_allclose(rotated, np.diag(np.diag(rotated)), atol=1e-4)
    assert np.all((np.diag(rotated) > 0.6) & (np.diag(rotated) < 1.25))


def test_badly_conditioned_and_zero_matrices_stay_finite():
    generator = np.random.default_rng(1)
    left, right = (np.linalg.qr(generator.standard_normal((size, 8)))[0] for size in (8, 50))
    matrix = (left * np.geomspace(1, 1e-9, 8)) @ right.T
    for case in (matrix, 0 * matrix, matrix * 1e-20):
        result = np.asarray(jax.jit(orthogonalise)(jnp.asarray(case, jnp.float32)))
        assert np.all(np.isfinite(result))
        assert np.linalg.norm(result, 2) < 1.3


def test_updates_equal_those_of_optax():
    generator = np.random.default_rng(2)
    shapes = {"wide": (8, 60), "tall": (60, 8), "square": (10, 10)}
    params = {name: jnp.zeros(shape, jnp.float32) for name, shape in shapes.items()}
    ours = optax.chain(scale_by_muon(0.95), optax.scale_by_learning_rate(0.1))
    theirs = optax.contrib.muon(0.1, beta=0.95)
    update_ours, update_theirs = jax.jit(ours.update), jax.jit(theirs.update)
    with jax.numpy_dtype_promotion("standard"):
        our_state, their_state = ours.init(params), theirs.init(params)
        for _ in range(4):
            gradients = {
                name: jnp.asarray(generator.standard_normal(shape), jnp.float32) for name, shape in shapes.items()
            }
            our_updates, our_state = update_ours(gradients, our_state, params)
            their_updates, their_state = update_theirs(gradients, their_state, params)
            for name in shapes:
                np.testing.assert_allclose(our_updates[name], their_updates[name], rtol=2e-3, atol=2e-4)
