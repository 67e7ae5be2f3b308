"""From logged measurements to the plane: ratios with intervals over prompts, the cost law beside the clock.

All intervals are percentile bootstraps over held-out prompts (groups of prompts for times), each drawn with the sums of
both systems that are compared, so that easy and hard prompts cancel. Drafters of several seeds are added up within a
prompt: the interval covers prompts, and the seeds' own ratios are listed beside it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from eval.estimates import bootstrap_rate_ratio, finite_or_none, interval_json
from eval.plane_cost import cost_id
from eval.plane_decoding import decoding_id
from eval.plane_heads import FULL, PlaneHead, first_seed
from specjax import cost
from specjax.metrics import Interval, bootstrap_ratio

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class PlaneInputs:
    """What was measured.

    Attributes:
        heads: all drafters, that with the full head first.
        rows: of the log, by their name.
        draft_lengths: drafts a step.
        temperatures: of sampling.
        batches: rows of the cost measurements.
        num_slots: prompts decoded side by side where the wall clock was read.
        num_groups: groups of prompts.
    """

    heads: Sequence[PlaneHead]
    rows: Mapping[str, Row]
    draft_lengths: Sequence[int]
    temperatures: Sequence[float]
    batches: Sequence[int]
    num_slots: int
    num_groups: int

    def decoding(self, head: PlaneHead, draft_length: int, temperature: float) -> list[Row]:
        """Rows of all groups."""
        names = (decoding_id(head.mark, draft_length, temperature, group) for group in range(self.num_groups))
        return [self.rows[name] for name in names]

    def cost(self, head: PlaneHead, batch: int, draft_length: int) -> Row:
        """The cost row of a head."""
        return self.rows[cost_id(head, batch, draft_length)]


def make_points(inputs: PlaneInputs) -> list[dict[str, Any]]:
    """One point of the plane for each temperature, batch size, draft length and head."""
    points = []
    for temperature in inputs.temperatures:
        for length in inputs.draft_lengths:
            summaries = {head.name: summarise_head(inputs, head.name, length, temperature) for head in inputs.heads}
            for batch in inputs.batches:
                for head in first_seed(inputs.heads):
                    measured = summaries[head.name]
                    points.append(_point(measured, inputs.cost(head, batch, length), inputs, temperature))
    return points


def summarise_head(inputs: PlaneInputs, name: str, draft_length: int, temperature: float) -> dict[str, Any]:
    """Acceptance and measured speed of one head, over all prompts and by kind."""
    own = {h.seed: inputs.decoding(h, draft_length, temperature) for h in inputs.heads if h.name == name}
    full = {
        h.seed: inputs.decoding(h, draft_length, temperature) for h in inputs.heads if h.name == FULL and h.seed in own
    }
    kinds = list(dict.fromkeys(row["category"] for rows in own.values() for row in rows))
    return {
        "head": name,
        "seeds": list(own),
        "draft_length": draft_length,
        "temperature": temperature,
        **_summary(own, full),
        "by_kind": {kind: _summary(_of_kind(own, kind), _of_kind(full, kind)) for kind in kinds},
    }


def _of_kind(rows: Mapping[int, Sequence[Row]], kind: str) -> dict[int, list[Row]]:
    return {seed: [row for row in own if row["category"] == kind] for seed, own in rows.items()}


def _summary(own: Mapping[int, Sequence[Row]], full: Mapping[int, Sequence[Row]]) -> dict[str, Any]:
    committed, calls, _, _ = question_sums(own, full)
    tau = bootstrap_ratio(np.array(committed, np.float64), np.array(calls, np.float64))
    seconds = group_sums(own, full)
    rows = [row for rows in own.values() for row in rows]
    questions = [question for row in rows for question in row["questions"]]
    tried = sum(question["tried_at"][0] for question in questions if question["tried_at"])
    accepted = sum(question["accepted_at"][0] for question in questions if question["accepted_at"])
    equal = [row["num_equal"] for row in rows if row["num_equal"] is not None]
    return {
        "tau": interval_json(tau),
        "rho_tau": interval_json(rho_tau_interval(own, full)),
        "rho_tau_by_seed": {
            str(seed): finite_or_none(rho_tau_interval({seed: own[seed]}, {seed: full[seed]}, num_resamples=1).value)
            for seed in own
        },
        "first_acceptance": accepted / tried if tried else None,
        "num_prompts": len(committed),
        "num_answers": len(questions),
        "num_equal_to_plain": sum(equal) if equal else None,
        "measured_speed_up": interval_json(
            bootstrap_rate_ratio(
                seconds["tokens"], seconds["seconds"], seconds["plain_tokens"], seconds["plain_seconds"]
            )
        ),
        "measured_gain": interval_json(
            bootstrap_rate_ratio(
                seconds["tokens"], seconds["scaled_seconds"], seconds["full_tokens"], seconds["full_seconds"]
            )
        ),
    }


def rho_tau_interval(
    own: Mapping[int, Sequence[Row]], full: Mapping[int, Sequence[Row]], *, num_resamples: int = 2000
) -> Interval:
    """Acceptance length of a head over the full one's on the same prompts.

    Args:
        own: the head's rows by seed.
        full: the full head's, of the same seeds.
        num_resamples: of the bootstrap over prompts.
    """
    return bootstrap_rate_ratio(*question_sums(own, full), num_resamples=num_resamples)


def question_sums(
    own: Mapping[int, Sequence[Row]], full: Mapping[int, Sequence[Row]]
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Committed tokens and target calls of a head and of the full one by prompt, seeds added up, [prompts] each.

    Only prompts that both answered for every seed count.
    """
    names: list[str | int] | None = None
    tables: list[tuple[dict[str | int, tuple[int, int]], dict[str | int, tuple[int, int]]]] = []
    for seed in own:
        pair = (_by_question(own[seed]), _by_question(full[seed]))
        tables.append(pair)
        for table in pair:
            names = list(table) if names is None else [name for name in names if name in table]
    columns = [
        [float(sum(pair[whose][name][field] for pair in tables)) for name in names or []]
        for whose in (0, 1)
        for field in (0, 1)
    ]
    return columns[0], columns[1], columns[2], columns[3]


