"""Safetensors files: round trips, and every way to be broken."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from specjax.checkpoints.safetensors_io import read_header, read_tensors, write_tensors

TENSORS = {
    "a": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.arange(4).astype(ml_dtypes.bfloat16),
    "c": np.array(7, np.int64),
    "empty": np.zeros((0, 3), np.float16),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tensors(tmp_path / "model.safetensors", TENSORS, {"format": "np"})
    return tmp_path / "model.safetensors"


def write_raw(path: Path, header: bytes, data: bytes) -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_round_trip(path: Path) -> None:
    read = read_tensors(path)
    assert set(read) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        np.testing.assert_array_equal(read[name], tensor)


def test_files_are_those_of_the_safetensors_package(path: Path) -> None:
    loaded = safetensors.numpy.load_file(path)
    np.testing.assert_array_equal(loaded["a"], TENSORS["a"])
    safetensors.numpy.save_file({"x": TENSORS["a"]}, path)
    np.testing.assert_array_equal(read_tensors(path)["x"], TENSORS["a"])


def test_matrices_in_any_memory_order_are_written_right(path: Path) -> None:
    write_tensors(path, {"t": TENSORS["a"].T})
    np.testing.assert_array_equal(read_tensors(path)["t"], TENSORS["a"].T)


def test_file_without_tensors(path: Path) -> None:
    write_tensors(path, {})
    assert read_tensors(path) == {}


def test_failed_write_leaves_the_old_file_and_no_other(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        write_tensors(path, {"other": TENSORS["a"]})
    assert set(read_tensors(path)) == set(TENSORS)
    assert list(path.parent.iterdir()) == [path]


def test_case_h14_cut_last_bytes(path: Path) -> None:
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(ValueError, match=rf"{path}: truncated: the header promises {len(whole)} bytes; the file has"):
        read_tensors(path)


def test_case_h14_cut_inside_the_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=rf"{path}: truncated inside the header of \d+ bytes; the file has 40"):
        read_tensors(path)


def test_case_h14_bytes_too_many(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(8))
    with pytest.raises(ValueError, match=rf"{path}: 8 bytes too long"):
        read_tensors(path)


def test_case_h14_header_length_beyond_all_files(path: Path) -> None:
    path.write_bytes((2**60).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(ValueError, match=rf"{path}: header length must be at most 100000000 bytes; got {2**60}"):
        read_tensors(path)


@pytest.mark.parametrize("size", [0, 7])
def test_case_h14_file_without_content(path: Path, size: int) -> None:
    path.write_bytes(bytes(size))
    with pytest.raises(ValueError, match=rf"{path}: truncated: a safetensors file has at least 8 bytes; got {size}"):
        read_tensors(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such weights file"):
        read_header(tmp_path / "none.safetensors")


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"x": entry(dtype="F4")}, "`x` must have a dtype among"),
        ({"x": entry(shape=[3])}, "`x` of shape .* has 8 bytes"),
        ({"x": entry(shape=[-2])}, "sizes and offsets of tensor `x` must be integers from 0 on"),
        ({"x": entry(shape=[2.0])}, "sizes and offsets of tensor `x` must be integers"),
        ({"x": entry(offsets=["0", "8"])}, "sizes and offsets of tensor `x` must be integers"),
        ({"x": entry(offsets=[0])}, "`x` has a broken description"),
        ({"x": [1, 2]}, "`x` has a broken description"),
        # 2^32 * 2^32 elements would be none at all in 64 bits.
        ({"x": entry(shape=[2**32, 2**32], offsets=[0, 0])}, "`x` of shape .* has 0 bytes"),
        ({"x": entry(offsets=[4, 12])}, "tensors must lie back to back; one begins at byte 4"),
        ({"x": entry(), "y": entry(offsets=[4, 12])}, "tensors must lie back to back"),
    ],
)
def test_headers_that_lie_are_refused(tmp_path: Path, tensors: dict, message: str) -> None:
    path = write_raw(tmp_path / "bad.safetensors", json.dumps(tensors).encode(), bytes(12))
    with pytest.raises(ValueError, match=message):
        read_tensors(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"x": ', "the header is not JSON"),
        (b"[1, 2]", "the header must be a JSON object; got list"),
        (b"\xff\xfe{}", "the header is not JSON"),
        (b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "x": 1}', "`x` appears twice"),
    ],
)
def test_headers_that_cannot_be_read_are_refused(tmp_path: Path, header: bytes, message: str) -> None:
    path = write_raw(tmp_path / "bad.safetensors", header, bytes(4))
    with pytest.raises(ValueError, match=message):
        read_header(path)
