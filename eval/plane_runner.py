"""Measures what a plane needs and the log does not hold, part by part, and puts it together."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import pathlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from eval import files
from eval.compiled_programs import release_compiled_programs
from eval.configuration_log import ConfigurationLog
from eval.plane_ceiling import Ceilings, ceiling_rows, kind_of_support
from eval.plane_chart import plane_svg
from eval.plane_cost import cost_id, measure_costs
from eval.plane_decoding import PlaneDecoding, decoding_id
from eval.plane_heads import PlaneHead, first_seed
from eval.plane_results import PlaneInputs, best_of_kinds, make_points, summarise_ceiling
from eval.provenance import describe_run, describe_target
from eval.questions import Question
from eval.records import PLAIN

SCHEMA = 1
LOG_NAME = "plane.jsonl"


@dataclasses.dataclass(frozen=True)
class PlaneSettings:
    """What is measured.

    Attributes:
        draft_lengths: drafts a step.
        temperatures: of sampling.
        batches: rows of the cost measurements.
        num_slots: prompts decoded side by side for acceptance and wall clock.
        max_new_tokens: longest answer.
        num_steps: timed steps of each cost measurement.
        seed: of the first question.

    Raises:
        ValueError: if a size is out of range.
    """

    draft_lengths: tuple[int, ...] = (1, 2)
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1, 8)
    num_slots: int = 1
    max_new_tokens: int = 64
    num_steps: int = 24
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_slots", "max_new_tokens", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1; got {getattr(self, name)}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be in [0, 2**32); got {self.seed}")

    def identity(self) -> dict[str, Any]:
        """Settings that every row depends on; the others are in the rows' names."""
        return {name: getattr(self, name) for name in ("num_slots", "max_new_tokens", "num_steps", "seed")}


