"""Checkpoints: whole or absent, exact, and a full disk that costs nothing that was there."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train import checkpointing
from train.artifacts import RunError
from train.checkpointing import Checkpoints


def make_state(step: int) -> dict:
    params = {"a": jnp.full((3, 4), step, jnp.float32), "layers": [jnp.ones(2, jnp.bfloat16)], "empty": {}}
    return {
        "step": jnp.int32(step),
        "params": params,
        "opt_state": optax.adamw(1e-3).init(params),
        "rng_key": jax.random.key(step),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpoints(folder: Path) -> Iterator[Checkpoints]:
    opened = Checkpoints(folder, keep=2)
    yield opened
    opened.close()


def assert_equal(left: object, right: object) -> None:
    def data(leaf):
        return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf

    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(data(a)), np.asarray(data(b)))


def test_a_state_comes_back_bit_for_bit_with_its_key(checkpoints: Checkpoints) -> None:
    state = make_state(3)
    checkpoints.save(3, state, {"bad_in_a_row": 2})
    restored, meta = checkpoints.restore(3, make_state(0))
    assert_equal(restored, state)
    assert meta == {"bad_in_a_row": 2}


def test_the_last_few_are_kept(checkpoints: Checkpoints) -> None:
    for step in (1, 2, 3, 4):
        checkpoints.save(step, make_state(step), {})
    assert checkpoints.steps() == [3, 4]
    assert checkpoints.latest_step() == 4


def test_case_t14_a_partial_checkpoint_is_never_picked_up(folder: Path, checkpoints: Checkpoints) -> None:
    checkpoints.save(1, make_state(1), {})
    checkpoints.save(2, make_state(2), {})
    # What a kill between writing and renaming leaves: all files there, under the temporary name.
    (folder / "2").rename(folder / "2.orbax-checkpoint-tmp")
    reopened = Checkpoints(folder, keep=2)
    assert reopened.latest_step() == 1
    reopened.save(2, make_state(2), {})
    assert reopened.steps() == [1, 2]
    assert_equal(reopened.restore(2, make_state(0))[0], make_state(2))
    reopened.close()


def test_case_t14_killed_while_writing(folder: Path) -> None:
    program = f"""
        import os, signal, jax.numpy as jnp
        from pathlib import Path
        from train.checkpointing import Checkpoints
        checkpoints = Checkpoints(Path({str(folder)!r}), keep=2)
        checkpoints.save(1, {{"a": jnp.ones(3)}}, {{}})
        real = os.rename
        def rename(source, target, *args, **kwargs):
            if str(target).endswith("/2"):
                os.kill(os.getpid(), signal.SIGKILL)
            return real(source, target, *args, **kwargs)
        os.rename = os.replace = rename
        import pathlib
        pathlib.Path.rename = lambda self, target: rename(self, target)
        checkpoints.save(2, {{"a": jnp.zeros(3)}}, {{}})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    reopened = Checkpoints(folder, keep=2)
    assert reopened.steps() == [1]
    np.testing.assert_array_equal(reopened.restore(1, {"a": jnp.zeros(3)})[0]["a"], np.ones(3))
    reopened.close()


def test_a_full_disk_is_one_clear_line_and_keeps_what_is_there(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(1, make_state(1), {})

    def no_space(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints._manager, "save", no_space)
        with pytest.raises(RunError, match=r"step 2 could not be written to .*: No space left on device; .*\[1\]") as e:
            checkpoints.save(2, make_state(2), {})
    assert "\n" not in str(e.value)
    assert_equal(checkpoints.restore(1, make_state(0))[0], make_state(1))
    checkpoints.save(2, make_state(2), {})
    assert checkpoints.steps() == [1, 2]


def test_a_disk_with_too_little_room_is_noticed_before_writing(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(checkpointing.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(RunError, match=r"No space left on device \(10 bytes free, \d+ needed\)"):
        checkpoints.save(1, make_state(1), {})
    assert checkpoints.steps() == []


def test_writes_that_the_system_refuses_are_one_clear_line(folder: Path) -> None:
    program = f"""
        import resource, signal, jax.numpy as jnp
        from pathlib import Path
        from train.artifacts import RunError
        from train.checkpointing import Checkpoints
        checkpoints = Checkpoints(Path({str(folder)!r}), keep=2)
        checkpoints.save(1, {{"a": jnp.arange(30000.0)}}, {{}})
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
        try:
            checkpoints.save(2, {{"a": jnp.sin(jnp.arange(30000.0))}}, {{}})
        except RunError as error:
            print(error, checkpoints.steps())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    assert "File too large; checkpoints of steps [1] are intact [1]" in lines[0]
    assert "Traceback" not in done.stderr


def test_another_structure_is_refused(checkpoints: Checkpoints) -> None:
    checkpoints.save(1, make_state(1), {})
    with pytest.raises(RunError, match=r"step 1 .* cannot be read"):
        checkpoints.restore(1, {"other": jnp.zeros(3)})


# Orbax cancels its other reads, and those say on newer Pythons that nobody asked what became of them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_damaged_checkpoint_names_the_way_out(
    folder: Path, checkpoints: Checkpoints, capfd: pytest.CaptureFixture[str]
) -> None:
    for step in (4, 6):
        checkpoints.save(step, make_state(step), {})
        shutil.rmtree(folder / str(step) / "state" / "d")
    for step, rest in ((6, "go on from step 4"), (4, "train again from the start")):
        with pytest.raises(RunError) as raised:
            checkpoints.restore(step, make_state(0))
        message = str(raised.value)
        assert message.startswith(
            f"the checkpoint of step {step} in {folder} cannot be read; remove {folder / str(step)} to {rest} ("
        )
        assert "\n" not in message
    assert checkpoints.steps() == [4, 6]
    assert "Traceback" not in capfd.readouterr().err


def test_a_checkpoint_that_the_system_keeps_from_us_is_not_called_damaged(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(1, make_state(1), {})

    def refused(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoints._manager, "restore", refused)
    with pytest.raises(RunError, match=r"cannot be read: Permission denied$"):
        checkpoints.restore(1, make_state(0))


def test_a_file_in_the_place_of_the_folder_is_one_line(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder.touch()
    with pytest.raises(RunError, match="checkpoints must be a directory; it is a file: move it away"):
        Checkpoints(folder, keep=2)
    assert capfd.readouterr().err == ""
