"""The run directory: whose it is, and what it says about the run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from train.artifacts import RunError, git_state, lock_directory, open_run_directory, update_record
from train.config import TrainConfig
from train.flags import parse_command_line


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Settings of a run in an empty directory."""
    (tmp_path / "run").mkdir()
    return TrainConfig.create(run_dir=str(tmp_path / "run"), train_steps=9)


def open_and_work(config: TrainConfig, argv: list[str]) -> Path:
    """Opens the directory and leaves a result in it."""
    run_dir = open_run_directory(config, argv)
    (run_dir / "metrics.jsonl").touch()
    return run_dir


def test_the_record_says_what_ran(config: TrainConfig) -> None:
    run_dir = open_run_directory(config, ["--train_steps=9"])
    update_record(run_dir, target={"digest": "abc"})
    record = json.loads((run_dir / "run.json").read_text())
    assert record["command"] == ["--train_steps=9"]
    assert record["seed"] == config.seed
    assert record["config_digest"] == config.digest()
    assert record["target"] == {"digest": "abc"}
    assert {"python", "jax", "optax", "orbax-checkpoint", "numpy"} <= set(record["versions"])
    assert record["machine"]["platform"] == "cpu"
    assert record["git"] == git_state()
    assert parse_command_line([f"--flagfile={run_dir / 'flags.txt'}"]) == config


def test_every_start_is_recorded_and_the_first_kept(config: TrainConfig) -> None:
    open_and_work(config, ["first"])
    record = json.loads((open_run_directory(config, ["second"]) / "run.json").read_text())
    assert record["command"] == ["first"]
    assert [start["command"] for start in record["starts"]] == [["first"], ["second"]]


def test_a_directory_of_another_configuration_is_refused_by_flag(config: TrainConfig) -> None:
    run_dir = open_and_work(config, [])
    before = (run_dir / "run.json").read_bytes()
    other = dataclasses.replace(config, learning_rate=0.5, rank=8)
    with pytest.raises(
        RunError,
        match=r"another configuration: --learning_rate \(there 0\.003, here 0\.5\), --rank \(there None, here 8\)",
    ):
        open_run_directory(other, [])
    assert (run_dir / "run.json").read_bytes() == before


def test_a_run_that_made_nothing_does_not_hold_its_directory(config: TrainConfig) -> None:
    open_run_directory(config, [])
    (Path(config.run_dir) / "error.txt").write_text("a wrong flag")
    other = dataclasses.replace(config, learning_rate=0.5)
    record = json.loads((open_run_directory(other, []) / "run.json").read_text())
    assert record["config"]["learning_rate"] == 0.5
    assert len(record["starts"]) == 1


def test_what_does_not_change_the_result_may_differ(config: TrainConfig) -> None:
    open_and_work(config, [])
    open_run_directory(dataclasses.replace(config, progress=False, keep_checkpoints=7, eval_prompts=1), [])


def test_a_flag_that_an_earlier_version_did_not_know_counts_as_its_default(config: TrainConfig) -> None:
    run_dir = open_and_work(config, [])
    record = json.loads((run_dir / "run.json").read_text())
    del record["config"]["answer_dtype"]
    (run_dir / "run.json").write_text(json.dumps(record))
    open_run_directory(config, [])
    with pytest.raises(RunError, match=r"--answer_dtype \(there None, here 'bfloat16'\)"):
        open_run_directory(dataclasses.replace(config, answer_dtype="bfloat16"), [])


def test_a_flag_that_no_longer_says_what_a_run_is_may_differ_from_an_earlier_record(config: TrainConfig) -> None:
    run_dir = open_and_work(config, [])
    record = json.loads((run_dir / "run.json").read_text())
    assert "held_out_every" not in record["config"]
    record["config"]["held_out_every"] = config.held_out_every + 1
    (run_dir / "run.json").write_text(json.dumps(record))
    open_run_directory(config, [])


def test_noresume_wants_an_empty_directory(config: TrainConfig) -> None:
    fresh = dataclasses.replace(config, resume=False)
    open_and_work(fresh, [])
    with pytest.raises(RunError, match="already holds this run"):
        open_run_directory(fresh, [])


def test_other_peoples_files_are_left_alone(config: TrainConfig) -> None:
    folder = Path(config.run_dir)
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(RunError, match="holds other files"):
        open_run_directory(config, [])
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        open_run_directory(TrainConfig.create(run_dir=str(tmp_path / "run")), [])


def test_one_process_at_a_time(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom train.artifacts import RunError, lock_directory\n"
        "try:\n    with lock_directory(Path(sys.argv[1])):\n        pass\nexcept RunError as error:\n    print(error)\n"
    )

    def other_process() -> str:
        command = [sys.executable, "-c", program, str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout

    with lock_directory(tmp_path):
        assert "another process is using" in other_process()
    assert other_process() == ""


def test_a_damaged_record_is_named(config: TrainConfig) -> None:
    run_dir = open_and_work(config, [])
    (run_dir / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json"):
        open_run_directory(config, [])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("config", None, "`config` must be an object; got None"),
        ("config", {}, "`config` must hold the settings of the run; got {}"),
        ("config_digest", 3, "`config_digest` must be a string; got 3"),
        ("starts", "x", "`starts` must be a list; got 'x'"),
        ("starts", [], "`starts` must begin with an object with a `time`; got []"),
        ("starts", [{}], "`starts` must begin with an object with a `time`; got [{}]"),
    ],
)
def test_a_record_says_which_field_is_damaged(config: TrainConfig, field: str, value: object, words: str) -> None:
    run_dir = open_and_work(config, [])
    record = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**record, field: value}))
    with pytest.raises(RunError) as raised:
        open_run_directory(config, [])
    assert str(raised.value).startswith(f"{run_dir / 'run.json'}: {words}: the file is damaged; restore it")


@pytest.mark.parametrize(
    ("text", "words"), [("[]", "must hold a JSON object; got list"), ("{}", "`config` must be an object; got nothing")]
)
def test_a_record_of_another_form_is_damaged_and_not_another_configuration(
    config: TrainConfig, text: str, words: str
) -> None:
    run_dir = open_and_work(config, [])
    (run_dir / "run.json").write_text(text)
    with pytest.raises((RunError, ValueError)) as raised:
        open_run_directory(config, [])
    assert str(raised.value).startswith(f"{run_dir / 'run.json'}: {words}")
    assert (run_dir / "run.json").read_text() == text


def test_a_file_in_the_place_of_a_folder_is_found_at_the_start(config: TrainConfig) -> None:
    run_dir = open_and_work(config, [])
    (run_dir / "checkpoints").touch()
    with pytest.raises(RunError, match="checkpoints must be a directory; it is a file: move it away"):
        open_run_directory(config, [])
