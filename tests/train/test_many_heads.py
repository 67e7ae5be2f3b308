"""Several heads on one set of data: what is made, what is shared, what a kill leaves, what is refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from eval.compiled_programs import num_compiled_programs, release_compiled_programs
from specjax.checkpoints.eagle import load_drafter
from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.heads import get_head
from train import head_runs, pipeline
from train.config import TrainConfig
from train.head_list import parse_heads, plan_heads, public_kinds
from train.head_runs import head_config
from train.heads import main

ROOT = Path(__file__).parents[2]
MODEL = next(iter(PUBLISHED_CONFIGS.values()))
HEADS = "vocab_trim:rows=24"
SIZES = (
    "--num_prompts=4",
    "--held_out_prompts=2",
    "--answers_per_prompt=1",
    "--max_answer_tokens=6",
    "--answer_slots=4",
    "--batch_length=48",
    "--batch_size=2",
    "--feature_rows=2",
    "--train_steps=2",
    "--warmup_steps=0",
    "--unroll_steps=1",
    "--loss_window=4",
    "--loss_rows=4",
    "--checkpoint_every=2",
    "--held_out_every=2",
    "--noprogress",
)


@pytest.fixture(scope="module")
def command(model_folder: str, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command without its run directory."""
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    with path.open("w") as file:
        for index in range(6):
            messages = [{"role": "user", "content": f"hello {index}"}, {"role": "assistant", "content": "world"}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return [f"--target={model_folder}", f"--dataset={path}", *SIZES, f"--heads={HEADS}", "--nomeasure"]


@pytest.fixture(scope="module")
def finished(command: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run over heads."""
    folder = tmp_path_factory.mktemp("runs") / "heads"
    release_compiled_programs()
    before = num_compiled_programs()
    assert main([*command, f"--run_dir={folder}"]) == 0
    # A process that kept every head's programs would run out of memory mappings.
    assert num_compiled_programs() <= before
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    """What must not depend on how often a run was stopped."""
    names = ["heads.json", *(str(p.relative_to(folder)) for p in folder.glob("*/export/**/*") if p.is_file())]
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def test_every_head_has_its_folder_and_all_share_the_data(finished: Path) -> None:
    record = json.loads((finished / "heads.json").read_text())
    assert [(head["name"], head["made"], head["base"]) for head in record["heads"]] == [
        ("full", "trained", None),
        ("vocab_trim-rows24", "derived", "full"),
    ]
    manifests = set()
    for head in record["heads"]:
        folder = finished / head["folder"]
        for name in ("flags.txt", "run.json", "metrics.jsonl", "export/config.json"):
            assert (folder / name).exists(), name
        assert not (folder / "features").exists()
        assert not (folder / "data" / "answers.jsonl").exists()
        manifests.add((folder / "data" / "manifest.json").read_text())
    assert len(manifests) == 1
    assert len(list((finished / "shared" / "features").iterdir())) == 2  # training and held out, once for all heads


@pytest.mark.slow
def test_trained_heads_see_the_same_batches_whatever_their_seed_shares(
    finished: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Further heads join the directory: one of the same seed, and both of another one."""
    more = [*command, f"--run_dir={finished}", "--heads=low_rank:rank=d/4", "--seeds=0,5"]
    assert main(more) == 0
    record = json.loads((finished / "heads.json").read_text())
    assert [head["folder"] for head in record["heads"]] == [
        "full",
        "vocab_trim-rows24",
        "low_rank-rank4",
        "full-seed5",
        "low_rank-rank4-seed5",
    ]

    def tokens(folder: str) -> list[int]:
        rows = map(json.loads, (finished / folder / "metrics.jsonl").read_text().splitlines())
        return [row["num_tokens"] for row in rows if row["kind"] == "train"]

    assert tokens("low_rank-rank4") == tokens("full")
    assert tokens("low_rank-rank4-seed5") == tokens("full-seed5")
    assert len(list((finished / "shared" / "features").iterdir())) == 2
    _, first = load_drafter(finished / "full" / "export")
    _, other = load_drafter(finished / "full-seed5" / "export")
    assert not np.array_equal(first["fc"], other["fc"])


@pytest.mark.slow
def test_the_plane_of_the_run(finished: Path) -> None:
    """The second command with settings of its own, on what the first one left."""
    sizes = ("--draft_lengths=1", "--num_questions=2", "--max_new_tokens=4", "--num_steps=1", "--kinds=chat,code")
    command = [sys.executable, "-m", "eval.plane", f"--run={finished}", "--quick", "--heads=vocab_trim-rows24", *sizes]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.splitlines()[-3:] == [
        str(finished / "eval" / name) for name in ("plane.jsonl", "plane.json", "plane.svg")
    ]
    result = json.loads((finished / "eval" / "plane.json").read_text())
    assert [point["head"] for point in result["points"]] == ["full", "vocab_trim-rows24"]
    assert result["points"][1]["ceiling"]["value"] is not None
    assert set(result["points"][1]["by_kind"]) == {"chat", "code"}


def test_the_quick_command_ends_with_the_same_files(
    finished: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """One command from prompts to the plane; what is trained already is not trained again."""
    (finished / "eval" / "plane.json").unlink(missing_ok=True)
    release_compiled_programs()
    before = num_compiled_programs()
    assert main([*command, "--measure", "--quick", f"--run_dir={finished}"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        str(finished / "eval" / name) for name in ("plane.jsonl", "plane.json", "plane.svg")
    ]
    assert num_compiled_programs() <= before
    result = json.loads((finished / "eval" / "plane.json").read_text())
    assert [point["head"] for point in result["points"]] == ["full", "vocab_trim-rows24"]
    assert set(result["points"][1]["by_kind"]) == {"chat", "code", "maths"}


def test_a_derived_head_has_the_backbone_that_it_was_derived_from(finished: Path) -> None:
    _, full = load_drafter(finished / "full" / "export")
    config, trimmed = load_drafter(finished / "vocab_trim-rows24" / "export")
    ids = get_head(config.head.kind).support(trimmed["head"])
    np.testing.assert_array_equal(trimmed["head"]["kernel"], full["head"]["kernel"][:, ids])
    for tree in (full, trimmed):
        tree.pop("head")
    jax.tree.map(np.testing.assert_array_equal, trimmed, full)


def test_the_same_command_again_does_nothing(
    finished: Path, command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file() and path.name != ".lock"}
    monkeypatch.setattr(pipeline, "run", None)
    assert main([*command, f"--run_dir={finished}"]) == 0
    after = {path: path.stat().st_mtime_ns for path in finished.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(";")[0] for line in lines[:-1]] == [
        "[head 1/2] full: trained before",
        "[head 2/2] vocab_trim-rows24: derived from full before",
    ]


def test_each_head_is_tested_at_its_end_alone_unless_more_is_asked_for(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held-out test takes as long as ten to twenty training steps."""
    seen: list[TrainConfig] = []

    def remember(config: TrainConfig, *rest: Any, **options: Any) -> Path:
        seen.append(config)
        return tmp_path

    monkeypatch.setattr(head_runs, "run_heads", remember)
    silent = [flag for flag in command if not flag.startswith("--held_out_every")]
    assert main([*silent, "--train_steps=1000000", f"--run_dir={tmp_path}"]) == 0
    assert main([*command, f"--run_dir={tmp_path}"]) == 0
    assert seen[0].held_out_every >= seen[0].train_steps
    assert seen[1].held_out_every == 2


def test_a_run_stopped_between_heads_goes_on_to_the_same_files(
    finished: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = files_of(finished)
    # As a kill leaves it while the last head is made: its folder is there, its export and its record are not.
    shutil.rmtree(finished / "vocab_trim-rows24" / "export")
    record = json.loads(expected["heads.json"])
    (finished / "heads.json").write_text(json.dumps({**record, "heads": record["heads"][:-1]}))
    with pytest.MonkeyPatch.context() as patch:

        def interrupt(*arguments: Any, **options: Any) -> None:
            raise KeyboardInterrupt

        patch.setattr(pipeline, "run", interrupt)
        assert main([*command, f"--run_dir={finished}"]) == 130
    assert capsys.readouterr().err.startswith("error: interrupted")
    assert main([*command, f"--run_dir={finished}"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[head ")]
    assert "full: trained before" in lines[0]
    assert "vocab_trim-rows24: derived from full in" in lines[1]
    assert files_of(finished) == expected


def test_other_settings_in_the_same_directory_are_refused(
    finished: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, f"--run_dir={finished}", "--learning_rate=0.5"]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "another configuration: --learning_rate (there 0.003, here 0.5)" in error


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--heads=nope"], "got 'nope'"),
        (["--heads=low_rnk"], "did you mean 'low_rank'?"),
        (["--heads=full,,low_rank"], "heads with commas between"),
        (["--heads="], "must be written as --heads=VALUE"),
        (["--heads=rank=4"], "must name a head (KIND:name=value) before a setting; got 'rank=4'"),
        (["--heads=full,rank=4"], "must name a head (KIND:name=value) before a setting; got 'rank=4'"),
        (["--heads=low_rank:"], "must have settings (name=value) behind a colon"),
        (["--heads=low_rank", "--rank=4"], "`--rank` must be written in `--heads`"),
        (["--head=full"], "`--head` must be written in `--heads`"),
        (["--seeds=0,x"], "`--seeds` must be numbers"),
        (["--quick=often"], "`--quick` must be true or false"),
    ],
)
def test_bad_flags_are_one_line(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize(
    ("heads", "words"),
    [
        ("full:rank=3", "`rank` must be None for the full head; got 3"),
        ("low_rank:rank=0.5", "`rank` must be a whole number or a part of the width, such as d/8; got '0.5'"),
        ("low_rank:rank=1000000", "`rank` must be in [1, hidden_size="),
        ("low_rank:rank=3,rank=4", "must be given once each; got `rank` twice"),
        ("low_rank:depth=4", "got 'depth'"),
        ("low_rank:lk_decay=much", "`lk_decay` must be a number; got 'much'"),
        ("low_rank:rank=d/8,low_rank", "must name each head once"),
        ("low_rank:rank=", "must be written as name=value"),
    ],
)
def test_heads_that_do_not_fit_are_one_line(heads: str, words: str) -> None:
    with pytest.raises(ValueError, match="--heads") as caught:
        plan_heads(parse_heads(heads), MODEL, [0])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("loss=bad", "`--loss` must be one of kl, lk_hybrid, lk, tv; got 'bad'"),
        ("lk_decay=-1", "`--lk_decay` must be at least 0.0; got -1.0"),
        ("head_init=bad", "`--head_init` must be one of random, svd, frequency_svd, activation_aware; got 'bad'"),
    ],
)
def test_a_plan_refuses_what_the_run_would(
    model_folder: str, setting: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([f"--target={model_folder}", "--dry_run", f"--heads=low_rank:rank=4,{setting}"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert words in printed.err
    assert printed.err.count("\n") == 1


def test_the_full_head_comes_first_and_what_has_no_training_is_derived_from_it() -> None:
    for quick in (False, True):
        planned = plan_heads(parse_heads("all", quick=quick), MODEL, [0])
        assert {head.config.kind for head in planned} == set(public_kinds())
        assert planned[0].name == "full"
        for head in planned[1:]:
            kind = get_head(head.config.kind)
            assert (head.base == "full") == (kind.needs_base or not kind.is_trained(head.config))


def test_each_seed_has_its_own_base_and_the_seed_of_the_data_has_the_plain_names() -> None:
    planned = plan_heads(parse_heads("low_rank"), MODEL, [7, 3], data_seed=3)
    assert [(head.folder, head.seed) for head in planned] == [
        ("full-seed7", 7),
        (f"{planned[1].name}-seed7", 7),
        ("full", 3),
        (planned[1].name, 3),
    ]


def test_settings_may_hold_commas_and_colons() -> None:
    requests = parse_heads("low_rank:ranks=8:4:2, full , low_rank:rank=6,loss=lk")
    assert [str(request) for request in requests] == ["low_rank:ranks=8:4:2", "full", "low_rank:rank=6,loss=lk"]
    planned = plan_heads(requests, MODEL, [0])
    assert [head.name for head in planned] == ["full", "low_rank-rank8-ranks8.4.2", "low_rank-rank6-losslk"]
    assert head_config(TrainConfig(), planned[2]).loss == "lk"
