"""Flagfiles: what is accepted, and one clear error for every fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from train.config import TrainConfig
from train.flagfile import expand_flagfiles
from train.flags import flags_text, parse_command_line


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def parse(folder: Path, content: str | bytes, *more: str) -> TrainConfig:
    file = folder / "my.flags"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return parse_command_line(["--flagfile=my.flags", *more])


def test_case_t17_what_is_accepted(folder: Path) -> None:
    (folder / "nested.flags").write_text("--learning_rate=0.5\n--seed=9\n")
    content = (
        "\ufeff# a comment\n// another one\n   # an indented one\n\n   \n--rank=7   \n--noresume\n--run_dir=a=b/c\n"
        "--flagfile=nested.flags\n--seed=3\n--seed=4\n-dry_run"
    )
    config = parse(folder, content)
    assert (config.rank, config.resume, config.run_dir, config.seed) == (7, False, "a=b/c", 4)
    assert config.learning_rate == 0.5
    assert config.dry_run


def test_case_t17_windows_line_ends(folder: Path) -> None:
    assert parse(folder, b"--rank=7\r\n\r\n# x\r\n--head=low_rank\r\n").rank == 7


def test_case_t17_a_flag_after_the_file_wins_and_one_before_loses(folder: Path) -> None:
    (folder / "my.flags").write_text("--seed=1\n")
    assert parse_command_line(["--flagfile", "my.flags", "--seed=2"]).seed == 2
    assert parse_command_line(["--seed=2", "--flagfile=my.flags"]).seed == 1


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("--rank=7\nseed=3\n", ["a line of a flagfile must be a flag", "'seed=3'", "line 2"]),
        ("--rank=7  # an eighth\n", ["comment", "line 1"]),
        ("--target=model // best\n", ["comment", "line 1"]),
        ("--rank 7\n", ["--name=value", "'--rank 7'", "line 1"]),
        ("\n--rnak=7\n", ["`--rnak` is not a flag", "`--rank`", "line 2"]),
        ("--rank=seven\n", ["`--rank` must be a whole number", "'seven'", "line 1"]),
        ("--rank=7\n--rank=0\n", ["`--rank` must be at least 1", "got 0", "line 2"]),
        ("--nohead\n", ["`--nohead` is not a flag", "line 1"]),
        ("--flagfile=my.flags\n", ["must not include itself", "my.flags"]),
        ("--flagfile=\n", ["empty path", "line 1"]),
        ("--flagfile=absent.flags\n", ["'absent.flags' does not exist", "line 1"]),
        ("--flagfile=.\n", ["'.' is a folder", "line 1"]),
        (b"--run_dir=\xff\n", ["UTF-8"]),
        ("--head=full\n--rank=7\n", ["`--rank` has no effect with `--head=full`", "line 2"]),
    ],
)
def test_case_t17_faults_give_one_clear_line(folder: Path, content: str | bytes, words: list[str]) -> None:
    with pytest.raises(ValueError, match="flag") as raised:
        parse(folder, content)
    message = str(raised.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_case_t17_two_files_that_include_each_other(folder: Path) -> None:
    (folder / "a.flags").write_text("--flagfile=b.flags\n")
    (folder / "b.flags").write_text("--flagfile=a.flags\n")
    with pytest.raises(ValueError, match=r"a\.flags -> .*b\.flags -> .*a\.flags"):
        expand_flagfiles(["--flagfile=a.flags"])


def test_a_file_may_be_included_twice_side_by_side(folder: Path) -> None:
    (folder / "a.flags").write_text("--seed=3\n")
    assert parse(folder, "--flagfile=a.flags\n--flagfile=a.flags\n").seed == 3


def test_nested_paths_are_found_beside_the_file_that_names_them(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "sub" / "outer.flags").write_text("--flagfile=inner.flags\n")
    (folder / "sub" / "inner.flags").write_text("--seed=5\n")
    assert parse_command_line(["--flagfile=sub/outer.flags"]).seed == 5


@pytest.mark.parametrize("name", ["smollm2.flags", "llama8b.flags"])
def test_shipped_files_load_by_name_anywhere_and_round_trip(folder: Path, name: str) -> None:
    config = parse_command_line([f"--flagfile={name}"])
    assert parse(folder, flags_text(config)) == config


def test_the_embedded_default_is_the_smollm2_file(folder: Path) -> None:
    assert parse_command_line(["--flagfile=smollm2.flags"]) == parse_command_line([])


def test_other_flags_start_from_the_embedded_default_too(folder: Path) -> None:
    assert parse_command_line(["--seed=5"]) == parse_command_line(["--flagfile=smollm2.flags", "--seed=5"])


def test_the_command_line_may_make_a_line_of_a_file_idle(folder: Path) -> None:
    (folder / "my.flags").write_text("--head=low_rank\n--rank=7\n")
    config = parse_command_line(["--flagfile=my.flags", "--head=full"])
    assert (config.head, config.rank) == ("full", None)
    assert parse(folder, flags_text(config)) == config
    with pytest.raises(ValueError, match=r"`--rank` has no effect with `--head=full`; got 8$"):
        parse_command_line(["--flagfile=my.flags", "--head=full", "--rank=8"])


def test_the_llama_file_is_the_published_recipe() -> None:
    config = parse_command_line(["--flagfile=llama8b.flags"])
    assert (config.optimizer, config.learning_rate, config.schedule) == ("adamw", 4e-4, "cosine")
    assert (config.warmup_steps, config.batch_size, config.clip_norm, config.weight_decay) == (100, 64, 0.5, 0.0)
    assert (config.unroll_steps, config.draft_length_list, config.loss_decay) == (7, (7,), 0.8)
    assert (config.target_dtype, config.train_dtype) == ("bfloat16", "bfloat16")
    assert config.mesh_axes
    assert config.target == "meta-llama/Llama-3.1-8B-Instruct"
