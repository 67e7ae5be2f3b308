"""Trains a draft model with a slim LM head for a language model, from prompts to report.

python -m train.slimspec --flagfile=smollm2.flags
python -m train.slimspec --flagfile=llama8b.flags --dry_run

The same command goes on where an earlier one stopped, whatever stopped it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from train.config import TrainConfig
from train.error_file import REPORTED_ERRORS
from train.flags import parse_command_line

EXIT_FAILED = 1
EXIT_BAD_FLAGS = 2
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: what follows the program's name; the process's own by default.

    Returns:
        0, or after one line on standard error: 1 if the run could not go on, 2 if the flags are wrong, 130
        if it was interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        config = parse_command_line(arguments)
    except ValueError as error:
        return report_error(error, EXIT_BAD_FLAGS)
    try:
        _run(config, arguments)
    except KeyboardInterrupt:
        return report_error("interrupted; the same command goes on where this one stopped", EXIT_INTERRUPTED)
    except REPORTED_ERRORS as error:
        # One line is what the user of a command needs; error.txt has the rest for who looks for a fault.
        return report_error(error, EXIT_FAILED)
    return 0


def _run(config: TrainConfig, arguments: Sequence[str]) -> None:
    # Imported here, so that a wrong flag is reported at once.
    from specjax.checkpoints.target import load_config
    from train import mesh, pipeline, plan
    from train.inputs import check_inputs

    if config.dry_run:
        check_inputs(config)
        print(plan.make_plan(config, load_config(config.target)))
        return
    mesh.start_processes(config.coordinator, config.num_processes, config.process_id)
    print(f"done: {pipeline.run(config, arguments)}")


def report_error(error: object, status: int) -> int:
    """One line on standard error; returns the exit status."""
    message = " ".join(str(error).split()) or type(error).__name__
    print(f"error: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
