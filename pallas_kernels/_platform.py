"""Which implementation of a kernel runs: by name, or by the platform that a program is lowered for.

Nothing here reads the environment or jax's configuration, and nothing is remembered between calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, get_args

import jax
from jax import lax

Implementation = Literal["xla", "mosaic_gpu", "pallas", "interpret"]
"""Names of implementations.

    xla: plain jax.numpy; every platform.
    mosaic_gpu: Mosaic GPU kernels; the NVIDIA chips that the operation lists.
    pallas: the portable `pl.pallas_call` body, compiled for TPU (or, through Triton, for GPU).
    interpret: the same portable body, interpreted; every platform, slow, for tests.
"""

Capability = tuple[int, int]


def check_name(implementation: str | None) -> None:
    """Raises ValueError unless the argument is None or the name of an implementation."""
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"`implementation` must be None or one of {get_args(Implementation)}; got {implementation!r}")


def unavailable(op: str, implementation: str, reason: str) -> NotImplementedError:
    """The error (to be raised by the caller) for a named implementation that cannot serve an operation."""
    return NotImplementedError(f"{op}: implementation {implementation!r} is not available: {reason}")


def gpu_compute_capability() -> Capability | None:
    """Compute capability (major, minor) of the NVIDIA chip that programs are now lowered for, None without one.

    A device declared through `jax.sharding.use_abstract_mesh` (compilation without a chip) comes first, then the
    first CUDA device of this process.
    """
    declared = jax.sharding.get_abstract_mesh().abstract_device
    if declared is not None:
        return _capability_of(declared)
    try:
        return _capability_of(jax.devices("cuda")[0])
    except RuntimeError:  # jax's way to say that there is no such platform
        return None


def _capability_of(device: Any) -> Capability | None:
    text = getattr(device, "compute_capability", None)
    # AMD devices carry names such as "gfx942" there.
    if not isinstance(text, str) or text.count(".") != 1:
        return None
    major, minor = text.split(".")
    return int(major), int(minor)


def choose(
    implementation: Implementation | None,
    candidates: Mapping[str, Callable[..., Any]],
    *,
    op: str = "operation",
    served: Collection[Capability] = ((9, 0),),
) -> Callable[..., Any]:
    """The function to call for an implementation, or one that decides by platform when the program is lowered.

    With None: CUDA takes "mosaic_gpu" if it is among the candidates and `served` has the chip's compute capability,
    otherwise "xla"; TPU takes "pallas" if it is a candidate; everything else takes "xla". The capability is looked up
    here, before anything is traced: lowering a Hopper kernel for another chip can end the process. Where a program
    is lowered for CUDA without a known chip, it takes "xla" for the same reason.

    Args:
        implementation: a name, or None for the choice by platform.
        candidates: functions of the same arguments by implementation name; "xla" must be among them.
        op: name of the operation, for messages.
        served: compute capabilities that the "mosaic_gpu" candidate compiles for.

    Raises:
        ValueError: if the name is not that of an implementation.
        NotImplementedError: if a named implementation cannot serve: it is no candidate, or the chip is another one.
    """
    check_name(implementation)
    capability = gpu_compute_capability() if "mosaic_gpu" in candidates else None
    if implementation is None:
        by_platform = {"default": candidates["xla"]}
        if capability is not None and capability in served:
            by_platform["cuda"] = candidates["mosaic_gpu"]
        if "pallas" in candidates:
            by_platform["tpu"] = candidates["pallas"]
        return lambda *args: lax.platform_dependent(*args, **by_platform)
    if implementation not in candidates:
        raise unavailable(op, implementation, f"the operation has {', '.join(sorted(candidates))} only")
    if implementation == "mosaic_gpu" and capability is not None and capability not in served:
        names = ", ".join(f"{major}.{minor}" for major, minor in sorted(served))
        raise unavailable(
            op,
            implementation,
            f"it is compiled for compute capability {names}; the chip has {capability[0]}.{capability[1]}",
        )
    return candidates[implementation]
