"""Checks verification rules: exact laws by enumeration, a file of exact values, chi-squared tests, times.

    python -m eval.verify --all                         every rule on the default instances
    python -m eval.verify --rule=block --rule=spectr    some rules
    python -m eval.verify --golden=FILE                 the numbers of a file, exits 1 at the first that differs
    python -m eval.verify --all --empirical=100000      chi-squared tests of the jitted rules as well
    python -m eval.verify --time                        times beside one log-softmax of the same arrays
    python -m eval.verify --time --time_target=MODEL    and beside the model's forward of the same step
    python -m eval.verify --rule_module=my_rule --rule=my_rule

Everything runs on the functions that decode. Exit status 0 means that every check passed.
"""

from __future__ import annotations

import importlib
import sys
import time

import jax
from absl import flags

from eval import verify_exact, verify_sampling, verify_timing
from eval.command_line import run_command
from eval.verify_golden import check_golden, describe
from specjax.checkpoints.target import load_target
from specjax.verification import Verifier, get_verifier, verifier_names

LARGEST_LAW_ERROR = 1e-12


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    flags.DEFINE_bool("all", False, "Check every registered rule exactly.")
    flags.DEFINE_multi_string("rule", [], "Check this rule exactly; may be repeated.")
    flags.DEFINE_multi_string("rule_module", [], "Import this module first; it registers rules of its own.")
    flags.DEFINE_string(
        "golden",
        None,
        "Check the numbers of this file of exact values; those it does not determine are held to bounds and counted.",
    )
    flags.DEFINE_integer("empirical", 0, "Also draw this many requests from each jitted rule.", lower_bound=0)
    flags.DEFINE_integer("seed", 0, "Seed of --empirical.", lower_bound=0, upper_bound=2**32 - 1)
    flags.DEFINE_bool("time", False, "Time the jitted rules (all of them unless --rule is given).")
    flags.DEFINE_integer("time_vocab_size", 49152, "Vocabulary size of --time.", lower_bound=2)
    flags.DEFINE_integer("time_num_drafts", 4, "Drafts of --time, for rules that use several.", lower_bound=1)
    flags.DEFINE_integer("time_draft_length", 8, "Draft length of --time.", lower_bound=1)
    flags.DEFINE_integer("time_repeats", 20, "Timed calls of each rule.", lower_bound=1)
    flags.DEFINE_string(
        "time_target", None, "Time this model's float32 forward as well: a folder, a .gguf file or pypi:NAME==VERSION."
    )


def main() -> int:
    """Runs the checks that the flags ask for; returns 0 if all passed, 1 otherwise.

    Raises:
        ValueError: for an unknown rule, a rule module that cannot be imported, nothing to do, or a flag without effect.
    """
    values = flags.FLAGS
    _check_flags(values)
    for module in values.rule_module:
        _import_rules(module)
    verifiers = [get_verifier(name) for name in (values.rule or verifier_names())]
    passed = True
    if values.golden is not None:
        for line in describe(check_golden(values.golden)):
            print(line)
    if values.all or (values.rule and not values.time):
        passed &= _print_exact(verifiers)
    if values.empirical:
        passed &= _print_empirical(verifiers, values.empirical, values.seed)
    if values.time:
        _print_times(verifiers, values)
    return 0 if passed else 1


def _import_rules(module: str) -> None:
    try:
        importlib.import_module(module)
    # It is the user's code, so whatever it raises is the user's to mend.
    except Exception as error:
        hint = " (the name of a module has no .py)" if module.endswith(".py") else ""
        raise ValueError(
            f"`--rule_module` must name a module that can be imported; got {module!r}{hint}: "
            f"{type(error).__name__}: {error}"
        ) from None


def _check_flags(values: flags.FlagValues) -> None:
    if not (values.all or values.rule or values.golden is not None or values.empirical or values.time):
        raise ValueError("nothing to check: give --all, --rule=NAME, --golden=FILE, --empirical=N or --time")
    if values.all and values.rule:
        raise ValueError("`--rule` has no effect with `--all`")
    if values["seed"].present and not values.empirical:
        raise ValueError("`--seed` has no effect without `--empirical`")
    for name in ("time_vocab_size", "time_num_drafts", "time_draft_length", "time_repeats", "time_target"):
        if values[name].present and not values.time:
            raise ValueError(f"`--{name}` has no effect without `--time`")
    if values.time_target is not None and values["time_vocab_size"].present:
        raise ValueError("`--time_vocab_size` has no effect with `--time_target`: the model has its own")


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


def _print_empirical(verifiers: list[Verifier], num_runs: int, seed: int) -> bool:
    print(verify_sampling.HEADER)
    passed = True
    for verifier in verifiers:
        for row in verify_sampling.sampling_rows(verifier, num_runs, seed=seed):
            passed &= row.passed
            print(verify_sampling.format_row(row), "" if row.passed else "  CONTRADICTS THE EXACT LAW", flush=True)
    print(f"a right rule fails a test with probability {verify_sampling.FALSE_ALARM:g}")
    return passed


def _print_times(verifiers: list[Verifier], values: flags.FlagValues) -> None:
    target = load_target(values.time_target) if values.time_target is not None else None
    vocab_size = values.time_vocab_size if target is None else target.config.vocab_size
    print(
        f"V={vocab_size}, L={values.time_draft_length}, one request, float32, jax {jax.__version__}; "
        "ratio: to log_softmax of the same arrays"
    )
    if target is not None:
        print(f"share: of the packed forward of the step's nodes by {target.name}")
    print(verify_timing.HEADER + (verify_timing.FORWARD_HEADER if target is not None else ""))
    rows = verify_timing.timing_rows(
        verifiers,
        vocab_size=vocab_size,
        draft_length=values.time_draft_length,
        num_drafts=values.time_num_drafts,
        repeats=values.time_repeats,
        target=target,
    )
    for row in rows:
        print(verify_timing.format_row(row), flush=True)


if __name__ == "__main__":
    define_flags()
    run_command(main)
