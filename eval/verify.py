"""Checks verification rules: exact laws by enumeration, a file of exact values, chi-squared tests, times.

    python -m eval.verify --all                         every rule on the default instances
    python -m eval.verify --rule=block --rule=spectr    some rules
    python -m eval.verify --golden=FILE                 every number of a file, exits 1 at the first that differs
    python -m eval.verify --all --empirical=100000      chi-squared tests of the jitted rules as well
    python -m eval.verify --time                        times beside one log-softmax of the same arrays
    python -m eval.verify --rule_module=my_rule --rule=my_rule

Everything runs on the functions that decode. Exit status 0 means that every check passed.
"""

from __future__ import annotations

import importlib
import sys
import time

from absl import flags

from eval import verify_exact, verify_sampling, verify_timing
from eval.command_line import run_command
from eval.verify_golden import check_golden, describe
from specjax.verification import Verifier, get_verifier, verifier_names

LARGEST_LAW_ERROR = 1e-12

_ALL = flags.DEFINE_bool("all", False, "Check every registered rule exactly.")
_RULE = flags.DEFINE_multi_string("rule", [], "Check this rule exactly; may be repeated.")
_RULE_MODULE = flags.DEFINE_multi_string("rule_module", [], "Import this module first; it registers rules of its own.")
_GOLDEN = flags.DEFINE_string("golden", None, "Check every number of this file of exact values.")
_EMPIRICAL = flags.DEFINE_integer("empirical", 0, "Also draw this many requests from each jitted rule.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of --empirical.")
_TIME = flags.DEFINE_bool("time", False, "Time the jitted rules (all of them unless --rule is given).")
_TIME_VOCAB = flags.DEFINE_integer("time_vocab_size", 49152, "Vocabulary size of --time.", lower_bound=2)
_TIME_DRAFTS = flags.DEFINE_integer(
    "time_num_drafts", 4, "Drafts of --time, for rules that use several.", lower_bound=1
)
_TIME_LENGTH = flags.DEFINE_integer("time_draft_length", 8, "Draft length of --time.", lower_bound=1)
_TIME_REPEATS = flags.DEFINE_integer("time_repeats", 20, "Timed calls of each rule.", lower_bound=1)


def main() -> int:
    """Runs the checks that the flags ask for; returns 0 if all passed, 1 otherwise.

    Raises:
        ValueError: for an unknown rule or nothing to do.
        ImportError: for a rule module that cannot be imported.
    """
    for module in _RULE_MODULE.value:
        importlib.import_module(module)
    names = verifier_names() if _ALL.value or not _RULE.value else tuple(_RULE.value)
    verifiers = [get_verifier(name) for name in names]
    exact = _ALL.value or (bool(_RULE.value) and not _TIME.value)
    if not (exact or _GOLDEN.value or _EMPIRICAL.value or _TIME.value):
        raise ValueError("nothing to check: give --all, --rule=NAME, --golden=FILE, --empirical=N or --time")
    passed = True
    if _GOLDEN.value:
        for line in describe(check_golden(_GOLDEN.value)):
            print(line)
    if exact:
        passed &= _print_exact(verifiers)
    if _EMPIRICAL.value:
        passed &= _print_empirical(verifiers)
    if _TIME.value:
        _print_times(verifiers)
    return 0 if passed else 1


def _print_exact(verifiers: list[Verifier]) -> bool:
    start = time.perf_counter()
    jobs, bounds = verify_exact.default_jobs(), verify_exact.BoundTable()
    worst = 0.0
    print(verify_exact.HEADER)
    for verifier in verifiers:
        for row in verify_exact.exact_rows(verifier, jobs):
            worst = max(worst, row.law_error)
            print(verify_exact.format_row(row, bounds[row.job]), flush=True)
    print(verify_exact.LEGEND)
    good = worst <= LARGEST_LAW_ERROR
    print(f"worst law error {worst:.1e} ({'at most' if good else 'ABOVE'} {LARGEST_LAW_ERROR:g})")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    return good


def _print_empirical(verifiers: list[Verifier]) -> bool:
    print(verify_sampling.HEADER)
    passed = True
    for verifier in verifiers:
        for row in verify_sampling.sampling_rows(verifier, _EMPIRICAL.value, seed=_SEED.value):
            passed &= row.passed
            print(verify_sampling.format_row(row), "" if row.passed else "  CONTRADICTS THE EXACT LAW", flush=True)
    print(f"a right rule fails a test with probability {verify_sampling.FALSE_ALARM:g}")
    return passed


def _print_times(verifiers: list[Verifier]) -> None:
    print(
        f"V={_TIME_VOCAB.value}, L={_TIME_LENGTH.value}, one request, float32; ratio: to log_softmax of the same arrays"
    )
    print(verify_timing.HEADER)
    rows = verify_timing.timing_rows(
        verifiers,
        vocab_size=_TIME_VOCAB.value,
        draft_length=_TIME_LENGTH.value,
        num_drafts=_TIME_DRAFTS.value,
        repeats=_TIME_REPEATS.value,
    )
    for row in rows:
        print(verify_timing.format_row(row), flush=True)


if __name__ == "__main__":
    run_command(main)
