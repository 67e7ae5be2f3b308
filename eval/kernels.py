"""What the kernels cost: by shapes and compiler for a chip that is not here, or measured on the GPU that is.

python -m eval.kernels --chip=h200                   floors, and registers, memory and bytes of the compiled programs
python -m eval.kernels --chip=h200 --engine_step     the whole engine step at Llama-3.1-8B's shapes
python -m eval.kernels --run                         checks values and measures on this machine's GPU
"""

from __future__ import annotations

import pathlib
import sys

import jax
from absl import flags

from eval import files
from eval.command_line import run_command
from eval.kernel_compiled import static_report
from eval.kernel_engine import engine_step_case, print_engine_step
from eval.kernel_floors import floors
from eval.kernel_measure import measure
from eval.kernel_tables import print_measured, print_static
from pallas_kernels import aot
from pallas_kernels.aot.chips import CHIPS, Chip
from specjax.verification import get_verifier


def define_flags() -> None:
    """Flags of this command."""
    flags.DEFINE_string("chip", "h200", f"Chip of the static report: {', '.join(sorted(CHIPS))}.")
    flags.DEFINE_bool("compile", True, "Compile for the chip where the compiler is installed (extra `aot`); minutes.")
    flags.DEFINE_bool("engine_step", False, "Compile the whole engine step instead of the kernels.")
    flags.DEFINE_string("verifier", "block", "Rule of the engine step.")
    flags.DEFINE_bool("run", False, "Check and time the kernels on this machine's GPU.")
    flags.DEFINE_integer("rounds", 30, "Timed runs of each program with --run.", lower_bound=1)
    flags.DEFINE_string("output", None, "File for the report as JSON.")


def main() -> int:
    """Runs the command; 1 if values were wrong."""
    values = flags.FLAGS
    if values.run and values.engine_step:
        raise ValueError("`--run` and `--engine_step` exclude each other: the step is compiled only")
    # Asked before the minutes that a report takes.
    if values.output is not None and pathlib.Path(values.output).is_dir():
        raise ValueError(f"`--output` must be a file; {values.output} is a folder")
    status = 0
    if values.run:
        report = measure(
            list(floors()), _this_chip(), rounds=values.rounds, on_progress=lambda text: print(text, file=sys.stderr)
        )
        print_measured(report)
        status = int(bool(report["failures"]))
    elif values.engine_step:
        if values.chip not in CHIPS:
            raise ValueError(f"`--chip` must be one of {', '.join(sorted(CHIPS))}; got {values.chip!r}")
        get_verifier(values.verifier)
        reason = aot.why_unavailable()
        if reason is not None:
            raise ValueError(f"`--engine_step` needs the CUDA compiler: {reason}")
        (report,) = aot.compile_cases(values.chip, [engine_step_case(verifier=values.verifier)])
        print_engine_step(report)
        status = int("error" in report)
    else:
        report = static_report(values.chip, list(floors()), compile_programs=values.compile)
        print_static(report)
    if values.output is not None:
        files.write_json(pathlib.Path(values.output), report)
    return status


def _this_chip() -> Chip:
    """The data sheet of this machine's first device.

    Raises:
        ValueError: if it is no GPU, or one without a data sheet here.
    """
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise ValueError(f"`--run` needs a GPU; jax found {device.platform} only (static figures: --chip=h200)")
    matches = [chip for chip in CHIPS.values() if chip.name == device.device_kind]
    if not matches:
        raise ValueError(f"`--run` knows {', '.join(chip.name for chip in CHIPS.values())}; got {device.device_kind}")
    return matches[0]


if __name__ == "__main__":
    define_flags()
    run_command(main)
