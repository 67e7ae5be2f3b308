"""The page on verification: its programs run, its numbers are what the code gives."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from eval.verify_exact import default_jobs, exact_rows
from specjax.testing.chi_squared import assert_follows_law
from specjax.testing.instances import random_instance
from specjax.testing.sampling import count_sequences, sample_runs, sequence_law
from specjax.types import DraftTree
from specjax.verification import Verifier, base, get_verifier, verifier_names

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verification.md").read_text(encoding="utf-8")
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
(RULE,) = (program for program in PROGRAMS if "class HalfRule" in program)


@pytest.fixture
def half(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Verifier]:
    """The page's rule, imported from a file and registered until the test ends."""
    (tmp_path / "half_rule.py").write_text(RULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(base, "_VERIFIERS", dict(base._VERIFIERS))
    importlib.import_module("half_rule")
    yield get_verifier("half")
    sys.modules.pop("half_rule")


def test_the_example_rule_is_exact_and_accepts_half(half: Verifier) -> None:
    jobs = [job for job in default_jobs() if job.num_drafts == 1 and job.draft_length < 3][:6]
    for row, token in zip(exact_rows(half, jobs), exact_rows(get_verifier("token"), jobs), strict=True):
        assert row.law_error <= 1e-12
        if row.job.draft_length == 1:
            assert row.expected_accepted == pytest.approx(token.expected_accepted / 2, abs=1e-12)


def test_the_example_rule_draws_what_it_should(half: Verifier) -> None:
    instance = random_instance(3, 0)
    draws = sample_runs(half, DraftTree.chains(1, 2), instance, jax.random.key(301), num_runs=20_000, num_tokens=4)
    assert_follows_law(count_sequences(draws.tokens, 3), sequence_law(instance, 4))


@pytest.mark.parametrize(
    ("program", "status", "last_line"),
    [
        (RULE, 0, r"worst law error \d\.\de-1[5-7] \(at most 1e-12\)"),
        (RULE.replace("SHARE * jnp.exp(", "jnp.exp("), 1, r"worst law error \d\.\de-0[12] \(ABOVE 1e-12\)"),
    ],
)
def test_the_command_judges_a_rule_of_one_file(
    tmp_path: pathlib.Path, program: str, status: int, last_line: str
) -> None:
    (tmp_path / "half_rule.py").write_text(program)
    process = subprocess.run(
        [sys.executable, "-m", "eval.verify", "--rule_module=half_rule", "--rule=half"],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == status, process.stderr
    assert re.fullmatch(last_line, process.stdout.splitlines()[-1])


def test_the_counterexample_prints_what_the_page_says() -> None:
    (program,) = (program for program in PROGRAMS if "PUBLISHED_SPECTR_GBV" in program)
    (expected,) = re.findall(r"```text\n(target.*?)```", PAGE, flags=re.DOTALL)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/verification.md", "exec"), {})
    assert printed.getvalue() == expected


@pytest.mark.slow
def test_target_calls_of_the_page_are_exact() -> None:
    pattern = r"^\| `(\w+)` \| (\d) \| (\d) \| `(\w+)` \| ([\d.]+) \| `(\w+)` \| ([\d.]+) \| ([+-][\d.]+) %"
    rows = re.findall(pattern, PAGE, flags=re.MULTILINE)
    assert len(rows) == 8
    jobs = {(job.instance.name, job.draft_length, job.num_drafts): job for job in default_jobs()}
    for name, length, drafts, plain, plain_calls, greedy, greedy_calls, difference in rows:
        job = jobs[name, int(length), int(drafts)]
        found = [next(exact_rows(get_verifier(rule), [job])).target_calls for rule in (plain, greedy)]
        np.testing.assert_allclose(found, [float(plain_calls), float(greedy_calls)], atol=5.1e-7)
        assert found[0] is not None
        assert found[1] is not None
        assert 100 * (found[1] / found[0] - 1) == pytest.approx(float(difference), abs=0.0051)


def test_every_rule_and_every_file_of_the_page_exists() -> None:
    for name in verifier_names():
        assert f"`{name}`" in PAGE
    for path in re.findall(r"`((?:specjax|tests|eval|docs)/[\w/.]+)`", PAGE):
        assert (ROOT / path).exists(), path
    for path in re.findall(r"!\[[^\]]*\]\(([\w.]+)\)", PAGE):
        assert (ROOT / "docs" / path).exists(), path
