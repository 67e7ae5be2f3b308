"""Commands: a user mistake is one line on standard error and a status, never a traceback."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from eval.command_line import float_list, int_list, one_line
from eval.run_directory import RunDirectory, read_flags

ROOT = pathlib.Path(__file__).parents[2]


def start(module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", f"eval.{module}", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, error = process.communicate(timeout=300)
    return process.returncode, out, error


FAST_MISTAKES = [
    ("report", ("--no_such_flag=1",), "Unknown command line flag 'no_such_flag'"),
    ("report", (), "Flag --run must have a value"),
    ("report", ("--run=x", "y"), "unexpected argument 'y'"),
    ("report", ("--run={tmp}/none",), "no run directory at"),
    ("benchmark", ("--draft_lengths=1,two",), "`--draft_lengths` must be integers"),
    ("benchmark", ("--verifiers=all,tokn", "--output_dir={tmp}"), "`--verifiers` must be 'all' or among"),
]
SLOW_MISTAKES = [
    *((module, ("--no_such_flag=1",), "Unknown command line flag") for module in ("benchmark", "generate", "speed")),
    *((module, ("--no_such_flag=1",), "Unknown command line flag") for module in ("exactness", "head_cost")),
    ("benchmark", (), "`--run` or `--target` must be given"),
    ("benchmark", ("--run={tmp}",), "is no run directory: it has no flags.txt"),
    ("benchmark", ("--temperatures=-1",), "`--temperatures` must be finite and at least 0"),
    ("benchmark", ("--questions={tmp}/none.jsonl",), "no questions file at"),
    ("benchmark", ("--questions=x", "--kinds=chat"), "have no effect with `--questions`"),
    ("benchmark", ("--target={tmp}/none", "--drafter={tmp}/a"), "no exported drafter at"),
    ("benchmark", ("--verifier=tokn",), "got 'tokn'"),
    ("benchmark", ("--num_drafts=1,3",), "`--num_drafts` must be one number without `--verifiers`; got [1, 3]"),
    ("benchmark", ("--num_drafts=0", "--verifiers=all", "--output_dir={tmp}"), "`--num_drafts` must be at least 1"),
    ("benchmark", ("--verifiers=all",), "`--verifiers` needs `--output_dir` (or `--run`)"),
    ("benchmark", ("--verifiers=all", "--repeats=2"), "`--repeats` has no effect with `--verifiers`"),
    ("benchmark", ("--verifiers=all", "--temperatures=x", "--output_dir={tmp}"), "`--temperatures` must be numbers"),
    ("benchmark", ("--verifiers=all", "--num_slots=0", "--output_dir={tmp}"), "`num_slots` must be at least 1"),
    ("benchmark", ("--target=t", "--self_draft_layers=3-1"), "`--self_draft_layers` must be layers and ranges"),
    ("generate", ("--target=t", "--prompt= "), "`--prompt` must not be empty"),
    ("generate", ("--target=t", "--temperature=-1"), "`temperature` must be at least 0"),
    ("generate", ("--run={tmp}", "--ngram"), "`--ngram` has no effect"),
    ("exactness", ("--target=t", "--batch_sizes=0"), "`--batch_sizes` must be at least 1"),
    ("exactness", ("--target=t", "--replay=nan"), "`--replay` must be at least 0 and below 1; got nan"),
    ("head_cost", ("--target=t", "--max_new_tokens=-4"), "flag --max_new_tokens=-4"),
]


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [*FAST_MISTAKES, *(pytest.param(*mistake, marks=pytest.mark.slow) for mistake in SLOW_MISTAKES)],
)
def test_mistakes_are_one_line(module: str, arguments: tuple[str, ...], message: str, tmp_path: pathlib.Path) -> None:
    status, out, error = ends(start(module, *(argument.replace("{tmp}", str(tmp_path)) for argument in arguments)))
    assert status in (1, 2)
    assert out == ""
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_report_command_prints_the_page_s_path(tmp_path: pathlib.Path) -> None:
    status, out, error = ends(start("report", f"--run={tmp_path}"))
    assert (status, error) == (0, "")
    assert pathlib.Path(out.strip()) == tmp_path / "report.html"
    assert (tmp_path / "report.html").is_file()


def test_lists_are_checked_entry_by_entry() -> None:
    assert int_list("l", ["4", "1", "4"], minimum=1) == (1, 4)
    assert float_list("t", ["1", "0.5"], minimum=0.0) == (1.0, 0.5)
    for values, message in (([], "at least one"), (["a"], "must be integers"), (["0"], "at least 1; got 0")):
        with pytest.raises(ValueError, match=message):
            int_list("l", values, minimum=1)
    for value in ("nan", "inf", "-1", "x"):
        with pytest.raises(ValueError, match="`--t` must be"):
            float_list("t", [value], minimum=0.0)
    with pytest.raises(ValueError, match="at least one"):
        float_list("t", [], minimum=0.0)


def test_messages_are_put_on_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_run_directory_names_what_it_lacks(tmp_path: pathlib.Path) -> None:
    (tmp_path / "flags.txt").write_text("--target=folder\n--noresume\n--head=full\n\n# note\n--warm_start\n")
    run = RunDirectory.open(tmp_path)
    assert run.flags == {"target": "folder", "resume": "false", "head": "full", "warm_start": "true"}
    assert run.target == "folder"
    assert run.results == tmp_path / "eval"
    with pytest.raises(FileNotFoundError, match="no exported drafter yet"):
        _ = run.export
    (tmp_path / "export").mkdir()
    assert run.export == tmp_path / "export"
    (tmp_path / "flags.txt").write_text("--head=full\n")
    assert read_flags(tmp_path / "flags.txt") == {"head": "full"}
    with pytest.raises(ValueError, match="names no `--target`"):
        _ = RunDirectory.open(tmp_path).target
    (tmp_path / "flags.txt").rename(tmp_path / "heads.json")
    with pytest.raises(FileNotFoundError, match=r"no flags\.txt; it holds several: name the folder of one"):
        RunDirectory.open(tmp_path)


def test_help_lists_the_flags_that_commands_share() -> None:
    _, out, error = ends(start("head_cost", "--help"))
    for name in ("run", "target", "drafter", "dtype", "cache_dir", "output_dir", "draft_lengths"):
        assert f"--{name}" in out.replace("--[no]", "--"), error


def test_a_folder_that_cannot_be_made_is_told_before_anything_is_measured(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    status, out, error = ends(start("head_cost", "--target=none", f"--output_dir={tmp_path / 'file'}"))
    assert (status, out) == (1, "")
    assert error == f"error: `--output_dir` must be a folder; {tmp_path / 'file'} cannot be made: File exists\n"


@pytest.mark.slow
def test_commands_work_on_a_run_directory(run_directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    run = shutil.copytree(run_directory, tmp_path / "run")
    short = ("--draft_lengths=2", "--max_new_tokens=8", "--num_questions=2")
    status, out, error = ends(start("benchmark", f"--run={run}", *short))
    assert (status, error) == (0, "")
    assert out.splitlines()[-1] == str(run / "eval" / "commands" / "benchmark.json")
    # The run's own measurement is another file; the report shows that.
    assert not (run / "eval" / "benchmark.json").exists()
    shutil.copy(run / "eval" / "commands" / "benchmark.json", run / "eval")
    shutil.copy(run / "eval" / "commands" / "samples.json", run / "eval")
    status, out, error = ends(start("exactness", f"--run={run}", "--batch_sizes=1", *short))
    assert (status, error) == (0, "")
    assert "2/2" in out
    own = ("--nongram", f"--output_dir={run / 'eval'}")
    status, out, error = ends(start("head_cost", f"--run={run}", "--num_steps=2", *own, *short))
    assert status == 0, error
    status, out, error = ends(
        start("generate", f"--run={run}", "--prompt=hello", "--max_new_tokens=8", "--color=always", "--draft_length=2")
    )
    assert status == 0, error
    assert "accepted draft" in out
    assert "tokens in" in error
    status, out, error = ends(start("report", f"--run={run}"))
    assert (status, error) == (0, "")
    page = (run / "report.html").read_text("utf-8")
    for heading in ("Decoding", "Where a step", "Sample answers", "Settings"):
        assert f"<h2>{heading}" in page


@pytest.mark.slow
def test_exactness_command_fails_when_nothing_is_exact(run_directory: pathlib.Path, tmp_path: pathlib.Path) -> None:
    # A context too small for any shipped prompt: nothing can be compared, which is no success.
    arguments = ("--draft_lengths=1", "--batch_sizes=1", "--num_questions=1", "--cache_length=4", "--nongram")
    status, _, error = ends(start("exactness", f"--run={run_directory}", f"--output_dir={tmp_path}", *arguments))
    assert status == 1
    assert error.startswith("error: no prompt can be served")
