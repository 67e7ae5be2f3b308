"""What each head costs inside the drafter, and what it is a part of: nu and kappa out of one run.

The drafter with the full head decodes step by step with a clock around each part. In every step the drafters with the
other heads propose from the same state as well, each right after a target forward, and one without a head, whose time
is taken off. So a machine that slows down slows all of them, and nu is a ratio within one run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from eval.dissection import DECIDE, TARGET
from eval.head_cost import step_time
from eval.plane_heads import FULL, PlaneHead
from eval.variant_dissection import PLAIN_KEY, Dissection
from specjax import cost


def cost_id(head: PlaneHead, batch: int, draft_length: int) -> str:
    """Name of a head's cost row."""
    return f"cost-{head.mark}-B{batch}-L{draft_length}"


def measure_costs(
    target: Any,
    full: PlaneHead,
    heads: Sequence[PlaneHead],
    prompt_ids: Sequence[int],
    *,
    draft_lengths: Sequence[int],
    batch: int,
    num_steps: int,
) -> list[dict[str, Any]]:
    """Times heads at one batch size, all of them and all draft lengths in turn.

    Args:
        target: a loaded target.
        full: the drafter with the full head.
        heads: the others; `full` may be among them.
        prompt_ids: the prompt that is decoded.
        draft_lengths: drafts a step.
        batch: rows, all with the same prompt.
        num_steps: timed steps of each draft length.

    Returns:
        One row a head and draft length: `seconds` and `full_seconds` of one call, `nu`, and of the cycle with the full
        head `parts` (seconds), `plain_seconds` and `kappa`.
    """
    dissection = Dissection(target, prompt_ids, num_steps, batch)
    others = {head.name: head.pair for head in heads if head.name != FULL}
    for length in draft_lengths:
        dissection.add((FULL, length), *full.pair, length, heads=others)
    dissection.run()
    plain_parts, _ = dissection.parts(PLAIN_KEY)
    host = max(dissection.plain_step_seconds - sum(plain_parts.values()), 0.0)
    plain_seconds = plain_parts[TARGET] + plain_parts[DECIDE] + host
    rows = []
    for length in draft_lengths:
        parts, added = dissection.parts((FULL, length))
        step = step_time(parts, added, length, parts[DECIDE] + host)
        seconds = {FULL: step.head, **dissection.seconds_of_heads((FULL, length))}
        for head in heads:
            rows.append(_row(head, batch, step, seconds[head.name], plain_seconds))
    return rows


def _row(head: PlaneHead, batch: int, full: cost.StepTime, seconds: float, plain_seconds: float) -> dict[str, Any]:
    step = full.with_head(seconds)
    return {
        "model_id": cost_id(head, batch, full.draft_length),
        "part": "cost",
        "head": head.name,
        "seed": head.seed,
        "batch": batch,
        "draft_length": full.draft_length,
        "seconds": seconds,
        "full_seconds": full.head,
        "nu": cost.nu(seconds, full.head) if min(seconds, full.head) > 0.0 else None,
        "kappa": full.kappa if full.head > 0.0 else None,
        "step": dataclasses.asdict(full),
        "plain_seconds": plain_seconds,
        "step_seconds": step.total,
        "head_share_of_drafting": step.head_share_of_drafting,
        "full_head_share_of_drafting": full.head_share_of_drafting,
    }