def measure_plane(
    target: Any,
    heads: Sequence[PlaneHead],
    questions: Sequence[Question],
    settings: PlaneSettings,
    folder: pathlib.Path,
    *,
    on_line: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measures what the folder's log does not hold, and puts all of it together.

    Args:
        target: a loaded target with a chat template.
        heads: the drafters, that with the full head first.
        questions: what to ask; first turns only.
        settings: what to measure.
        folder: where `plane.jsonl` grows.
        on_line: told about each part.

    Returns:
        A JSON-able dict: what ran, `heads`, `cycles`, `points` and `best`.

    Raises:
        ValueError: if there is nothing to ask, or the log holds something else.
    """
    run, described = describe_run(), describe_target(target)
    log = ConfigurationLog(
        folder / LOG_NAME,
        {
            "schema": SCHEMA,
            "target": {field: described[field] for field in ("name", "digest", "template_digest", "dtype")},
            "questions": _digest(questions),
            "num_questions": len(questions),
            "settings": settings.identity(),
            "jax": run["versions"]["jax"],
            "machine": run["machine"],
        },
    )
    decoding = PlaneDecoding(
        target,
        questions,
        draft_lengths=settings.draft_lengths,
        num_slots=settings.num_slots,
        max_new_tokens=settings.max_new_tokens,
        seed=settings.seed,
    )
    singles = first_seed(heads)
    prompt_ids = decoding.encode(questions[0])
    for batch in settings.batches:
        with _part(on_line, f"costs, {batch} row(s)") as done:
            done(_fill_costs(log, target, singles, prompt_ids, settings, batch))
    for temperature in settings.temperatures:
        for length in settings.draft_lengths:
            with _part(on_line, f"decoding, temperature {temperature:g}, L = {length}") as done:
                done(_fill_decoding(log, decoding, heads, length, temperature))
    supports = {head.name: kind_of_support(head, target.config.num_valid_tokens) for head in singles}
    for temperature in settings.temperatures:
        with _part(on_line, f"ceilings, temperature {temperature:g}") as done:
            done(_fill_ceilings(log, target, singles, supports, decoding, questions, settings, temperature))
    inputs = PlaneInputs(
        heads=heads,
        rows=log.rows,
        draft_lengths=settings.draft_lengths,
        temperatures=settings.temperatures,
        batches=settings.batches,
        num_slots=settings.num_slots,
        num_groups=len(decoding.groups),
    )
    categories = {question.id: question.category for question in questions}
    points = []
    for point in make_points(inputs):
        head = next(head for head in singles if head.name == point["head"])
        row = log.rows.get(_ceiling_id(head, point["temperature"]))
        points.append({**point, "ceiling": summarise_ceiling(row["questions"], categories) if row else None})
    described_heads = [{**head.describe(), "support": supports[head.name]} for head in singles]
    return {
        "schema": SCHEMA,
        "kind": "plane",
        **run,
        "target": described,
        "settings": {
            **dataclasses.asdict(settings),
            "num_questions": len(questions),
            "kinds": list(dict.fromkeys(categories.values())),
            "seeds": sorted({head.seed for head in heads}),
            "settings_digest": log.digest,
        },
        "heads": described_heads,
        "cycles": [_cycle(inputs.cost(singles[0], b, n)) for b in settings.batches for n in settings.draft_lengths],
        "points": points,
        "best": best_of_kinds(points, {head["name"]: head["kind"] for head in described_heads}),
    }


def write_plane(result: Mapping[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes `plane.json` and `plane.svg` beside the log; returns all three paths."""
    return [
        folder / LOG_NAME,
        files.write_json(folder / "plane.json", result),
        files.write_text(folder / "plane.svg", plane_svg(result)),
    ]


def _fill_costs(
    log: ConfigurationLog,
    target: Any,
    heads: Sequence[PlaneHead],
    prompt_ids: Sequence[int],
    settings: PlaneSettings,
    batch: int,
) -> str:
    lengths = [
        length
        for length in settings.draft_lengths
        if not _is_one_run([log.rows.get(cost_id(head, batch, length)) for head in heads])
    ]
    if not lengths:
        return "measured before"
    rows = measure_costs(
        target, heads[0], heads, prompt_ids, draft_lengths=lengths, batch=batch, num_steps=settings.num_steps
    )
    run = uuid.uuid4().hex[:8]
    for row in rows:
        log.add({**row, "run": run}, [])
    return f"{len(heads)} heads measured in one run"


def _is_one_run(rows: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether costs were measured side by side: those of another run met other programs and another machine."""
    runs = {None if row is None else row.get("run") for row in rows}
    return len(runs) == 1 and None not in runs


def _fill_decoding(
    log: ConfigurationLog, decoding: PlaneDecoding, heads: Sequence[PlaneHead], length: int, temperature: float
) -> str:
    measured = 0
    for index in range(len(decoding.groups)):
        missing = [head for head in heads if decoding_id(head.mark, length, temperature, index) not in log.rows]
        if not missing:
            continue
        measured += 1
        rows = decoding.run_group(missing, length, temperature, index)
        known_plain = decoding_id(PLAIN, 0, temperature, index) in log.rows
        for mark, (row, answers) in rows.items():
            if mark != PLAIN or not known_plain:
                log.add(row, answers)
    return f"{measured} of {len(decoding.groups)} groups of prompts measured, the others before"


def _fill_ceilings(
    log: ConfigurationLog,
    target: Any,
    heads: Sequence[PlaneHead],
    supports: Mapping[str, str | None],
    decoding: PlaneDecoding,
    questions: Sequence[Question],
    settings: PlaneSettings,
    temperature: float,
) -> str:
    missing = [head for head in heads if supports[head.name] and _ceiling_id(head, temperature) not in log.rows]
    masses: dict[str, dict[str | int, tuple[float, int]]] = {head.mark: {} for head in missing}
    if missing:
        ceilings = Ceilings(target, missing, supports, length=decoding.cache_length, most=settings.max_new_tokens)
        by_id = {question.id: question for question in questions}
        for index in range(len(decoding.groups)):
            row = log.rows[decoding_id(PLAIN, 0, temperature, index)]
            for asked, answer in zip(row["questions"], row["token_ids"], strict=True):
                prompt = decoding.encode(by_id[asked["question_id"]])
                for mark, mass in ceilings.masses(prompt, answer, temperature).items():
                    masses[mark][asked["question_id"]] = (mass, len(answer))
    for head in missing:
        log.add(
            {
                "model_id": _ceiling_id(head, temperature),
                "part": "ceiling",
                "head": head.name,
                "support": supports[head.name],
                "temperature": temperature,
                "questions": ceiling_rows(masses[head.mark]),
            },
            [],
        )
    truncated = sum(support is not None for support in supports.values())
    return f"{len(missing)} of {truncated} truncated heads measured, the others before"


def _ceiling_id(head: PlaneHead, temperature: float) -> str:
    return f"ceiling-of-answers-{head.mark}-T{temperature:g}"


def _cycle(row: Mapping[str, Any]) -> dict[str, Any]:
    names = ("batch", "draft_length", "kappa", "step", "step_seconds", "plain_seconds", "head_share_of_drafting")
    return {name: row[name] for name in names}


def _digest(questions: Sequence[Question]) -> str:
    asked = [[str(question.id), question.category, question.turns[0]] for question in questions]
    return hashlib.sha256(json.dumps(asked, ensure_ascii=False).encode()).hexdigest()


@contextlib.contextmanager
def _part(on_line: Callable[[str], None], name: str) -> Iterator[Callable[[str], None]]:
    """Times a part and frees its programs; the function it gives takes what the line about it says."""
    start = time.perf_counter()
    texts: list[str] = []
    yield texts.append
    release_compiled_programs()
    on_line(f"[{name}] {'; '.join(texts)} ({time.perf_counter() - start:.1f} s)")
