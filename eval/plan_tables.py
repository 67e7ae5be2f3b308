"""A plan as text tables and as one JSON document."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from specjax.roofline import Plan, cycle_work
from specjax.roofline.published import Cell

SCHEMA = 1


def print_plan(plan: Plan, file: Any = None) -> None:
    """Prints the setting, where a cycle's time goes, the heads and the recommendation."""
    setting, step, drafter = plan.setting, plan.full_step, plan.drafter
    print(
        f"{plan.target.name} on {plan.hardware.name}, {setting.dtype}, {setting.batch} row(s) with {setting.context} "
        f"cached tokens, {setting.draft_length} drafts a cycle, temperature 0",
        file=file,
    )
    print(
        f"draft layer: width {drafter.hidden_size}, feed-forward {drafter.intermediate_size}, "
        f"{drafter.num_heads}/{drafter.num_kv_heads} heads of {drafter.head_dim}, vocabulary {drafter.vocab_size}",
        file=file,
    )
    print(file=file)
    _print_work(plan, file)
    print(file=file)
    print(
        f"plain step {_milliseconds(plan.plain_seconds)} ms; cycle with the full head {_milliseconds(step.total)} ms: "
        f"verification {_milliseconds(step.verify)}, draft passes {_milliseconds(step.drafting - step.heads)}, "
        f"heads {_milliseconds(step.heads)}",
        file=file,
    )
    tau = "unknown" if plan.full_tau is None else f"{plan.full_tau:.2f}"
    print(
        f"kappa {plan.kappa:.3f}; full head's share of drafting {100 * step.head_share_of_drafting:.0f} %; "
        f"acceptance length with it {tau} ({plan.full_tau_source})",
        file=file,
    )
    print(file=file)
    _print_heads(plan, file)
    print(file=file)
    if plan.recommended_rank is None:
        print(f"recommended rank: none; {plan.reason}", file=file)
    else:
        print(f"recommended rank: {plan.recommended_rank}; {plan.reason}", file=file)


def _print_work(plan: Plan, file: Any) -> None:
    full = plan.heads[0].head
    print(f"{'':<30}{'calls':>6}{'weights':>10}{'cache':>10}{'states':>10}{'GFLOP':>9}{'kernels':>9}", file=file)
    for name, (calls, work) in cycle_work(plan.target, plan.drafter, full, plan.setting).items():
        sizes = "".join(
            f"{size / 1e6:>7.1f} MB" for size in (work.weight_bytes, work.cache_bytes, work.activation_bytes)
        )
        print(f"{name:<30}{calls or '-':>6}{sizes}{work.flops / 1e9:>9.2f}{work.kernels:>9.0f}", file=file)


def _print_heads(plan: Plan, file: Any) -> None:
    print(
        f"{'head':<28}{'weights':>9}{'bytes':>7}{'us':>8}{'nu':>7}{'break-even':>12}{'rho_tau':>9}"
        f"{'over full':>11}{'over plain':>12}  rho_tau from",
        file=file,
    )
    for row in plan.heads:
        print(
            f"{row.head.label:<28}{row.num_params / 1e6:>8.1f}M{row.byte_ratio:>7.3f}{1e6 * row.seconds:>8.1f}"
            f"{row.nu:>7.3f}{row.break_even_rho_tau:>12.3f}{_number(row.rho_tau, 9)}{_number(row.rho_tps, 11)}"
            f"{_number(row.speed_up, 12, 2)}  {row.rho_tau_source}",
            file=file,
        )


def print_published(cells: Sequence[Cell], speed_ups: Sequence[Cell], file: Any = None) -> None:
    """Prints published values, predictions and errors; fitted cells are marked."""
    for title, rows in (("published costs (H200)", cells), ("published speeds", speed_ups)):
        print(file=file)
        print(f"{title:<52}{'published':>10}{'predicted':>11}{'error':>9}", file=file)
        for cell in rows:
            digits = 0 if cell.published >= 100 else 3
            print(
                f"  {cell.target:<14}{cell.quantity:<36}{cell.published:>10.{digits}f}{cell.predicted:>11.{digits}f}"
                f"{100 * cell.error:>+7.1f} %{'  fitted' if cell.fitted else ''}",
                file=file,
            )


def plan_document(plan: Plan, cells: Sequence[Cell], speed_ups: Sequence[Cell]) -> dict[str, Any]:
    """The plan and the published cells as a JSON-able dict; times in seconds."""
    step = plan.full_step
    return {
        "schema": SCHEMA,
        "kind": "plan",
        "target": dataclasses.asdict(plan.target),
        "drafter": dataclasses.asdict(plan.drafter),
        "setting": dataclasses.asdict(plan.setting),
        "hardware": {**dataclasses.asdict(plan.hardware), "flops_per_second": dict(plan.hardware.flops_per_second)},
        "plain_seconds": plan.plain_seconds,
        "cycle": {
            "seconds": step.total,
            "verify": step.verify,
            "backbone": step.backbone,
            "head": step.head,
            "extend": step.extend,
            "overhead": step.overhead,
            "work": {
                name: {"calls": calls, **dataclasses.asdict(work)}
                for name, (calls, work) in cycle_work(
                    plan.target, plan.drafter, plan.heads[0].head, plan.setting
                ).items()
            },
        },
        "kappa": plan.kappa,
        "head_share_of_drafting": step.head_share_of_drafting,
        "full_tau": plan.full_tau,
        "full_tau_source": plan.full_tau_source,
        "heads": [{**dataclasses.asdict(row), "label": row.head.label} for row in plan.heads],
        "recommended_rank": plan.recommended_rank,
        "reason": plan.reason,
        "published": [{**dataclasses.asdict(cell), "error": cell.error} for cell in (*cells, *speed_ups)],
    }


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _number(value: float | None, width: int, digits: int = 3) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:>{width}.{digits}f}"
