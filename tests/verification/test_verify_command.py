"""`python -m eval.verify`: a user's mistake is one line on standard error; times come as a table."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import jax
import pytest

from eval import verify_timing
from specjax.testing.tiny_models import tiny_target
from specjax.verification import get_verifier

ROOT = pathlib.Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "eval.verify", *arguments],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--golden={tmp}/none.json",), "No such file or directory"),
        *(
            pytest.param(*mistake, marks=pytest.mark.slow)
            for mistake in (
                (("--golden={tmp}",), "Is a directory"),
                ((), "nothing to check: give --all"),
                (("--rule=fastest",), "`verifier` must be one of"),
                (("--all", "--rule=token"), "`--rule` has no effect with `--all`"),
                (("--all", "--seed=1"), "`--seed` has no effect without `--empirical`"),
                (("--all", "--time_repeats=1"), "`--time_repeats` has no effect without `--time`"),
                (("--time", "--time_target=x", "--time_vocab_size=9"), "`--time_vocab_size` has no effect with"),
                (("--all", "--rule_module=no_such_module"), "`--rule_module` must name a module that can be imported"),
                (("--empirical=-1",), "flag --empirical=-1"),
            )
        ),
    ],
)
def test_mistakes_are_one_line(arguments: tuple[str, ...], message: str, tmp_path: pathlib.Path) -> None:
    process = run(*(argument.replace("{tmp}", str(tmp_path)) for argument in arguments))
    assert process.returncode in (1, 2)
    assert process.stdout == ""
    assert process.stderr.startswith("error: ")
    assert message in process.stderr
    assert process.stderr.count("\n") == 1


def test_times_stand_beside_log_softmax_and_the_target_s_forward() -> None:
    target = tiny_target(jax.random.key(1), vocab_size=32, num_layers=1, max_position_embeddings=512)
    rules = [get_verifier("token"), get_verifier("multi_draft_block")]
    sizes = {"vocab_size": 32, "draft_length": 2, "num_drafts": 3, "repeats": 2}
    rows = list(verify_timing.timing_rows(rules, **sizes, target=target))
    assert [(row.verifier, row.num_drafts) for row in rows] == [("token", 1), ("multi_draft_block", 3)]
    for row in rows:
        assert row.milliseconds > 0
        assert row.log_softmax > 0
        assert row.forward is not None
        assert row.forward > 0
        header = verify_timing.HEADER + verify_timing.FORWARD_HEADER
        assert len(verify_timing.format_row(row)) == len(header)
    with pytest.raises(ValueError, match="`vocab_size` must be the target's 32; got 16"):
        next(verify_timing.timing_rows(rules, **(sizes | {"vocab_size": 16}), target=target))
