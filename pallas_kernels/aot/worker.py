"""The process that `run.compile_cases` starts: cases as JSON on standard input, a result a line on standard output."""

from __future__ import annotations

import importlib
import json
import os
import pathlib
import sys
import time
from typing import Any

import jax

from pallas_kernels.aot import chips, inspect
from pallas_kernels.aot.run import _RESULT_MARK, find_tool


def main() -> None:
    """Compiles what standard input asks for."""
    # Imported for its effect: it sets the root that is corrected here, to find nvdisasm.
    importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    tool = find_tool("nvdisasm")
    if tool is not None:
        os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(tool.parent.parent)
    request = json.load(sys.stdin)
    dumps = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    for case in request["cases"]:
        result = {"name": case["name"], "chip": request["chip"], "jax": jax.__version__}
        print(_RESULT_MARK + json.dumps(result | _compile(request["chip"], case, dumps)), flush=True)


def _compile(chip_name: str, case: dict[str, Any], dumps: pathlib.Path) -> dict[str, Any]:
    for path in dumps.iterdir():
        path.unlink()
    module, function_name = case["builder"].split(":")
    start = time.perf_counter()
    try:
        with chips.declare(chip_name):
            function, shapes = getattr(importlib.import_module(module), function_name)(**case["arguments"])
            compiled = jax.jit(function).trace(*chips.shaped(chip_name, shapes)).lower().compile()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    seconds = round(time.perf_counter() - start, 2)
    kernels, program = inspect.mosaic_kernels(dumps), inspect.program(compiled)
    num_calls = sum("mosaic_gpu" in name for name in program["kernels"])
    return {"seconds": seconds, "mosaic_kernels": kernels, "is_complete": len(kernels) >= num_calls, **program}


if __name__ == "__main__":
    main()
