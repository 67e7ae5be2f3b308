"""`python -m eval.benchmark --verifiers=...`: compares verification rules on one drafter."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from eval import command_flags
from eval.command_line import float_list, int_list
from eval.loading import NGRAM, LoadedSystem
from eval.matrix_plan import make_plan, parse_verifiers
from eval.matrix_runner import MatrixSettings
from eval.matrix_tables import HEADER, configuration_line, order_lines, verdict_line
from eval.questions import Question
from eval.verifier_matrix import LOG_NAME, run_matrix, write_matrix

# Flags of the benchmark that would change nothing here.
_WITHOUT_EFFECT = ("verifier", "repeats", "cache_length")


@dataclasses.dataclass(frozen=True)
class MatrixOptions:
    """The flags, checked.

    Attributes:
        verifiers: rules.
        num_drafts: values of K.
        draft_lengths: values of L.
        temperatures: of sampling.
        settings: how to decode.
        folder: for results.
    """

    verifiers: tuple[str, ...]
    num_drafts: tuple[int, ...]
    draft_lengths: tuple[int, ...]
    temperatures: tuple[float, ...]
    settings: MatrixSettings
    folder: pathlib.Path


def read_options() -> MatrixOptions:
    """Checks the flags before anything is loaded.

    Raises:
        ValueError: if one is out of range, or has no effect here.
    """
    values = flags.FLAGS
    for name in _WITHOUT_EFFECT:
        if values[name].present:
            raise ValueError(f"`--{name}` has no effect with `--verifiers`")
    folder = command_flags.output_folder()
    if folder is None:
        raise ValueError("`--verifiers` needs `--output_dir` (or `--run`): results are kept as they come")
    return MatrixOptions(
        verifiers=parse_verifiers(values.verifiers),
        num_drafts=int_list("num_drafts", values.num_drafts, minimum=1),
        draft_lengths=int_list("draft_lengths", values.draft_lengths, minimum=1),
        temperatures=tuple(dict.fromkeys(float_list("temperatures", values.temperatures, minimum=0.0))),
        settings=MatrixSettings(
            num_slots=values.num_slots,
            max_new_tokens=values.max_new_tokens,
            seed=values.seed,
            top_k=values.top_k,
            top_p=values.top_p,
            min_p=values.min_p,
        ),
        folder=folder,
    )


def run(options: MatrixOptions, questions: Sequence[Question], target: Any, systems: Mapping[str, LoadedSystem]) -> int:
    """Measures, prints and writes; killed at any time, the same command goes on where it stopped.

    Returns:
        The exit status: 1 if a measured order contradicts theory.

    Raises:
        ValueError: if not exactly one drafter is given, or it can serve no rule.
    """
    system = _choose(systems)
    plan = make_plan(
        system.name,
        system.drafter,
        options.verifiers,
        options.num_drafts,
        options.draft_lengths,
        options.temperatures,
    )
    for line in plan.skipped:
        print(f"skipped {line}", flush=True)
    print(f"{len(plan.configurations)} configurations, kept in {options.folder / LOG_NAME} as they come")
    print(HEADER, flush=True)

    def on_row(row: Mapping[str, Any], is_known: bool) -> None:
        print(configuration_line(row, is_known), flush=True)

    parts = (system.name, system.drafter, system.params)
    result = run_matrix(target, parts, questions, plan, options.settings, options.folder, on_row=on_row)
    for note in system.notes:
        print(f"warning: {note}", file=sys.stderr)
    print("\n".join(order_lines(result)))
    for path in write_matrix(result, options.folder):
        print(path)
    contradicted = bool(result["order"]["num_contradicted"])
    print(
        f"error: {verdict_line(result)}" if contradicted else verdict_line(result),
        file=sys.stderr if contradicted else None,
    )
    return int(contradicted)


def _choose(systems: Mapping[str, LoadedSystem]) -> LoadedSystem:
    """The one drafter; prompt lookup only where nothing else is given."""
    named = [system for name, system in systems.items() if name != NGRAM] or list(systems.values())
    if len(named) != 1:
        names = ", ".join(system.name for system in named) or "none"
        raise ValueError(
            f"`--verifiers` compares rules on one drafter (`--run`, `--drafter` or `--self_draft_layers`); got {names}"
        )
    return named[0]
