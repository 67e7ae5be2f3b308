"""The plan command: its tables, its JSON document, its mistakes in one line."""

from __future__ import annotations

import io
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from eval.plan import parse_rho_tau
from eval.plan_tables import plan_document, print_plan, print_published
from specjax.roofline import HARDWARE, Setting, load_target_shape, plan_heads
from specjax.roofline.published import predict_cells, predict_speed_ups

ROOT = pathlib.Path(__file__).parents[2]


def start(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "eval.plan", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_the_command_prints_and_writes(tmp_path: pathlib.Path) -> None:
    output = tmp_path / "deep" / "plan.json"
    process = start("--target=llama-3.1-8b", "--hardware=h200", "--batch=1", f"--output={output}")
    out, error = process.communicate(timeout=120)
    assert (process.returncode, error) == (0, "")
    assert "recommended rank: 512" in out
    assert "kappa 0.250" in out
    assert re.search(r"nu, low_rank d/16 +0\.140 +0\.151 +\+7\.\d %", out)
    document = json.loads(output.read_text())
    assert document["recommended_rank"] == 512
    assert document["heads"][0]["label"] == "full"
    assert sum(cell["fitted"] for cell in document["published"]) == 2


MISTAKES = [
    (("--target=llama-3.1-8b", "--hardware=tpu"), "`hardware` must be one of h200, h100, a100, b200, cpu; got 'tpu'"),
    (("--target=llama-3.1-8b", "--hardware=h200", "--hardware_file=x"), "`--hardware` has no effect"),
]
SLOW_MISTAKES = [
    ((), "Flag --target must have a value"),
    (("--target=nope",), "nope: must be a config.json"),
    (("--target=llama-3.1-8b", "--hardware_file={tmp}/none.json"), "no hardware file at"),
    (("--target=llama-3.1-8b", "--ranks=5000"), "`rank` of a low_rank head must be in [1, 4096]; got 5000"),
    (("--target=llama-3.1-8b", "--ranks=x"), "`--ranks` must be integers"),
    (("--target=llama-3.1-8b", "--batch=0"), "batch"),
    (("--target=llama-3.1-8b", "--rho_tau=low_rank"), "`--rho_tau` must be HEAD=VALUE"),
    (("--target=llama-3.1-8b", "--output={tmp}"), "`--output` must be a file; got the folder"),
]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [*MISTAKES, *(pytest.param(*mistake, marks=pytest.mark.slow) for mistake in SLOW_MISTAKES)],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: pathlib.Path) -> None:
    process = start(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    out, error = process.communicate(timeout=120)
    assert process.returncode in (1, 2)
    assert out == ""
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


def test_acceptance_flags() -> None:
    assert parse_rho_tau(["low_rank=0.97", "spec_vocab r=512 C=2048=1.0"]) == {
        "low_rank": 0.97,
        "spec_vocab r=512 C=2048": 1.0,
    }
    for entry in ("low_rank", "=0.9", "low_rank=much"):
        with pytest.raises(ValueError, match="must be HEAD=VALUE"):
            parse_rho_tau([entry])


def test_documents_are_json_and_tables_show_every_head() -> None:
    plan = plan_heads(load_target_shape("qwen3-30b-a3b"), HARDWARE["h100"], Setting(batch=8))
    cells, speed_ups = predict_cells(), predict_speed_ups()
    text = json.dumps(plan_document(plan, cells, speed_ups), allow_nan=False)
    assert json.loads(text)["setting"]["batch"] == 8
    page = io.StringIO()
    print_plan(plan, page)
    print_published(cells, speed_ups, page)
    for head in plan.heads:
        assert head.head.label in page.getvalue()
    assert page.getvalue().count("fitted") == 2
    assert max(map(len, page.getvalue().splitlines())) < 180
