"""Several devices: the same loss curve as one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from train import mesh as mesh_lib
from train.artifacts import RunError

ONE = "/cached"
DATA = "data:4/cached"
ALL = "fsdp:2,tensor:2/online"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Losses of the same run on one device and on meshes of four forced CPU devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    program = Path(__file__).with_name("mesh_program.py")
    command = [sys.executable, str(program), str(tmp_path_factory.mktemp("mesh")), ONE, DATA, ALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.slow
@pytest.mark.parametrize("name", [DATA, ALL])
def test_the_loss_curve_is_that_of_one_device(results: dict, name: str) -> None:
    assert len(results[ONE]["losses"]) == 8
    assert results[ONE]["losses"][0] != results[ONE]["losses"][-1]
    np.testing.assert_allclose(results[name]["losses"], results[ONE]["losses"], rtol=2e-5)
    np.testing.assert_allclose(results[name]["sum"], results[ONE]["sum"], rtol=2e-5)


@pytest.mark.slow
def test_weights_lie_where_the_mesh_says(results: dict) -> None:
    rank, vocab = results[ONE]["shape"]
    assert (results[ONE]["devices"], results[ONE]["shard"]) == (1, [rank, vocab])
    assert (results[DATA]["devices"], results[DATA]["shard"]) == (4, [rank, vocab])
    # The vocabulary of 283 does not divide, so only the first axis of the head's last matrix is split.
    assert (results[ALL]["devices"], results[ALL]["shard"]) == (4, [rank // 2, vocab])


def test_too_few_devices_are_named() -> None:
    with pytest.raises(RunError, match=r"`--mesh` needs 64 devices; this machine has \d+ \(cpu\)"):
        mesh_lib.make_mesh({"data": 64})


def test_an_unreachable_coordinator_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*args: object) -> None:
        raise RuntimeError("DEADLINE_EXCEEDED: barrier timed out\nmore")

    monkeypatch.setattr(mesh_lib.jax.distributed, "initialize", refuses)
    with pytest.raises(RunError, match=r"process 1 cannot join `--coordinator` host:1: DEADLINE_EXCEEDED[^\n]*$"):
        mesh_lib.start_processes("host:1", 2, 1)
