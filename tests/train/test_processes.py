"""Several processes, as on several hosts: one run, one run directory, the loss curve of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_command import SIZES

pytestmark = pytest.mark.slow


def start(flags: list[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "train.slimspec", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def losses(run_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_two_processes_train_one_drafter(model_folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"messages": [{"role": "user", "content": f"hello {index}"}]} for index in range(12)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [f"--target={model_folder}", f"--dataset={prompts}", *SIZES, "--noevaluate"]
    alone = start([*flags, f"--run_dir={tmp_path / 'alone'}"])
    assert alone.wait(timeout=900) == 0, alone.communicate()[1][-3000:]
    alone.communicate()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = [
        start(
            [
                *flags,
                f"--run_dir={tmp_path / 'together'}",
                "--mesh=data:2",
                f"--coordinator=127.0.0.1:{port}",
                "--num_processes=2",
                f"--process_id={number}",
            ]
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=900) for process in together]
    for process, (_, error) in zip(together, outputs, strict=True):
        assert process.returncode == 0, error[-3000:]
    assert len(losses(tmp_path / "alone")) == 8
    np.testing.assert_allclose(losses(tmp_path / "together"), losses(tmp_path / "alone"), rtol=2e-5)
    assert (tmp_path / "together" / "export" / "model.safetensors").exists()
