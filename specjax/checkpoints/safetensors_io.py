"""Safetensors files, checked before a byte of them is used.

The `safetensors` package maps files into memory; a file that was cut after its header was written can read as
zeros. So the header and the file's length are compared first, and every fault names the file.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
_DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


def read_header(path: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    """Checks a file and returns its tensors' descriptions.

    Args:
        path: a .safetensors file.

    Returns:
        Name to `{"dtype", "shape", "data_offsets"}`, offsets in bytes after the header.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if the file is empty, cut short, too long or has a broken header.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such weights file")
    size = path.stat().st_size
    if size < _LENGTH_BYTES:
        raise ValueError(f"{path}: truncated: a safetensors file has at least {_LENGTH_BYTES} bytes; got {size}")
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if header_bytes > _MAX_HEADER_BYTES:
            raise ValueError(f"{path}: header length must be at most {_MAX_HEADER_BYTES} bytes; got {header_bytes}")
        if _LENGTH_BYTES + header_bytes > size:
            raise ValueError(f"{path}: truncated inside the header of {header_bytes} bytes; the file has {size}")
        try:
            header = json.loads(file.read(header_bytes), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: the header is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise ValueError(f"{path}: the header must be a JSON object; got {type(header).__name__}")
    header.pop("__metadata__", None)
    end = 0
    for begin, stop in sorted(_check_entry(path, name, entry) for name, entry in header.items()):
        if begin != end:
            raise ValueError(f"{path}: tensors must lie back to back; one begins at byte {begin}, expected {end}")
        end = stop
    expected = _LENGTH_BYTES + header_bytes + end
    if size < expected:
        raise ValueError(f"{path}: truncated: the header promises {expected} bytes; the file has {size}")
    if size > expected:
        raise ValueError(f"{path}: {size - expected} bytes too long: the header promises {expected}; got {size}")
    return header


def read_tensors(path: str | os.PathLike[str]) -> dict[str, np.ndarray]:
    """All tensors of a file, after `read_header` found it whole; they are read from disk when they are used.

    Raises:
        FileNotFoundError: see `read_header`.
        ValueError: see `read_header`.
    """
    path = Path(path)
    header = read_header(path)
    num_bytes = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if not num_bytes:
        return {name: np.zeros(entry["shape"], _DTYPES[entry["dtype"]]) for name, entry in header.items()}
    data = np.memmap(path, np.uint8, mode="r", offset=path.stat().st_size - num_bytes)
    tensors = {}
    for name, entry in header.items():
        begin, stop = entry["data_offsets"]
        tensors[name] = data[begin:stop].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a file under a temporary name, then renames it.

    Args:
        path: the file to make or replace.
        tensors: arrays by name.
        metadata: texts kept in the header.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    os.close(handle)
    try:
        # None, not an empty mapping: with no tensors either, the package would write a broken header.
        safetensors.numpy.save_file(whole, temporary, metadata=dict(metadata) if metadata else None)
        read_header(temporary)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _check_entry(path: Path, name: str, entry: Any) -> tuple[int, int]:
    try:
        dtype, shape, (begin, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        sizes = [*shape, begin, stop]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: tensor `{name}` has a broken description: {entry!r}") from error
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{path}: sizes and offsets of tensor `{name}` must be integers from 0 on; got {entry!r}")
    if dtype not in _DTYPES:
        raise ValueError(f"{path}: tensor `{name}` must have a dtype among {', '.join(_DTYPES)}; got {dtype!r}")
    # Python integers: sizes of a hostile header must not wrap around.
    if stop - begin != math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize:
        raise ValueError(f"{path}: tensor `{name}` of shape {shape} and dtype {dtype} has {stop - begin} bytes")
    return begin, stop


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"`{next(name for name in names if names.count(name) > 1)}` appears twice")
    return value
