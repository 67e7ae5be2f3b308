"""The file that a comparison grows in: what is complete is kept, whatever happened to the process."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from eval.configuration_log import ConfigurationLog

SETTINGS = {"seed": 0, "target": {"digest": "abc"}}


def row_of(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return {"model_id": name, "value": 1.5}, [{"question_id": n, "model_id": name, "choices": []} for n in range(2)]


def test_rows_come_back_with_their_answers(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "new" / "log.jsonl"
    log = ConfigurationLog(path, SETTINGS)
    for name in ("a", "b"):
        log.add(*row_of(name))
    again = ConfigurationLog(path, SETTINGS)
    assert again.rows == log.rows
    assert list(again.rows) == ["a", "b"]
    assert again.answers == log.answers
    assert [answer["question_id"] for answer in again.answers["b"]] == [0, 1]
    kinds = [json.loads(line)["kind"] for line in path.read_text().splitlines()]
    assert kinds == ["settings", "answer", "answer", "configuration", "answer", "answer", "configuration"]


def test_other_settings_share_the_file_and_nothing_else(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    ConfigurationLog(path, SETTINGS).add(*row_of("a"))
    other = ConfigurationLog(path, SETTINGS | {"seed": 1})
    assert other.rows == {}
    other.add(*row_of("a"))
    assert len(ConfigurationLog(path, SETTINGS).rows) == len(ConfigurationLog(path, SETTINGS | {"seed": 1}).rows) == 1
    assert path.read_text().count('"kind": "settings"') == 2


@pytest.mark.parametrize("lost", [1, 40, 200])
def test_case_t14_half_a_configuration_is_measured_again(tmp_path: pathlib.Path, lost: int) -> None:
    path = tmp_path / "log.jsonl"
    log = ConfigurationLog(path, SETTINGS)
    log.add(*row_of("a"))
    log.add(*row_of("b"))
    content = path.read_bytes()
    path.write_bytes(content[:-lost])
    again = ConfigurationLog(path, SETTINGS)
    assert list(again.rows) == ["a"]
    again.add(*row_of("b"))
    last = ConfigurationLog(path, SETTINGS)
    assert last.rows == log.rows
    # Answers without their configuration's row belong to nobody; those of "b" count once.
    assert len(last.answers["b"]) == 2
    for line in path.read_text().splitlines():
        json.loads(line)


def test_another_file_is_refused_with_its_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "settings"}\n{"question_id": 1}\n')
    with pytest.raises(ValueError, match=r"log.jsonl:2: no row of such a log; use another `--output_dir`"):
        ConfigurationLog(path, SETTINGS)
