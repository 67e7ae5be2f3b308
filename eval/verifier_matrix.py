"""All verification rules on one drafter at every K, L and temperature: run, resume, judge the order, write."""

from __future__ import annotations

import hashlib
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from eval import files
from eval.configuration_log import ConfigurationLog
from eval.estimates import finite_or_none
from eval.matrix_page import matrix_page
from eval.matrix_plan import Configuration, Plan
from eval.matrix_runner import MatrixRunner, MatrixSettings
from eval.order_check import CONTRADICTED, FAMILY_FALSE_ALARM, NOT_JUDGED, Comparison, compare, list_pairs
from eval.provenance import describe_run, describe_system, describe_target
from eval.questions import Question

SCHEMA = 1
LOG_NAME = "verifier_matrix.jsonl"

OnRow = Callable[[dict[str, Any], bool], None]
"""Called with each configuration's row, and whether it was measured before."""


def run_matrix(
    target: Any,
    system: tuple[str, Any, Any],
    questions: Sequence[Question],
    plan: Plan,
    settings: MatrixSettings,
    folder: pathlib.Path,
    *,
    on_row: OnRow | None = None,
) -> dict[str, Any]:
    """Measures what the plan holds and the folder's log does not.

    Args:
        target: a loaded target with a chat template.
        system: name, drafter and its parameters.
        questions: what to ask; first turns only.
        plan: the configurations.
        settings: how to decode.
        folder: where `verifier_matrix.jsonl` grows.
        on_row: told about each configuration.

    Returns:
        A JSON-able dict: what ran, `configurations` (one row each, see `matrix_runner`), `comparisons` and `order`.

    Raises:
        ValueError: if there is nothing to ask, or the log holds something else.
    """
    name, drafter, params = system
    run, described, drafted = describe_run(), describe_target(target), describe_system(drafter, params)
    # All that decides what an answer or a time is; a row of other settings is never taken for one of these.
    identity = {
        "schema": SCHEMA,
        "target": {field: described[field] for field in ("name", "digest", "template_digest", "dtype")},
        "system": {"name": name, **drafted},
        "questions": _questions_digest(questions),
        "num_questions": len(questions),
        "settings": vars(settings),
        "jax": run["versions"]["jax"],
        "machine": run["machine"],
    }
    log = ConfigurationLog(folder / LOG_NAME, identity)
    runner: MatrixRunner | None = None
    for configuration in plan.configurations:
        is_known = configuration.model_id in log.rows
        if not is_known:
            runner = runner or MatrixRunner(target, drafter, params, questions, plan, settings)
            log.add(*runner.run(configuration))
        if on_row is not None:
            on_row(log.rows[configuration.model_id], is_known)
    comparisons = judge(plan.configurations, log)
    return {
        "schema": SCHEMA,
        "kind": "verifier_matrix",
        **run,
        "target": described,
        "system": identity["system"],
        "settings": {**vars(settings), "num_questions": len(questions), "settings_digest": log.digest},
        "skipped": list(plan.skipped),
        "configurations": [_without_marks(log.rows[c.model_id]) for c in plan.configurations],
        "comparisons": [describe_comparison(comparison) for comparison in comparisons],
        "order": {
            "family_false_alarm": FAMILY_FALSE_ALARM,
            "num_judged": sum(comparison.verdict != NOT_JUDGED for comparison in comparisons),
            "num_contradicted": sum(comparison.verdict == CONTRADICTED for comparison in comparisons),
        },
    }


def judge(configurations: Sequence[Configuration], log: ConfigurationLog) -> list[Comparison]:
    """Compares what the log holds about some configurations."""
    counts = {
        configuration.model_id: {
            answer["question_id"]: answer["choices"][0]["accept_lengths"]
            for answer in log.answers[configuration.model_id]
        }
        for configuration in configurations
    }
    return compare(list_pairs(configurations), counts)


def describe_comparison(comparison: Comparison) -> dict[str, Any]:
    """A comparison as plain JSON values; `temperature` is null for all temperatures together."""
    pair, difference = comparison.pair, comparison.difference
    return {
        "temperature": pair.temperature,
        "first": pair.first[0].label,
        "relation": pair.relation,
        "second": pair.second[0].label,
        "sample": pair.sample,
        "difference": {name: finite_or_none(getattr(difference, name)) for name in ("value", "low", "high")},
        "level": difference.level,
        "num_questions": comparison.num_questions,
        "verdict": comparison.verdict,
    }


def write_matrix(result: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes `verifier_matrix.json` and `verifier_matrix.html` beside the log; returns all three paths."""
    return [
        folder / LOG_NAME,
        files.write_json(folder / "verifier_matrix.json", result),
        files.write_text(folder / "verifier_matrix.html", matrix_page(result)),
    ]


def _questions_digest(questions: Sequence[Question]) -> str:
    asked = [[str(question.id), question.turns[0]] for question in questions]
    return hashlib.sha256(json.dumps(asked, ensure_ascii=False).encode()).hexdigest()


def _without_marks(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("kind", "settings_digest")}
