"""Killed with -9 in every stage, the same command ends with the parameters of a straight run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from specjax.checkpoints.safetensors_io import read_tensors

pytestmark = pytest.mark.slow

FLAGS = (
    "--prompt_kinds=chat",
    "--num_prompts=24",
    "--held_out_prompts=4",
    "--max_answer_tokens=24",
    "--answer_slots=4",
    "--batch_length=256",
    "--batch_size=2",
    "--feature_rows=1",
    "--rank=4",
    "--train_steps=40",
    "--stage1_steps=0",
    "--unroll_steps=2",
    "--optimizer=adamw",
    "--loss_window=4",
    "--loss_rows=8",
    "--checkpoint_every=2",
    "--held_out_every=10",
    "--noevaluate",
    "--noprogress",
)


def start(model_folder: str, run_dir: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "train.slimspec", f"--target={model_folder}", f"--run_dir={run_dir}", *FLAGS]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(model_folder: str, run_dir: Path) -> dict[str, bytes]:
    process = start(model_folder, run_dir)
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output[-3000:]
    tensors = read_tensors(run_dir / "export" / "model.safetensors")
    return {name: value.tobytes() for name, value in tensors.items()}


def kill_when(model_folder: str, run_dir: Path, reached: Callable[[Path], bool]) -> None:
    process = start(model_folder, run_dir)
    for _ in range(6000):
        if reached(run_dir) or process.poll() is not None:
            break
        time.sleep(0.02)
    assert process.poll() is None, process.communicate()[0][-3000:]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert reached(run_dir)


def has_answers(run_dir: Path) -> bool:
    path = run_dir / "data" / "answers.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= 5


def has_features(run_dir: Path) -> bool:
    return any((run_dir / "features").glob("*/manifest.json"))


def has_step(number: int) -> Callable[[Path], bool]:
    return lambda run_dir: (run_dir / "checkpoints" / str(number)).exists()


def writes_a_checkpoint(run_dir: Path) -> bool:
    folder = run_dir / "checkpoints"
    return has_step(6)(run_dir) and any(p.name.endswith("tmp") for p in folder.iterdir() if p.is_dir())


def test_case_t12_killed_in_every_stage_and_repeated(model_folder: str, tmp_path: Path) -> None:
    straight = finish(model_folder, tmp_path / "straight")
    killed = tmp_path / "killed"
    for reached in (has_answers, has_features, has_step(4), writes_a_checkpoint):
        kill_when(model_folder, killed, reached)
    assert finish(model_folder, killed) == straight
    for name in ("data/answers.jsonl", "flags.txt"):
        left, right = (folder / name for folder in (tmp_path / "straight", killed))
        assert left.read_text().replace("straight", "killed") == right.read_text()
    steps = [line.split('"step": ')[1].split(",")[0] for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 40 + 4
    assert len({(line, steps[:index].count(line)) for index, line in enumerate(steps)}) == len(steps)
