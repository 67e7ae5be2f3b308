"""metrics.jsonl: no step twice, never lost, always JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.artifacts import RunError
from train.metrics_log import MetricsLog


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_after_the_checkpoint_and_cut_lines_go(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, last_step=0)
    for step in (1, 2, 3):
        log.append({"kind": "train", "step": step, "loss": 0.5})
    log.append({"kind": "held_out", "step": 2, "loss": 0.5})
    log.close()
    with path.open("a") as file:
        file.write('{"kind": "train", "st')
    log = MetricsLog(path, last_step=2)
    log.append({"kind": "train", "step": 3, "loss": 0.25})
    log.close()
    assert [(row["step"], row["loss"]) for row in read(path)] == [(1, 0.5), (2, 0.5), (2, 0.5), (3, 0.25)]


def test_a_file_without_later_rows_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, last_step=0)
    log.append({"step": 1})
    log.close()
    inode = path.stat().st_ino
    MetricsLog(path, last_step=1).close()
    assert path.stat().st_ino == inode


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, last_step=0)
    log.append({"step": 1, "loss": float("nan"), "loss_per_step": [1.0, float("inf")], "deep": {"x": -float("inf")}})
    log.close()
    assert read(path) == [{"step": 1, "loss": None, "loss_per_step": [1.0, None], "deep": {"x": None}}]


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (b'{"step": \xff}', "must be UTF-8; got byte 0xff"),
        (b'{"step": 2, "lo', "must be a JSON object with a `step`; got "),
        (b"[2]", "must be a JSON object with a `step`; got "),
        (b'{"loss": 0.5}', "must be a JSON object with a `step`; got "),
        (b'{"step": "two"}', "must be a JSON object with a `step`; got "),
    ],
)
def test_a_damaged_line_inside_is_named_and_nothing_dropped(tmp_path: Path, damaged: bytes, message: str) -> None:
    """A kill cuts the last line alone; anything else is damage that a person should see."""
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1}\n' + damaged + b'\n{"step": 3}\n'
    path.write_bytes(content)
    with pytest.raises(RunError, match=rf"metrics\.jsonl, line 2: {message}.*; remove the line"):
        MetricsLog(path, last_step=3)
    assert path.read_bytes() == content
