"""What the compiler makes of the kernels for a chip that is not here, beside XLA's own programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.kernel_floors import HEAD, Floor
from pallas_kernels import aot
from pallas_kernels._platform import Implementation
from pallas_kernels.aot.chips import CHIPS
from pallas_kernels.block_verifier import aot_cases as verifier_cases
from pallas_kernels.low_rank_head import aot_cases as head_cases

KERNEL: Implementation = "mosaic_gpu"
XLA: Implementation = "xla"


def static_report(chip_name: str, floors: Sequence[Floor], *, compile_programs: bool = True) -> dict[str, Any]:
    """Floors of all operations, and what the compiled programs need where the compiler is installed.

    Args:
        chip_name: a chip of `pallas_kernels.aot.CHIPS`.
        floors: operations and shapes.
        compile_programs: False leaves the compiler out even where it is installed.

    Returns:
        A JSON-able dict: `chip`, `missing` (why nothing was compiled, or None) and `rows`; a row has the floor's
        fields, `floor_us`, and under "mosaic_gpu" and "xla" what `aot.compile_cases` found.

    Raises:
        ValueError: for an unknown chip.
    """
    if chip_name not in CHIPS:
        raise ValueError(f"`--chip` must be one of {', '.join(sorted(CHIPS))}; got {chip_name!r}")
    chip = CHIPS[chip_name]
    rows = [
        {
            "kernel": floor.kernel,
            "op": floor.op,
            "shape": floor.shape,
            "batch": floor.batch,
            "floor_bytes": floor.bytes,
            "flops": floor.flops,
            "floor_us": floor.microseconds(chip),
            "nu_by_bytes": floor.nu,
        }
        for floor in floors
    ]
    missing = aot.why_unavailable() if compile_programs else "compilation was not asked for"
    if missing is None:
        implementations = (KERNEL, XLA)
        cases = [_case(floor, name) for floor in floors for name in implementations]
        compiled = iter(aot.compile_cases(chip_name, cases))
        for row in rows:
            for name in implementations:
                row[name] = next(compiled)
        add_measured_nu(rows)
    return {"schema": 1, "kind": "kernels", "chip": chip_name, "missing": missing, "rows": rows}


def _case(floor: Floor, implementation: Implementation) -> aot.Case:
    if floor.kernel == HEAD:
        return head_cases.case(floor.op, floor.shape, floor.batch, implementation)
    return verifier_cases.case(floor.op, floor.shape, implementation)


def add_measured_nu(rows: list[dict[str, Any]]) -> None:
    """Bytes that a compiled head moves over those of the full head compiled the same way, where both compiled."""
    moved = {
        (row["op"], row["shape"], row["batch"]): row[KERNEL].get("bytes_moved") for row in rows if row["kernel"] == HEAD
    }
    for (op, shape, batch), own in moved.items():
        full = moved.get((op, shape.split("/")[0] + "/full", batch))
        if own and full:
            (row,) = (
                r for r in rows if (r["op"], r["shape"], r["batch"]) == (op, shape, batch) and r["kernel"] == HEAD
            )
            row["nu_by_moved_bytes"] = own / full
