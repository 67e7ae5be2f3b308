"""Commands: a user mistake is one line on standard error and a status, never a traceback."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from eval.command_line import float_list, int_list, one_line
from eval.run_directory import RunDirectory, read_flags

COMMANDS = ("benchmark", "exactness", "generate", "head_cost", "report", "speed")
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


def test_an_unknown_flag_is_one_line_in_every_command() -> None:
    processes = [start(module, "--no_such_flag=1") for module in COMMANDS]
    for process in processes:
        status, out, error = ends(process)
        assert (status, out) == (2, "")
        assert error.startswith("error: Unknown command line flag 'no_such_flag'")
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("report", (), "Flag --run must have a value"),
        ("report", ("--run=x", "y"), "unexpected argument 'y'"),
        ("report", ("--run={tmp}/none",), "no run directory at"),
        ("benchmark", (), "`--run` or `--target` must be given"),
        ("benchmark", ("--run={tmp}",), "is no run directory: it has no flags.txt"),
        ("benchmark", ("--draft_lengths=1,two",), "`--draft_lengths` must be integers"),
        ("benchmark", ("--temperatures=-1",), "`--temperatures` must be finite and at least 0"),
        ("benchmark", ("--questions={tmp}/none.jsonl",), "no questions file at"),
        ("benchmark", ("--questions=x", "--kinds=chat"), "have no effect with `--questions`"),
        ("benchmark", ("--target={tmp}/none", "--drafter={tmp}/a"), "no exported drafter at"),
        ("benchmark", ("--target=t", "--drafter=ngram={tmp}/a"), "must give each drafter its own name"),
        ("generate", ("--target=t", "--prompt= "), "`--prompt` must not be empty"),
        ("generate", ("--target=t", "--temperature=-1"), "`temperature` must be at least 0"),
        ("generate", ("--run={tmp}", "--ngram"), "`--ngram` has no effect"),
        ("exactness", ("--target=t", "--batch_sizes=0"), "`--batch_sizes` must be at least 1"),
    ],
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
