"""The stages of a run, from prompts to report. Each one keeps its result in the run directory and is not repeated."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from eval import report
from eval.files import read_json, write_json
from eval.provenance import describe_target
from specjax.checkpoints.eagle import export_drafter
from specjax.checkpoints.target import Target, load_target
from specjax.drafters.eagle3_layer import Eagle3Config, Params
from train import mesh as mesh_lib
from train.artifacts import lock_directory, open_run_directory, read_record, update_record
from train.config import TrainConfig
from train.data import Rows
from train.error_file import error_file
from train.evaluation import evaluate
from train.inputs import check_inputs
from train.plan import drafter_config
from train.prepare import prepare_rows
from train.stages import stage
from train.trainer import Trainer


@dataclasses.dataclass
class SharedInputs:
    """What runs that differ in their drafter alone make once and use together.

    Attributes:
        config: the settings that prompts, answers and rows are made with; its seed is theirs, whatever seed a run
            starts its drafter and orders its rows with.
        target: the model, loaded by the first run that needs it.
        rows: training and held-out rows, made by the first run that needs them.
    """

    config: TrainConfig
    target: Target | None = None
    rows: tuple[Rows, Rows] | None = None


def run(config: TrainConfig, argv: Sequence[str], *, shared: SharedInputs | None = None) -> Path:
    """Runs all stages that are not done yet.

    Args:
        config: the settings.
        argv: the command, for the record.
        shared: what earlier runs of this process on the same target and `--data_dir` have made; filled if empty.

    Returns:
        The run directory.

    Raises:
        RunError: for a directory of another run, or anything else that one line explains.
        ValueError: if settings do not fit the target, or a file is broken.
        FileNotFoundError: if the target or the dataset cannot be found.
    """
    run_dir, data_dir = Path(config.run_dir), Path(config.data_dir or config.run_dir)
    first_process = jax.process_index() == 0
    _check_before_work(config)
    with contextlib.ExitStack() as stack:
        if first_process:
            for folder in {run_dir.resolve(), data_dir.resolve()}:
                stack.enter_context(lock_directory(folder))
            open_run_directory(config, argv)
            stack.enter_context(error_file(run_dir))
        mesh_lib.wait_for_all("run directory")
        shared = shared or SharedInputs(config)
        target, drafter = _load(config, run_dir, shared, record=first_process)
        rows, held_out = _rows(shared, target, run_dir, data_dir)
        trainer = Trainer(config, target, drafter, rows, held_out, data_dir)
        if first_process and "ids" in trainer.vocabulary:
            write_json(run_dir / "data" / "vocabulary.json", trainer.vocabulary)
        with stage("training") as done:
            state = trainer.train(run_dir)
            num_skipped, params = mesh_lib.fetch((state.num_skipped, state.params))
            done(f"{config.train_steps} steps, {num_skipped} skipped" if trainer.trains else "nothing to train")
        if not first_process:
            return run_dir
        with stage("export") as done:
            done(str(_export(config, target, trainer.drafter, params, run_dir)))
        if config.evaluate:
            with stage("evaluation") as done:
                done(evaluate(config, target, run_dir))
            with stage("report") as done:
                done(str(report.write_report(run_dir)))
    return run_dir


def _check_before_work(config: TrainConfig) -> None:
    """Finds what would stop the run only after its answers are generated."""
    check_inputs(config)
    if config.mesh:
        mesh_lib.make_mesh(config.mesh_axes)


def _load(config: TrainConfig, run_dir: Path, shared: SharedInputs, *, record: bool) -> tuple[Target, Eagle3Config]:
    # A template that shows the date must show the same one when a run goes on after midnight.
    started = read_record(run_dir)["starts"][0]["time"][:10]
    with stage("target") as done:
        target = shared.target or load_target(
            config.target, dtype=config.target_dtype, cache_dir=config.cache_dir, date=config.template_date or started
        )
        shared.target = target
        drafter = drafter_config(config, target.config)
        if record:
            update_record(run_dir, target=describe_target(target))
        done(f"{target.name}, {config.target_dtype}")
    return target, drafter


def _rows(shared: SharedInputs, target: Target, run_dir: Path, data_dir: Path) -> tuple[Rows, Rows]:
    manifest = Path("data") / "manifest.json"
    if shared.rows is None:
        shared.rows = prepare_rows(shared.config, target, run_dir, data_dir)
    elif jax.process_index() == 0 and (data_dir / manifest).exists():
        write_json(run_dir / manifest, read_json(data_dir / manifest))
    return shared.rows


def _export(config: TrainConfig, target: Target, drafter: Eagle3Config, params: Params, run_dir: Path) -> Path:
    """Writes the drafter under a temporary name and renames the folder, so that an export is whole or absent."""
    folder = run_dir / "export"
    if folder.exists():
        return folder
    temporary = run_dir / ".export.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    metadata = {"training": config.identity(), "draft_length": max(config.draft_length_list)}
    export_drafter(temporary, drafter, jax.tree.map(jnp.asarray, params), describe_target(target), metadata)
    temporary.rename(folder)
    return folder