def _by_question(rows: Iterable[Row]) -> dict[str | int, tuple[int, int]]:
    return {
        question["question_id"]: (question["num_committed"], question["num_calls"])
        for row in rows
        for question in row["questions"]
        if question["num_calls"]
    }


def group_sums(own: Mapping[int, Sequence[Row]], full: Mapping[int, Sequence[Row]]) -> dict[str, list[float]]:
    """Tokens and seconds of a head, of plain decoding beside it and of the full head by group, seeds added up.

    A head that was measured later than the full one met another machine; `scaled_seconds` are its seconds in those of
    the full head's round, by plain decoding, which was timed in both.
    """
    groups: dict[int, dict[str, float]] = {}
    for seed, rows in own.items():
        theirs = {row["group"]: row for row in full[seed]}
        for row in rows:
            other = theirs[row["group"]]
            same_clock = other["plain_decode_seconds"] / row["plain_decode_seconds"]
            values = {
                "tokens": row["num_tokens"],
                "seconds": row["decode_seconds"],
                "plain_tokens": row["plain_num_tokens"],
                "plain_seconds": row["plain_decode_seconds"],
                "scaled_seconds": row["decode_seconds"] * same_clock,
                "full_tokens": other["num_tokens"],
                "full_seconds": other["decode_seconds"],
            }
            total = groups.setdefault(row["group"], dict.fromkeys(values, 0.0))
            for name, value in values.items():
                total[name] += value
    names = next(iter(groups.values()), {}).keys()
    return {name: [group[name] for group in groups.values()] for name in names}


def _point(measured: Mapping[str, Any], row: Row, inputs: PlaneInputs, temperature: float) -> dict[str, Any]:
    nu, kappa, rho = row["nu"], row["kappa"], measured["rho_tau"]["value"]
    tau = measured["tau"]["value"]
    with_clock = row["batch"] == inputs.num_slots
    acceptance = {name: value for name, value in measured.items() if not name.startswith("measured_")}
    return {
        **acceptance,
        "temperature": temperature,
        "batch": row["batch"],
        "nu": nu,
        "kappa": kappa,
        "seconds": row["seconds"],
        "head_share_of_drafting": row["head_share_of_drafting"],
        "break_even_rho_tau": _or_none(cost.break_even_rho_tau, nu=nu, kappa=kappa),
        "predicted_gain": _or_none(cost.rho_tps, rho_tau=rho, nu=nu, kappa=kappa),
        "predicted_speed_up": _or_none(
            cost.speed_up, tau=tau, plain_seconds=row["plain_seconds"], step_seconds=row["step_seconds"]
        ),
        "measured_gain": measured["measured_gain"] if with_clock else None,
        "measured_speed_up": measured["measured_speed_up"] if with_clock else None,
    }


def _or_none(function: Any, **arguments: float | None) -> float | None:
    """The function's value, or None if an argument is missing."""
    return None if any(value is None for value in arguments.values()) else function(**arguments)


def best_of_kinds(points: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> list[dict[str, Any]]:
    """For each temperature and kind of head the point with the highest measured speed-up, the fastest kind first.

    Args:
        points: of `make_points`.
        kinds: kind of each head, by name.

    Returns:
        Points with `kind` beside.
    """
    best: dict[tuple[float, str], dict[str, Any]] = {}
    for point in points:
        speed = (point["measured_speed_up"] or {}).get("value")
        if speed is None:
            continue
        key = (point["temperature"], kinds[point["head"]])
        if key not in best or speed > best[key]["measured_speed_up"]["value"]:
            best[key] = {**point, "kind": key[1]}
    return sorted(best.values(), key=lambda point: (point["temperature"], -point["measured_speed_up"]["value"]))


def summarise_ceiling(rows: Sequence[Row], kinds: Mapping[str | int, str]) -> dict[str, Any]:
    """The ceiling over prompts, with an interval, and by kind.

    Args:
        rows: per prompt `question_id`, `mass` and `num_positions`.
        kinds: kind of each prompt.

    Returns:
        `value`, `low`, `high` and `by_kind`.
    """
    kept = [row for row in rows if row["num_positions"]]

    def ratio(some: Sequence[Row]) -> dict[str, float | None]:
        masses = np.array([row["mass"] for row in some], np.float64)
        return interval_json(bootstrap_ratio(masses, np.array([row["num_positions"] for row in some], np.float64)))

    by_kind = dict.fromkeys(kinds[row["question_id"]] for row in kept)
    return {
        **ratio(kept),
        "by_kind": {kind: ratio([row for row in kept if kinds[row["question_id"]] == kind]) for kind in by_kind},
    }
