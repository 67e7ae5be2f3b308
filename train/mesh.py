"""Several devices through `jax.sharding`: axes data, fsdp and tensor; XLA adds the communication."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from train.artifacts import RunError

AXES = ("data", "fsdp", "tensor")


def start_processes(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """Joins the processes of a multi-host run; nothing for a single process.

    Raises:
        RunError: if the others cannot be reached.
    """
    if coordinator is None:
        return
    try:
        jax.distributed.initialize(coordinator, num_processes, process_id)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"process {process_id} cannot join `--coordinator` {coordinator}: {reason}") from error


def make_mesh(axes: dict[str, int]) -> Mesh:
    """A mesh of all three axes; axes that are not named have size 1.

    Args:
        axes: sizes by name.

    Returns:
        The mesh, over the first devices.

    Raises:
        RunError: if there are not enough devices, or processes would be left without one.
    """
    sizes = tuple(axes.get(name, 1) for name in AXES)
    needed, devices = math.prod(sizes), jax.devices()
    if needed > len(devices):
        kind = devices[0].platform
        raise RunError(f"`--mesh` needs {needed} devices; this machine has {len(devices)} ({kind})")
    if jax.process_count() > 1 and needed != len(devices):
        raise RunError(f"`--mesh` must use all {len(devices)} devices of a multi-host run; got {needed}")
    return Mesh(np.asarray(devices[:needed]).reshape(sizes), AXES)


def row_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch go to the data and fsdp devices; tensor devices share them."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on all devices."""
    return NamedSharding(mesh, PartitionSpec())


def weight_shardings(mesh: Mesh, tree: Any) -> Any:
    """A sharding for each array: matrices are split over tensor by their last axis and over fsdp by their first.

    An axis that does not divide evenly stays whole. The rule looks at shapes only, so that an optimiser's
    moments lie where their weights lie.

    Args:
        mesh: the devices.
        tree: arrays or shapes.

    Returns:
        The tree of shardings.
    """

    def choose(leaf: Any) -> NamedSharding:
        if leaf.ndim < 2:
            return replicated(mesh)
        first = "fsdp" if leaf.shape[0] % mesh.shape["fsdp"] == 0 else None
        last = "tensor" if leaf.shape[-1] % mesh.shape["tensor"] == 0 else None
        return NamedSharding(mesh, PartitionSpec(first, *([None] * (leaf.ndim - 2)), last))

    return jax.tree.map(choose, tree)


def put(tree: Any, shardings: Any) -> Any:
    """Places host or device arrays; every process of a multi-host run holds the whole value and places its part."""

    def place(leaf: Any, sharding: NamedSharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(place(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(place, tree, shardings)


def fetch(tree: Any) -> Any:
    """Whole arrays on the host; every process of a multi-host run must call this."""
    if jax.process_count() > 1:
        tree = multihost_utils.process_allgather(tree, tiled=True)
    return jax.device_get(tree)


def wait_for_all(name: str) -> None:
    """Lets the processes of a multi-host run meet; nothing for a single process."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
