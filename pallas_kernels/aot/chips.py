"""GPUs to compile for, described: no chip and no driver is needed."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

# XLA's description of a target, in the text form of its GpuTargetConfigProto.
_TARGET = """gpu_device_info {{
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: {smem_per_core}  threads_per_core_limit: 2048  core_count: {num_cores}
  fpus_per_core: {fpus_per_core}  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: {memory_bandwidth}  l2_cache_size: {l2_bytes}  clock_rate_ghz: {clock_ghz}
  device_memory_size: {memory_bytes}  shared_memory_per_block_optin: {smem_per_block}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} }}
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 12 minor: 9 patch: 0 }}
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU as its maker describes it.

    Attributes:
        name: as the driver reports it.
        capability: compute capability.
        num_cores: streaming multiprocessors.
        fpus_per_core: float32 units of each.
        clock_ghz: boost clock, GHz.
        memory_bandwidth: bytes a second.
        memory_bytes: device memory.
        l2_bytes: level 2 cache.
        smem_per_core: shared memory and level 1 cache of a multiprocessor, bytes.
        smem_per_block: shared memory that one CTA can have, bytes.
        bf16_flops: dense bfloat16 operations a second on tensor cores.
    """

    name: str
    capability: tuple[int, int]
    num_cores: int
    fpus_per_core: int
    clock_ghz: float
    memory_bandwidth: int
    memory_bytes: int
    l2_bytes: int
    smem_per_core: int
    smem_per_block: int
    bf16_flops: float


CHIPS = {
    "h200": Chip(
        name="NVIDIA H200",
        capability=(9, 0),
        num_cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        memory_bandwidth=4_800_000_000_000,
        memory_bytes=150_000_000_000,
        l2_bytes=62_914_560,
        smem_per_core=233_472,
        smem_per_block=232_448,
        bf16_flops=989e12,
    ),
    "h100": Chip(
        name="NVIDIA H100 80GB HBM3",
        capability=(9, 0),
        num_cores=132,
        fpus_per_core=128,
        clock_ghz=1.98,
        memory_bandwidth=3_350_000_000_000,
        memory_bytes=85_000_000_000,
        l2_bytes=52_428_800,
        smem_per_core=233_472,
        smem_per_block=232_448,
        bf16_flops=989e12,
    ),
    "b200": Chip(
        name="NVIDIA B200",
        capability=(10, 0),
        num_cores=148,
        fpus_per_core=128,
        clock_ghz=1.965,
        memory_bandwidth=8_000_000_000_000,
        memory_bytes=190_000_000_000,
        l2_bytes=132_644_864,
        smem_per_core=233_472,
        smem_per_block=232_448,
        bf16_flops=2250e12,
    ),
    "a100": Chip(
        name="NVIDIA A100-SXM4-80GB",
        capability=(8, 0),
        num_cores=108,
        fpus_per_core=64,
        clock_ghz=1.41,
        memory_bandwidth=2_039_000_000_000,
        memory_bytes=85_000_000_000,
        l2_bytes=41_943_040,
        smem_per_core=167_936,
        smem_per_block=166_912,
        bf16_flops=312e12,
    ),
}


class DescribedDevice(AbstractDevice):
    """An abstract device that tells its compute capability, as real ones do.

    Without it Mosaic GPU compiles Hopper code whatever the chip, and code generation for another one can end the
    process.
    """

    @property
    def compute_capability(self) -> str:
        """Such as "9.0"."""
        (chip,) = (chip for chip in CHIPS.values() if chip.name == self.device_kind)
        return f"{chip.capability[0]}.{chip.capability[1]}"


def declare(chip_name: str) -> Any:
    """A context in which programs are traced and lowered for a chip."""
    chip = CHIPS[chip_name]
    device = DescribedDevice(device_kind=chip.name, num_cores=chip.num_cores, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device))


@functools.cache
def _sharding(chip_name: str) -> NamedSharding:
    chip = CHIPS[chip_name]
    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        target_config=_TARGET.format(**dataclasses.asdict(chip)),
        topology="1x1x1",
    )
    return NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())


def shaped(chip_name: str, tree: Any) -> Any:
    """The same pytree of shapes and dtypes, placed on the chip: arguments for `jax.jit(f).trace`."""
    sharding = _sharding(chip_name)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)
