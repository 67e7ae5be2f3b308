"""The Hopper kernels in the interpreter, races watched; and faults planted in kernels, which these checks must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from verifier_examples import Example, exact_log_normalisers, exact_sums, example, pairs

from pallas_kernels import _compat
from pallas_kernels.block_verifier import batching, laws, mosaic_gpu, portable
from pallas_kernels.block_verifier.laws import exponents, row_scales

needs_interpreter = pytest.mark.skipif(
    not _compat.HAS_MOSAIC_INTERPRETER, reason="this release of jax cannot interpret Mosaic GPU kernels"
)
WIDTH = 512
# Two tiles and a ragged one; a CTA has two tiles, the last one tile.
MOSAIC_VOCAB = {"bfloat16": 64 * 128 * 2 + 1280, "float32": 64 * 64 * 2 + 640}
# Two tiles, the second ragged.
PORTABLE_VOCAB = 1300
PORTABLE_TILE = 1024


def check_mosaic(capfd: pytest.CaptureFixture[str], dtype: str, *, passes: tuple[int, ...] = (1, 2)) -> None:
    """Runs kernels in the interpreter; an AssertionError or RuntimeError says that values differ or threads race."""
    values = example(MOSAIC_VOCAB[dtype], dtype)
    options = {"num_ctas": 8, "interpret": _compat.mosaic_interpreter()}
    if 1 in passes:
        check_normalisers(lambda *arrays: mosaic_gpu.log_normalisers(*arrays, **options), values)
    if 2 in passes:
        check_sums(lambda *arrays: mosaic_gpu.residual_sums(*arrays, width=WIDTH, **options), values)
    # Before jax 0.12 a race is only printed.
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def check_portable() -> None:
    """Runs the portable bodies in the interpreter."""
    values = example(PORTABLE_VOCAB, "float32")
    options = {"tile": PORTABLE_TILE, "interpret": True}
    check_normalisers(lambda *arrays: portable.log_normalisers(*arrays, **options), values)
    check_sums(lambda *arrays: portable.residual_sums(*arrays, width=WIDTH, **options), values)


def check_normalisers(log_normalisers: Callable[..., Any], values: Example) -> None:
    """Pass 1 against float64."""

    @jax.jit
    def run(values: Example):
        scales = row_scales(values.target_inverse_temperature), row_scales(values.draft_inverse_temperature)
        return log_normalisers(values.target_logits, values.draft_logits, *scales)

    target, draft = run(values)
    exact = exact_log_normalisers(values.target_logits, values.target_inverse_temperature)
    np.testing.assert_allclose(target, exact, rtol=0, atol=4e-6)
    exact = exact_log_normalisers(values.draft_logits, values.draft_inverse_temperature)
    np.testing.assert_allclose(draft, exact, rtol=0, atol=4e-6)


def check_sums(residual_sums: Callable[..., Any], values: Example) -> None:
    """Pass 2 against float64."""

    @jax.jit
    def run(values: Example):
        rows = jnp.stack([jnp.asarray(pairs().target_row), jnp.asarray(pairs().draft_row)])
        return residual_sums(
            values.target_logits, values.draft_logits, rows, jnp.stack(exponents(*values.laws, pairs()))
        )

    np.testing.assert_allclose(run(values), exact_sums(values, WIDTH), rtol=0, atol=2e-6)


@needs_interpreter
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_kernels_equal_float64_without_races(capfd: pytest.CaptureFixture[str], dtype: str) -> None:
    check_mosaic(capfd, dtype)


@needs_interpreter
def test_bad_rows_stay_bad_in_the_kernels() -> None:
    values = example(4096, "float32")
    target = values.target_logits.at[0].set(-jnp.inf).at[1, 77].set(jnp.nan)
    values = values._replace(target_logits=target)
    options = {"num_ctas": 8, "interpret": _compat.mosaic_interpreter(detect_races=False)}
    found, _ = jax.jit(
        lambda values: mosaic_gpu.log_normalisers(
            values.target_logits, values.draft_logits, None, row_scales(jnp.ones(2)), **options
        )
    )(values)
    assert found[0] == -np.inf
    assert np.isnan(found[1])
    assert np.isfinite(found[2])
    rows = jnp.stack([jnp.asarray(pairs().target_row), jnp.asarray(pairs().draft_row)])
    scales = jnp.stack(exponents(*values.laws, pairs()))
    sums = jax.jit(
        lambda values: mosaic_gpu.residual_sums(
            values.target_logits, values.draft_logits, rows, scales, width=4096, **options
        )
    )(values)
    assert sums[1, 0] == 0
    assert np.isnan(sums[3, 0])
    np.testing.assert_allclose(sums[::2], exact_sums(values, 4096)[::2], rtol=0, atol=4e-6)


@pytest.mark.slow
@needs_interpreter
def test_a_full_vocabulary_in_the_interpreter() -> None:
    values = example(128256, "bfloat16")
    options = {"interpret": _compat.mosaic_interpreter(detect_races=False)}
    check_normalisers(lambda *arrays: mosaic_gpu.log_normalisers(*arrays, **options), values)
    check_sums(lambda *arrays: mosaic_gpu.residual_sums(*arrays, width=WIDTH, **options), values)


def test_the_portable_bodies_equal_float64() -> None:
    check_portable()


def _everything_exists(tile: Any, num_groups: int, group: int) -> Any:
    return mosaic_gpu_original["_existing_groups"](tile, 10**6, group)


def _one_group_less(tile: Any, num_groups: int, group: int) -> Any:
    return mosaic_gpu_original["_existing_groups"](tile, num_groups - 1, group)


def _forgets_to_rescale(values: Any, exists: Any, largest: Any, total: Any) -> Any:
    new, new_total = mosaic_gpu_original["_online_normaliser"](values, exists, largest, jnp.zeros_like(total))
    return new, total + new_total


def _first_tile_only(*arguments: Any) -> Any:
    step, first, tiles_a_share, num_tiles, stages, start = arguments
    return mosaic_gpu_original["_stream"](step, first, tiles_a_share, jnp.minimum(num_tiles, first + 1), stages, start)


mosaic_gpu_original = {
    name: getattr(mosaic_gpu, name) for name in ("_existing_groups", "_online_normaliser", "_stream")
}


@needs_interpreter
@pytest.mark.parametrize(
    ("name", "fault", "touched"),
    [
        ("_existing_groups", _everything_exists, 1),
        ("_existing_groups", _one_group_less, 2),
        ("_online_normaliser", _forgets_to_rescale, 1),
        ("_stream", _first_tile_only, 2),
    ],
    ids=["no mask at the ragged end", "mask one group short", "no rescale of the sum", "later tiles left out"],
)
def test_faults_in_the_kernels_are_found(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    name: str,
    fault: Callable[..., Any],
    touched: int,
) -> None:
    monkeypatch.setattr(mosaic_gpu, name, fault)
    with pytest.raises(AssertionError):
        check_mosaic(capfd, "float32", passes=(touched,))


@needs_interpreter
@pytest.mark.parametrize("missing", ["commit_smem", "wait_smem_to_gmem"])
def test_missing_waits_are_found(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], missing: str
) -> None:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    monkeypatch.setattr(plgpu, missing, lambda *_: None)
    with pytest.raises((RuntimeError, AssertionError)):
        check_mosaic(capfd, "float32", passes=(2,))


def _scale_of_the_other_law(*scales: Any) -> Any:
    return laws.Exponents(*scales[2:], *scales[:2])


def _does_not_combine(largest: Any, total: Any) -> Any:
    return (jnp.max(largest, axis=-1) + jnp.log2(jnp.sum(total, axis=-1))) / jnp.float32(laws.LOG2_E)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_columns", lambda shape: jnp.zeros(shape, jnp.int32)),
        ("Exponents", _scale_of_the_other_law),
        ("combine_normalisers", _does_not_combine),
        ("residual_tile", lambda scales, target, draft: jnp.exp2(target * scales.target_scale + scales.target_offset)),
    ],
    ids=["no mask at the ragged end", "laws exchanged", "parts added without their maxima", "draft not taken away"],
)
def test_faults_in_the_portable_bodies_are_found(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]
) -> None:
    monkeypatch.setattr(portable, name, fault)
    with pytest.raises(AssertionError):
        check_portable()


def test_requests_that_share_rows_by_mistake_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of request b start at b * T; a constant offset must not pass the comparison of batches."""
    values = [example(300, "float32", seed) for seed in range(2)]
    targets, drafts = (jnp.stack([value[place] for value in values]) for place in range(2))
    rows = jnp.asarray([[2, 0], [0, 1]], jnp.int32)
    scales = jnp.zeros((4, 2), jnp.float32) + jnp.asarray([1.0, -9.0, 1.0, -9.0])[:, None]

    def sums(target_logits: Any, draft_logits: Any, rows: Any, scales: Any) -> Any:
        return portable.residual_sums(target_logits, draft_logits, rows, scales, width=WIDTH, interpret=True)

    def batched() -> np.ndarray:
        run = jax.vmap(batching.sums_of_requests(sums), in_axes=(0, 0, None, None))
        return np.asarray(jax.jit(run)(targets, drafts, rows, scales))

    one = jax.jit(sums)
    alone = np.stack([np.asarray(one(*laws, rows, scales)) for laws in zip(targets, drafts, strict=True)])
    np.testing.assert_allclose(batched(), alone, rtol=1e-6)
    monkeypatch.setattr(batching, "first_row_of_requests", lambda size, num_rows: jnp.zeros(size, jnp.int32))
    assert not np.allclose(batched(), alone, rtol=1e-3)
