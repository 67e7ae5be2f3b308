"""The whole command on a tiny model: from prompts to report, again, and after mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from specjax.checkpoints.eagle import load_drafter
from specjax.checkpoints.target import load_target
from train.checkpointing import Checkpoints
from train.flags import parse_command_line
from train.slimspec import main

SIZES = (
    "--num_prompts=6",
    "--held_out_prompts=3",
    "--answers_per_prompt=2",
    "--answer_temperature=1.0",
    "--max_answer_tokens=8",
    "--answer_slots=4",
    "--batch_length=48",
    "--batch_size=2",
    "--feature_rows=2",
    "--rank=4",
    "--train_steps=6",
    "--stage1_steps=0",
    "--unroll_steps=2",
    "--optimizer=adamw",
    "--loss_window=4",
    "--loss_rows=8",
    "--checkpoint_every=3",
    "--held_out_every=3",
    "--noprogress",
)
MEASURED = ("--eval_prompts=2", "--eval_new_tokens=6", "--draft_lengths=2")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short prompts, some of two turns."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    with path.open("w") as file:
        for index in range(12):
            messages = [{"role": "user", "content": f"hello {index}"}, {"role": "assistant", "content": "world"}]
            if index % 4 == 0:
                messages += [{"role": "user", "content": "and"}, {"role": "assistant", "content": "all"}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def command(model_folder: str, dataset: Path) -> tuple[str, ...]:
    """The command without its run directory."""
    return (f"--target={model_folder}", f"--dataset={dataset}", *SIZES)


@pytest.fixture(scope="module")
def finished(command: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that has everything but the measurements."""
    run_dir = tmp_path_factory.mktemp("runs") / "tiny"
    assert main([*command, f"--run_dir={run_dir}", "--noevaluate"]) == 0
    return run_dir


def test_the_run_directory_holds_everything(finished: Path, command: tuple[str, ...]) -> None:
    for name in (
        "flags.txt",
        "run.json",
        "metrics.jsonl",
        "data/answers.jsonl",
        "data/manifest.json",
        "features",
        "checkpoints/6",
        "export/config.json",
    ):
        assert (finished / name).exists(), name
    record = json.loads((finished / "run.json").read_text())
    assert len(record["target"]["digest"]) == 64
    assert record["target"]["template_digest"]
    assert record["target"]["tokenizer_digest"]
    config = parse_command_line([*command, f"--run_dir={finished}", "--noevaluate"])
    assert parse_command_line([f"--flagfile={finished / 'flags.txt'}"]) == config
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows if row["kind"] == "held_out"] == [3, 6]
    manifest = json.loads((finished / "data" / "manifest.json").read_text())
    assert manifest["complete"]
    assert manifest["num_conversations"] == 6 * 2 + 3
    assert not (finished / "report.html").exists()


