"""Result files appear whole or not at all."""

from __future__ import annotations

import pathlib

import pytest

from eval import files


def test_values_come_back(tmp_path: pathlib.Path) -> None:
    path = files.write_json(tmp_path / "new" / "a.json", {"x": [1, None, "é"]})
    assert files.read_json(path) == {"x": [1, None, "é"]}
    assert [entry.name for entry in path.parent.iterdir()] == ["a.json"]


def test_numbers_that_json_has_not_are_refused_and_the_old_file_stays(tmp_path: pathlib.Path) -> None:
    path = files.write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        files.write_json(path, {"x": float("nan")})
    assert files.read_json(path) == {"x": 1}


def test_a_failed_write_leaves_no_temporary_file(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        files.write_text(tmp_path / "a.txt", "text")
    assert not list(tmp_path.iterdir())


def test_faulty_files_are_named(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text("{\n1", "utf-8")
    with pytest.raises(ValueError, match=r"bad\.json:2: not JSON"):
        files.read_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not UTF-8"):
        files.read_json(path)
