"""The plane as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_plane(result: Mapping[str, Any], file: Any = None) -> None:
    """Prints cycles, a table for each temperature and batch size, kinds of prompt, seeds and the best of each kind."""
    for cycle in result["cycles"]:
        print(
            f"{cycle['batch']} row(s), {cycle['draft_length']} draft(s) a step, full head: kappa "
            f"{_number(cycle['kappa'], 5, 3)}, head {_percent(cycle['head_share_of_drafting'])} of drafting, step "
            f"{1e3 * cycle['step_seconds']:.2f} ms, plain step {1e3 * cycle['plain_seconds']:.2f} ms",
            file=file,
        )
    heads = {head["name"]: head for head in result["heads"]}
    for temperature in result["settings"]["temperatures"]:
        for batch in result["settings"]["batches"]:
            points = [p for p in result["points"] if (p["temperature"], p["batch"]) == (temperature, batch)]
            print(f"\ntemperature {temperature:g}, {batch} row(s)", file=file)
            _print_points(points, heads, file)
    _print_kinds(result["points"], result["settings"], file)
    _print_seeds(result["points"], result["settings"], file)
    if result["best"]:
        print("\nbest measured size and draft length of each kind of head", file=file)
        for point in result["best"]:
            print(
                f"  T={point['temperature']:g}  {point['kind']:<18}{point['head']:<34}L={point['draft_length']:<3}"
                f"{_value(point['measured_speed_up'], 6)} {_ends(point['measured_speed_up'])} over plain, "
                f"{_value(point['measured_gain'], 6)} {_ends(point['measured_gain'])} over full",
                file=file,
            )


def _print_points(points: Sequence[Mapping[str, Any]], heads: Mapping[str, Mapping[str, Any]], file: Any) -> None:
    print(
        f"{'head':<34}{'L':>3}{'bytes':>7}{'nu':>7}{'share':>7}  {'tau':>5}  {'rho_tau':>7} {'[95 %]':>15}{'even':>7}"
        f"{'ceiling':>9}{'first':>7}   {'gain: law':>9} {'clock':>6} {'[95 %]':>15}   {'speed-up: law':>13} "
        f"{'clock':>6} {'[95 %]':>15}",
        file=file,
    )
    for point in points:
        ceiling = point["ceiling"]
        print(
            f"{point['head'][:34]:<34}{point['draft_length']:>3}{heads[point['head']]['byte_ratio']:>7.3f}"
            f"{_number(point['nu'], 7, 3)}{_percent(point['head_share_of_drafting']):>7}  {_value(point['tau'], 5, 2)}"
            f"  {_value(point['rho_tau'], 7)} {_ends(point['rho_tau'])}{_number(point['break_even_rho_tau'], 7, 3)}"
            f"{_value(ceiling, 9)}{_number(point['first_acceptance'], 7, 3)}   {_number(point['predicted_gain'], 9, 3)}"
            f" {_value(point['measured_gain'], 6)} {_ends(point['measured_gain'])}"
            f"   {_number(point['predicted_speed_up'], 13, 3)} {_value(point['measured_speed_up'], 6)}"
            f" {_ends(point['measured_speed_up'])}",
            file=file,
        )


def _print_kinds(points: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], file: Any) -> None:
    shown = [point for point in points if point["batch"] == settings["batches"][0]]
    kinds = list(dict.fromkeys(kind for point in shown for kind in point["by_kind"]))
    if len(kinds) < 2:
        return
    print("\nrho_tau by kind of prompt, and the ceiling where there is one", file=file)
    print(f"{'head':<34}{'T':>5}{'L':>3}" + "".join(f"{kind:>32}" for kind in kinds), file=file)
    for point in shown:
        cells = []
        for kind in kinds:
            part = point["by_kind"].get(kind)
            ceiling = (point["ceiling"] or {}).get("by_kind", {}).get(kind)
            cells.append(f"{_value(part and part['rho_tau'], 7)} {_ends(part and part['rho_tau'])}{_value(ceiling, 8)}")
        print(
            f"{point['head'][:34]:<34}{point['temperature']:>5g}{point['draft_length']:>3}"
            + "".join(f"{cell:>32}" for cell in cells),
            file=file,
        )


def _print_seeds(points: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], file: Any) -> None:
    shown = [p for p in points if p["batch"] == settings["batches"][0] and len(p["rho_tau_by_seed"]) > 1]
    if not shown:
        return
    seeds = list(dict.fromkeys(seed for point in shown for seed in point["rho_tau_by_seed"]))
    print("\nrho_tau by seed of training, over the full head of the same seed", file=file)
    print(f"{'head':<34}{'T':>5}{'L':>3}" + "".join(f"{f'seed {seed}':>16}" for seed in seeds), file=file)
    for point in shown:
        values = [point["rho_tau_by_seed"].get(seed) for seed in seeds]
        print(
            f"{point['head'][:34]:<34}{point['temperature']:>5g}{point['draft_length']:>3}"
            + "".join(_number(value, 16, 3) for value in values),
            file=file,
        )


def _number(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"


def _value(estimate: Mapping[str, Any] | None, width: int, digits: int = 3) -> str:
    return _number(estimate["value"] if estimate else None, width, digits)


def _ends(estimate: Mapping[str, Any] | None) -> str:
    if not estimate or estimate["low"] is None:
        return f"{'-':>15}"
    low, high = estimate["low"], estimate["high"]
    return f"{f'[{low:.3f}, {high:.3f}]':>15}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