def test_the_same_command_again_repeats_no_stage(
    finished: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = ["data/answers.jsonl", "metrics.jsonl", "export/config.json"]
    before = {name: (finished / name).stat().st_mtime_ns for name in kept}
    assert main([*command, f"--run_dir={finished}", "--noevaluate"]) == 0
    assert {name: (finished / name).stat().st_mtime_ns for name in kept} == before
    shown = capsys.readouterr().out
    for stage in ("target", "prompts", "answers", "rows", "features", "start", "training", "export"):
        assert f"[{stage}]" in shown


def test_another_configuration_in_the_same_directory_is_refused(
    finished: Path, command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"--run_dir={finished}", "--noevaluate", "--learning_rate=0.5"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "another configuration: --learning_rate (there 0.003, here 0.5)" in error


def test_case_h6_a_tied_target_keeps_its_matrices_and_the_drafter_its_head(
    finished: Path, command: tuple[str, ...], model_folder: str
) -> None:
    target = load_target(model_folder)
    assert target.config.tie_word_embeddings
    _, params = load_drafter(finished / "export")
    assert params["head"]["down"].shape == (16, 4)
    assert params["head"]["up"].shape == (4, target.config.vocab_size)
    # The checkpoint holds trained parameters only: neither the target's embedding nor its head.
    stored = (finished / "checkpoints" / "6" / "state" / "_METADATA").read_text()
    assert "head" in stored
    assert "embed_tokens" not in stored
    assert "lm_head" not in stored
    again = load_target(model_folder)
    for name in ("embed_tokens", "lm_head"):
        np.testing.assert_array_equal(target.params[name], again.params[name])


def test_the_export_is_the_last_checkpoint(finished: Path) -> None:
    _, params = load_drafter(finished / "export")
    checkpoints = Checkpoints(finished / "checkpoints", keep=2)
    assert checkpoints.steps() == [3, 6]
    checkpoints.close()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


@pytest.mark.slow
def test_measuring_a_finished_run_later(finished: Path, command: tuple[str, ...]) -> None:
    """Measurements belong to the export; asking for them afterwards trains nothing again."""
    before = (finished / "metrics.jsonl").stat().st_mtime_ns
    assert main([*command, *MEASURED, f"--run_dir={finished}"]) == 0
    assert (finished / "metrics.jsonl").stat().st_mtime_ns == before
    result = json.loads((finished / "eval" / "benchmark.json").read_text())
    assert {row["system"] for row in result["results"]} == {"plain", "low_rank", "ngram"}
    assert result["counts"]["conversations"] == 2
    assert not result["warnings"]
    assert json.loads((finished / "eval" / "head_cost.json").read_text())["steps"]
    assert (finished / "report.html").stat().st_size > 10_000
    measured = (finished / "eval" / "benchmark.json").stat().st_mtime_ns
    assert main([*command, *MEASURED, f"--run_dir={finished}"]) == 0
    assert (finished / "eval" / "benchmark.json").stat().st_mtime_ns == measured


@pytest.mark.slow
def test_runs_may_share_answers_and_features(finished: Path, command: tuple[str, ...], tmp_path: Path) -> None:
    """The full head trains on what the low-rank head trained on."""
    mine = [flag for flag in command if not flag.startswith("--rank")]
    mine += ["--head=full", f"--data_dir={finished}", f"--run_dir={tmp_path / 'full'}", "--noevaluate"]
    features = sorted((finished / "features").iterdir())
    assert main(mine) == 0
    assert sorted((finished / "features").iterdir()) == features
    assert not (tmp_path / "full" / "features").exists()
    assert (tmp_path / "full" / "data" / "manifest.json").exists()


def test_shared_answers_of_other_settings_are_refused(
    finished: Path, command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = [*command, f"--data_dir={finished}", f"--run_dir={tmp_path / 'other'}", "--answer_temperature=0.5"]
    assert main(other) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "made for other settings" in error
    assert "--data_dir" in error


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--rnak=3"], 2, "`--rnak` is not a flag of this command; did you mean `--rank`?"),
        (["--flagfile=absent.flags"], 2, "'absent.flags' does not exist"),
        (["--train_steps=0"], 2, "`--train_steps` must be at least 1; got 0"),
        (["--target=/no/such/model"], 1, "/no/such/model"),
        (["--rank=17"], 1, "`--rank` must be at most the target's width 16; got 17"),
        (["--batch_length=300"], 1, "`--batch_length` must be at most the target's context of 256 tokens; got 300"),
        (["--feature_layers=0,1,4"], 1, "`--feature_layers` must be below the target's 4 layers; got 0,1,4"),
        (["--dataset=/no/such.jsonl"], 1, "/no/such.jsonl"),
        (["--held_out_prompts=12"], 1, "`--held_out_prompts` (12)"),
        (["--batch_length=8"], 1, "no answer is left"),
        (["--mesh=data:2"], 1, "`--mesh` needs 2 devices"),
        (["--text=/no/such.txt"], 1, "/no/such.txt: No such file"),
    ],
)
def test_mistakes_are_one_line_without_a_traceback(
    command: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    status: int,
    words: str,
) -> None:
    assert main([*command, f"--run_dir={tmp_path / 'run'}", *flags]) == status
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


def test_an_empty_dataset_is_one_line(command: tuple[str, ...], tmp_path: Path, capsys) -> None:
    (tmp_path / "empty.jsonl").write_text("")
    assert main([*command, f"--run_dir={tmp_path / 'run'}", f"--dataset={tmp_path / 'empty.jsonl'}"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "empty.jsonl" in error


def test_the_dry_run_needs_no_weights(tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["--flagfile=llama8b.flags", "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "nu (bytes of the head over full)   0.129" in shown
    assert list(tmp_path.iterdir()) == []
