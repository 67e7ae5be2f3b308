"""Target features of all rows: computed once into a cache on disk, or again for every batch.

The cache is two flat files beside a manifest. The manifest names what the numbers were made from and how many
rows are finished; it is replaced after the rows are on disk, so a killed computation goes on at the next row
and a cache that calls itself complete is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np
from tqdm import tqdm

from eval.files import write_json
from specjax.checkpoints.target import Target
from specjax.json_files import read_object
from train import mesh as mesh_lib
from train.artifacts import RunError
from train.data import Rows
from train.json_fields import shown
from train.target_features import packed_features

_DTYPES: dict[str, Any] = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


@runtime_checkable
class FeatureSource(Protocol):
    """Gives the target's features of any rows."""

    def read(self, rows: np.ndarray) -> tuple[Any, Any]:
        """Features [B, T, 3d] and final hidden states [B, T, d] of rows by index."""
        ...


class FeatureCache:
    """Features and final hidden states of all rows, in two memory-mapped files."""

    def __init__(
        self, folder: Path, key: Mapping[str, Any], shape: tuple[int, int], widths: tuple[int, int], dtype: str
    ):
        """Opens the cache of `key` below `folder`, or starts it.

        Args:
            folder: parent of all feature caches.
            key: what the numbers depend on; another key is another cache.
            shape: rows and tokens of a row.
            widths: width of the features and of the final hidden state.
            dtype: "bfloat16" or "float32".
        """
        self.key = dict(key, shape=list(shape), widths=list(widths), dtype=dtype)
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()
        self.folder = folder / digest[:16]
        self.folder.mkdir(parents=True, exist_ok=True)
        self._manifest = self.folder / "manifest.json"
        self._shape, self._dtype = shape, np.dtype(_DTYPES[dtype])
        self._arrays = [self._map(name, width) for name, width in zip(("features", "hidden"), widths, strict=True)]

    @property
    def rows_done(self) -> int:
        """Rows that are on disk, from the first on.

        Raises:
            RunError: if the manifest names a number that cannot be.
            ValueError: if the manifest is not an object in JSON.
        """
        if not self._manifest.exists():
            return 0
        manifest, num_rows = read_object(self._manifest), self._shape[0]
        done = manifest.get("rows_done")
        if type(done) is not int or not 0 <= done <= num_rows:
            raise RunError(
                f"{self._manifest}: `rows_done` must be a whole number from 0 to {num_rows}; "
                f"got {shown(manifest, 'rows_done')}; remove the file and the same command computes the features again"
            )
        return done

    @property
    def complete(self) -> bool:
        """Whether all rows are on disk."""
        return self.rows_done == self._shape[0]

    def write(self, start: int, features: np.ndarray, hidden: np.ndarray) -> None:
        """Stores consecutive rows and then counts them as done.

        Args:
            start: index of the first row; equals `rows_done`.
            features: [n, T, 3d].
            hidden: [n, T, d].
        """
        end = start + len(features)
        for array, values in zip(self._arrays, (features, hidden), strict=True):
            array[start:end] = values.astype(self._dtype)
            array.flush()
        write_json(self._manifest, {**self.key, "rows_done": end, "complete": end == self._shape[0]})

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Features and final hidden states of rows by index, in the cache's dtype."""
        features, hidden = self._arrays
        return np.asarray(features[rows]), np.asarray(hidden[rows])

    def _map(self, name: str, width: int) -> np.memmap:
        path = self.folder / f"{name}.bin"
        shape = (*self._shape, width)
        size = int(np.prod(shape)) * self._dtype.itemsize
        if not path.exists() or path.stat().st_size != size:
            # A missing or cut file makes the manifest worthless: start over.
            self._manifest.unlink(missing_ok=True)
            _reserve(path, size)
        return np.memmap(path, dtype=self._dtype, mode="r+", shape=shape)


def _reserve(path: Path, size: int) -> None:
    """Makes a file of zeros with all its blocks: a full disk is an error now, and not a crash while writing later."""
    try:
        with open(path, "wb") as file:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, size)
            else:
                file.truncate(size)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RunError(
            f"features need {size} bytes in {path.parent}: {error.strerror}; free some, give another `--data_dir` "
            "or use `--features=online`"
        ) from error


