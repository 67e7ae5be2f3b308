"""What ran: digests of weights, versions, machine. A number without them belongs to nobody."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import sys
import time
from typing import Any

import jax
import numpy as np

import pallas_kernels
import specjax

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "specjax")


def params_digest(params: Any) -> str:
    """SHA-256 over the paths, shapes, dtypes and bytes of all arrays of a pytree; "" when there are none."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        return ""
    digest = hashlib.sha256()
    for path, leaf in leaves:
        array = np.ascontiguousarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{array.shape}{array.dtype}".encode())
        # uint8 view: hashlib takes no bfloat16 buffers.
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def source_digest() -> str:
    """SHA-256 over the names and texts of all source files that decode: those of `specjax` and `pallas_kernels`."""
    digest = hashlib.sha256()
    for package in (specjax, pallas_kernels):
        (folder,) = map(pathlib.Path, package.__path__)
        for path in sorted(folder.rglob("*.py")):
            digest.update(f"{package.__name__}/{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def num_params(params: Any) -> int:
    """Number of array elements of a pytree."""
    return sum(int(np.size(leaf)) for leaf in jax.tree.leaves(params))


def describe_config(config: Any) -> Any:
    """A configuration as plain JSON values; objects without fields become their class name."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {field.name: describe_config(getattr(config, field.name)) for field in dataclasses.fields(config)}
        return {"class": type(config).__name__, **fields}
    if isinstance(config, dict):
        return {str(key): describe_config(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [describe_config(value) for value in config]
    if config is None or isinstance(config, bool | int | float | str):
        return config
    return type(config).__name__


def describe_target(target: Any) -> dict[str, Any]:
    """Name, source, digests and configuration of a loaded target."""
    template = target.chat_template
    return {
        "name": target.name,
        "source": target.source,
        "digest": target.digest,
        "tokenizer_digest": getattr(target.tokenizer, "digest", None),
        "template_digest": template.digest if template is not None else None,
        "dtype": str(jax.tree.leaves(target.params)[0].dtype),
        "num_params": num_params(target.params),
        "config": describe_config(target.config),
    }


def describe_system(drafter: Any, params: Any) -> dict[str, Any]:
    """Configuration of a drafter, digest and size of its parameters; the embedding, which is the target's, left out."""
    own = params
    if isinstance(params, dict):
        own = {name: value for name, value in params.items() if name != "embed_tokens"}
    return {"drafter": describe_config(drafter), "digest": params_digest(own), "num_params": num_params(own)}


def describe_machine() -> dict[str, Any]:
    """Devices, processor count and operating system."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "device_kind": devices[0].device_kind,
        "num_devices": len(devices),
        "num_cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.platform(),
    }


def describe_run() -> dict[str, Any]:
    """Time, command, versions and machine of this process."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": [pathlib.Path(sys.argv[0]).name, *sys.argv[1:]],
        "versions": versions,
        "machine": describe_machine(),
    }
