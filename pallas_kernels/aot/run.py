"""Compiles cases for a chip in a process of their own and returns what was found.

One process a chip: Mosaic GPU keeps compiled kernels, and would hand one chip's kernel to another. The dumps that
registers and instructions are read from have to be switched on before jax's module is imported, too.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

import jax

from pallas_kernels.aot.chips import CHIPS

_RESULT_MARK = "AOT_RESULT "


@dataclasses.dataclass(frozen=True)
class Case:
    """A program to compile.

    Attributes:
        name: for reports; unique.
        builder: "package.module:function"; called with `arguments`, returns the function to compile and a tuple of
            its arguments' shapes (pytrees of `jax.ShapeDtypeStruct`). It runs with the chip declared.
        arguments: keyword arguments of the builder, as JSON has them.
    """

    name: str
    builder: str
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)


def why_unavailable() -> str | None:
    """Why this environment cannot compile for CUDA, None if it can.

    Needed are jax's CUDA plugin of the same version, ptxas and nvdisasm; none of CUDA's libraries:
    `pip install -e '.[aot]'`.
    """
    for package in ("jax-cuda12-plugin", "jax-cuda12-pjrt"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"{package} is not installed (extra `aot`)"
        if version != jax.__version__:
            return f"{package} {version} is not for jax {jax.__version__}"
    missing = [tool for tool in ("ptxas", "nvdisasm") if find_tool(tool) is None]
    return f"{' and '.join(missing)} not found (extra `aot`)" if missing else None


def find_tool(name: str) -> pathlib.Path | None:
    """A CUDA tool inside the installed `nvidia` wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for root in roots for path in sorted(pathlib.Path(root).glob(f"*/bin/{name}"))]
    return found[0] if found else None


def compile_cases(chip_name: str, cases: Sequence[Case], *, timeout_seconds: float = 1800.0) -> list[dict[str, Any]]:
    """Compiles each case for a chip of `CHIPS`.

    Returns:
        A dictionary a case, in order:
            name, chip, jax: what was compiled for what;
            error: why it could not be compiled; the rest is missing then;
            mosaic_kernels: of each, `target`, `registers`, `spill_bytes`, `smem_bytes` and `instructions` (counts of
                machine instructions by opcode prefix, see `inspect.OPCODES`);
            kernels: names of the instructions of the compiled program that start a kernel;
            bytes_moved: operands and results of these, each counted once, in bytes;
            temporary_bytes: scratch memory of the program;
            is_complete: whether `mosaic_kernels` holds all of the program's Mosaic kernels;
            seconds: time to compile.

    Raises:
        ValueError: for an unknown chip.
        RuntimeError: if nothing can be compiled here, or the process died; the message holds the end of its output.
    """
    if chip_name not in CHIPS:
        raise ValueError(f"`chip_name` must be one of {sorted(CHIPS)}; got {chip_name!r}")
    reason = why_unavailable()
    if reason is not None:
        raise RuntimeError(f"cannot compile for {chip_name}: {reason}")
    results = _run(chip_name, cases, timeout_seconds)
    # A kernel that an earlier case of the process had too is not compiled again, and not dumped: on its own, it is.
    return [
        result if result.get("is_complete", True) else _run(chip_name, [case], timeout_seconds)[0]
        for case, result in zip(cases, results, strict=True)
    ]


def _run(chip_name: str, cases: Sequence[Case], timeout_seconds: float) -> list[dict[str, Any]]:
    """One process; see `compile_cases`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "MOSAIC_GPU_DUMP_TO": folder,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        }
        done = subprocess.run(
            [sys.executable, "-m", "pallas_kernels.aot.worker"],
            input=json.dumps({"chip": chip_name, "cases": [dataclasses.asdict(case) for case in cases]}),
            capture_output=True,
            text=True,
            env=environment,
            timeout=timeout_seconds,
            check=False,
        )
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT_MARK)]
    results = [json.loads(line.removeprefix(_RESULT_MARK)) for line in lines]
    if done.returncode or len(results) != len(cases):
        raise RuntimeError(
            f"compiling for {chip_name} ended with code {done.returncode} after {len(results)} of {len(cases)} cases:\n"
            + done.stderr[-4000:]
        )
    return results