class OnlineFeatures:
    """Features that are computed when they are asked for."""

    def __init__(self, target: Target, rows: Rows, feature_layers: tuple[int, ...], place: Any = None) -> None:
        """Keeps the target at hand.

        Args:
            target: the frozen model; its parameters must be where they are used.
            rows: all rows.
            feature_layers: layers to read.
            place: function that puts a batch array onto the devices; None leaves that to jit.
        """
        self._target, self._rows, self._feature_layers = target, rows, feature_layers
        self._place = place or (lambda array: array)

    def read(self, rows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Features and final hidden states of rows by index, in the target's dtype, on the devices."""
        return packed_features(
            self._target.params,
            self._target.config,
            self._place(self._rows.tokens[rows]),
            self._place(self._rows.segment_ids[rows]),
            self._feature_layers,
        )


def features_key(target: Target, rows: Rows, feature_layers: tuple[int, ...]) -> dict[str, Any]:
    """What cached features depend on."""
    digest = hashlib.sha256()
    digest.update(np.ascontiguousarray(rows.tokens).tobytes())
    digest.update(np.ascontiguousarray(rows.segment_ids).tobytes())
    return {
        "target_digest": target.digest,
        "target_dtype": str(target.params["embed_tokens"].dtype),
        "rows_digest": digest.hexdigest(),
        "feature_layers": list(feature_layers),
    }


def cache_features(
    folder: Path,
    target: Target,
    rows: Rows,
    feature_layers: tuple[int, ...],
    *,
    dtype: str,
    rows_at_once: int,
    progress: bool,
    title: str,
) -> FeatureCache:
    """Computes what is missing of the cache of these rows.

    Args:
        folder: parent of all feature caches.
        target: the frozen model.
        rows: all rows.
        feature_layers: layers to read.
        dtype: "bfloat16" or "float32".
        rows_at_once: rows of one forward.
        progress: whether to show a progress bar.
        title: what the progress bar says.

    Returns:
        The complete cache.
    """
    width = target.config.hidden_size
    cache = FeatureCache(
        folder,
        features_key(target, rows, feature_layers),
        rows.tokens.shape,
        (len(feature_layers) * width, width),
        dtype,
    )
    source = OnlineFeatures(target, rows, feature_layers)
    with tqdm(total=rows.num_rows, initial=cache.rows_done, desc=title, unit="row", disable=not progress) as bar:
        for start in range(cache.rows_done, rows.num_rows, rows_at_once):
            wanted = np.arange(start, min(start + rows_at_once, rows.num_rows))
            # The last forward repeats its last row, so that one compiled shape serves all.
            padded = np.minimum(np.arange(start, start + rows_at_once), rows.num_rows - 1)
            features, hidden = (np.asarray(array)[: len(wanted)] for array in source.read(padded))
            cache.write(start, features, hidden)
            bar.update(len(wanted))
    return cache


def hidden_covariance(source: FeatureSource, rows: Rows, *, max_rows: int, rows_at_once: int) -> np.ndarray:
    """Uncentred covariance of the final hidden states at supervised tokens, [d, d] float32.

    It says which directions the head's inputs really take, which decides what a low-rank head must keep.

    Args:
        source: the features.
        rows: all rows.
        max_rows: rows to read at most, spread evenly over all.
        rows_at_once: rows of one read.

    Returns:
        The mean of h h^T.
    """
    chosen = np.unique(np.linspace(0, rows.num_rows - 1, min(max_rows, rows.num_rows)).astype(np.int64))
    total: np.ndarray | float = 0.0
    count = 0
    for start in range(0, len(chosen), rows_at_once):
        wanted = chosen[start : start + rows_at_once]
        padded = np.resize(wanted, rows_at_once)
        hidden = mesh_lib.fetch(source.read(padded)[1])[: len(wanted)]
        states = hidden[rows.loss_mask[wanted]].astype(np.float64)
        total = total + states.T @ states
        count += len(states)
    return np.asarray(total / count, np.float32)
