"""The differences between the supported releases of jax, in one place: nothing else looks at jax's version.

Mosaic GPU is imported inside the functions: programs that never use it do not pay for the import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

_VERSION = jax.__version_info__[:2]

# Interpreting Mosaic GPU kernels with wgmma, layouts and transposed references works from 0.11 on.
HAS_MOSAIC_INTERPRETER = _VERSION >= (0, 11)
# From 0.12 on a race raises; before, it is printed as RACE DETECTED and the values are returned all the same.
RACES_RAISE = _VERSION >= (0, 12)


def mosaic_kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    scratch_types: Any = (),
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    num_threads: int | None = None,
    thread_name: str | None = None,
    approx_math: bool = True,
    interpret: Any = None,
) -> Callable[..., Any]:
    """`plgpu.kernel` under lane semantics, which all releases know (the default changed from one to the next).

    Args:
        body: the kernel; takes references to the inputs, then to the outputs, then the scratch.
        out_type: pytree of `jax.ShapeDtypeStruct`.
        scratch_types: sequence or dictionary of scratch types.
        grid: number of CTAs along each axis.
        grid_names: names of these axes for `lax.axis_index`.
        num_threads: number of warpgroups a CTA, None for one without an axis of its own.
        thread_name: name of that axis.
        approx_math: let exp, log and division be approximate (about 2 ulp; log has an absolute error near 1).
        interpret: result of `mosaic_interpreter`, or None to compile.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    options: dict[str, Any] = {} if interpret is None else {"interpret": interpret}
    if num_threads is not None:
        options |= {"num_threads": num_threads, "thread_name": thread_name}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=grid,
        grid_names=grid_names,
        compiler_params=plgpu.CompilerParams(approx_math=approx_math, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **options,
    )


def mosaic_interpreter(*, detect_races: bool = True, **options: Any) -> Any:
    """Parameters that make `mosaic_kernel` interpret its body on CPU.

    Raises:
        NotImplementedError: on releases whose interpreter lacks wgmma and layouts.
    """
    if not HAS_MOSAIC_INTERPRETER:
        raise NotImplementedError(f"jax {jax.__version__} cannot interpret Mosaic GPU kernels; 0.11 and later can")
    from jax.experimental.pallas import mosaic_gpu

    plgpu: Any = mosaic_gpu
    return plgpu.InterpretGPUParams(detect_races=detect_races, **options)


def transpose(ref: Any) -> Any:
    """A transposed view of a two-dimensional SMEM reference."""
    if _VERSION >= (0, 11):
        return ref.T
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.transpose_ref(ref, (1, 0))


def load(ref: Any, layout: Any, *, optimized: bool = True) -> jax.Array:
    """All of a reference, in an explicit register layout; not `optimized` allows slow access patterns."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    plgpu_load: Any = plgpu.load
    index = () if _VERSION >= (0, 11) else ((),)
    return plgpu_load(ref, *index, layout=layout, optimized=optimized)


def block_spec(
    block_shape: Sequence[int | None], index_map: Callable[..., Any], *, in_bounds: bool = False, **options: Any
) -> Any:
    """`plgpu.BlockSpec`; `in_bounds` promises that no block reaches past the array (older releases take no promise)."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if in_bounds and _VERSION >= (0, 11):
        options["oob_fill_mode"] = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    return plgpu.BlockSpec(block_shape, index_map, **options)
