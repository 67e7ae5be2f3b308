"""Target features: the same however they are batched, packed, cached or cut off."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.target import Target
from specjax.models import ForwardOutput, KVCache, forward
from train import features as features_lib
from train.artifacts import RunError
from train.data import Example, Rows, make_rows
from train.features import FeatureCache, OnlineFeatures, cache_features, hidden_covariance

LAYERS = (0, 1, 3)


def make_examples(count: int, *, seed: int = 1, longest: int = 14) -> list[Example]:
    rng = np.random.default_rng(seed)
    examples = []
    for index in range(count):
        length = int(rng.integers(3, longest))
        mask = np.arange(length) >= length // 2
        examples.append(Example(f"e{index}", rng.integers(3, 200, length).astype(np.int32), mask))
    return examples


@functools.lru_cache
def plain_forward(target_digest: str) -> Callable[..., ForwardOutput]:
    """A jitted forward of one sequence in a row of its own; one compilation for all."""
    return jax.jit(
        lambda params, config, tokens: forward(
            params,
            config,
            tokens,
            KVCache.zeros(config, 1, 16),
            jnp.zeros(1, jnp.int32),
            feature_layers=LAYERS,
        ),
        static_argnums=1,
    )


def alone(target: Target, example: Example) -> tuple[np.ndarray, np.ndarray]:
    """Features of one sequence in a forward of its own; what follows it cannot be seen by it."""
    length = len(example.tokens)
    tokens = np.zeros((1, 16), np.int32)
    tokens[0, :length] = example.tokens
    output = plain_forward(target.digest)(target.params, target.config, tokens)
    return np.asarray(output.features[0, :length]), np.asarray(output.hidden[0, :length])


def by_example(rows: Rows, features: np.ndarray, hidden: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    found = {}
    for row, names in enumerate(rows.example_ids):
        for segment, name in enumerate(names, start=1):
            place = rows.segment_ids[row] == segment
            found[name] = (features[row][place], hidden[row][place])
    return found


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("rows_at_once", [1, 2, 5])
def test_case_t7_features_belong_to_their_sequence(
    target: Target, tmp_path: Path, packing: bool, rows_at_once: int
) -> None:
    examples = make_examples(5)
    rows = make_rows(examples, 16, packing=packing)
    found = []
    for attempt in ("first", "second"):
        cache = cache_features(
            tmp_path / attempt,
            target,
            rows,
            LAYERS,
            dtype="float32",
            rows_at_once=rows_at_once,
            progress=False,
            title="",
        )
        assert cache.complete
        found.append(by_example(rows, *cache.read(np.arange(rows.num_rows))))
    for example in examples:
        features, hidden = alone(target, example)
        for attempt in found:
            np.testing.assert_allclose(attempt[example.id][0], features, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(attempt[example.id][1], hidden, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(found[0][example.id][0], found[1][example.id][0])


def test_online_features_equal_cached_ones(target: Target, tmp_path: Path) -> None:
    rows = make_rows(make_examples(9), 16, packing=True)
    cache = cache_features(tmp_path, target, rows, LAYERS, dtype="bfloat16", rows_at_once=2, progress=False, title="")
    wanted = np.array([2, 0])
    for cached, online in zip(cache.read(wanted), OnlineFeatures(target, rows, LAYERS).read(wanted), strict=True):
        assert cached.dtype == jnp.bfloat16
        # bfloat16 keeps eight bits.
        np.testing.assert_allclose(cached.astype(np.float32), np.asarray(online), rtol=2**-8, atol=1e-6)


def test_a_killed_cache_goes_on_where_it_stopped(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows(make_examples(8), 16, packing=False)
    settings = {"dtype": "bfloat16", "rows_at_once": 2, "progress": False, "title": ""}
    straight = cache_features(tmp_path / "straight", target, rows, LAYERS, **settings)
    real = features_lib.packed_features
    calls = 0

    def dies(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patched:
        patched.setattr(features_lib, "packed_features", dies)
        with pytest.raises(KeyboardInterrupt):
            cache_features(tmp_path / "cut", target, rows, LAYERS, **settings)
    again = 0

    def counts(*args: object) -> object:
        nonlocal again
        again += 1
        return real(*args)

    monkeypatch.setattr(features_lib, "packed_features", counts)
    resumed = cache_features(tmp_path / "cut", target, rows, LAYERS, **settings)
    assert again == 2
    everything = np.arange(rows.num_rows)
    for left, right in zip(straight.read(everything), resumed.read(everything), strict=True):
        np.testing.assert_array_equal(left, right)
    cache_features(tmp_path / "cut", target, rows, LAYERS, **settings)
    assert again == 2


def test_another_target_or_other_rows_are_another_cache(tmp_path: Path) -> None:
    first = FeatureCache(tmp_path, {"target_digest": "a"}, (2, 4), (6, 2), "float32")
    first.write(0, np.ones((2, 4, 6)), np.ones((2, 4, 2)))
    assert first.complete
    assert FeatureCache(tmp_path, {"target_digest": "a"}, (2, 4), (6, 2), "float32").complete
    assert not FeatureCache(tmp_path, {"target_digest": "b"}, (2, 4), (6, 2), "float32").complete


def test_case_t14_a_cut_feature_file_is_not_called_complete(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path, {"k": 1}, (2, 4), (6, 2), "float32")
    cache.write(0, np.ones((2, 4, 6)), np.ones((2, 4, 2)))
    path = cache.folder / "features.bin"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 4)
    assert FeatureCache(tmp_path, {"k": 1}, (2, 4), (6, 2), "float32").rows_done == 0


def test_a_full_disk_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features_lib.os, "posix_fallocate", no_space)
    with pytest.raises(RunError, match=r"features need 192 bytes in .*: No space left on device; .*--data_dir"):
        FeatureCache(tmp_path, {"k": 1}, (2, 4), (6, 2), "float32")
    assert not list(tmp_path.rglob("*.bin"))


def test_covariance_is_the_second_moment_at_supervised_tokens(target: Target) -> None:
    rows = make_rows(make_examples(7), 16, packing=True)
    source = OnlineFeatures(target, rows, LAYERS)
    covariance = hidden_covariance(source, rows, max_rows=100, rows_at_once=2)
    hidden = np.asarray(source.read(np.arange(rows.num_rows))[1])[rows.loss_mask]
    np.testing.assert_allclose(covariance, hidden.T @ hidden / len(hidden), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rows_done", ['"x"', "999", "-1", "1.0", "true", None])
def test_a_manifest_is_not_believed_what_cannot_be(tmp_path: Path, rows_done: str | None) -> None:
    cache = FeatureCache(tmp_path, {"k": 1}, (2, 4), (6, 2), "float32")
    manifest = cache.folder / "manifest.json"
    manifest.write_text("{}" if rows_done is None else f'{{"rows_done": {rows_done}}}')
    with pytest.raises(
        RunError, match=r"manifest\.json: `rows_done` must be a whole number from 0 to 2; got .*; remove the file"
    ):
        _ = FeatureCache(tmp_path, {"k": 1}, (2, 4), (6, 2), "float32").complete
    manifest.write_text("[]")
    with pytest.raises(ValueError, match=r"manifest\.json: must hold a JSON object; got list"):
        _ = cache.rows_done
