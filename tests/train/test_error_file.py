"""error.txt: only in a directory of one's own, gone after a success, and never in the way of the message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specjax.checkpoints.published import PUBLISHED_CONFIGS
from train import heads, pipeline, slimspec
from train.artifacts import RunError, lock_directory
from train.error_file import error_file


def fails(run_dir: Path, *flags: str) -> int:
    """Runs a command that stops for want of its target."""
    return slimspec.main([f"--run_dir={run_dir}", "--target=/no/such/model", "--noprogress", *flags])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


def test_a_failure_is_kept_until_a_success(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="disk"), error_file(tmp_path):
        raise RunError("disk \udc80")
    story = (tmp_path / "error.txt").read_text(encoding="utf-8")
    assert story.startswith("Traceback")
    assert "disk" in story
    with error_file(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_the_message_survives_an_error_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run" / "error.txt").mkdir(parents=True)
    assert fails(tmp_path / "run") == 1
    assert "/no/such/model" in one_line(capsys)


def test_the_message_survives_over_heads_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*args: Any, **kwargs: Any) -> Path:
        (tmp_path / "heads" / "error.txt").mkdir()
        raise RunError("the head cannot be made")

    monkeypatch.setattr(pipeline, "run", run)
    target = next(iter(PUBLISHED_CONFIGS))
    flags = [f"--run_dir={tmp_path / 'heads'}", f"--target={target}", "--heads=full", "--nomeasure", "--noprogress"]
    assert heads.main(flags) == 1
    assert "the head cannot be made" in one_line(capsys)


def test_a_failure_is_told_in_full_in_the_directory_of_the_run(tmp_path: Path) -> None:
    assert fails(tmp_path / "run") == 1
    assert "Traceback" in (tmp_path / "run" / "error.txt").read_text()


def test_a_run_of_other_settings_gets_no_error_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    assert fails(run_dir) == 1
    (run_dir / "error.txt").unlink()
    (run_dir / "metrics.jsonl").touch()
    capsys.readouterr()
    assert fails(run_dir, "--learning_rate=0.5") == 1
    assert "another configuration" in one_line(capsys)
    assert not (run_dir / "error.txt").exists()


def test_a_run_of_another_process_gets_no_error_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(tmp_path) == 1
    (tmp_path / "error.txt").unlink()
    capsys.readouterr()
    with lock_directory(tmp_path):
        assert fails(tmp_path) == 1
    assert "another process is using" in one_line(capsys)
    assert not (tmp_path / "error.txt").exists()
