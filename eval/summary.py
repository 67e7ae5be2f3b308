"""One row of a benchmark's result: everything about one variant, compared with plain decoding of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eval.divergence import Divergence
from eval.estimates import (
    bootstrap_rate_ratio,
    finite_or_none,
    interval_json,
    mean_of_ratios,
    ratio_of_sums,
    repeated_ngram_share,
)
from eval.records import GroupTiming, TurnRecord, Variant
from specjax import metrics


def summarise_variant(
    variant: Variant,
    records: Sequence[TurnRecord],
    timings: Sequence[GroupTiming],
    plain_timings: Sequence[GroupTiming],
    divergences: Sequence[tuple[TurnRecord, Divergence]] | None,
) -> dict[str, Any]:
    """The result row of one variant.

    Speed-up is the ratio of the two token rates, (tokens / seconds) over (tokens / seconds), each a ratio of sums
    over all prompts. Where both decode the same tokens, as at temperature 0, that is the ratio of wall clocks.

    Args:
        variant: what ran.
        records: its answers.
        timings: its groups.
        plain_timings: the same groups under plain decoding.
        divergences: answers that differ from plain decoding's; None when they are sampled and may differ.

    Returns:
        A JSON-able dict.
    """
    kinds = sorted({timing.category for timing in timings})
    row: dict[str, Any] = {
        "system": variant.system,
        "draft_length": variant.draft_length,
        "temperature": variant.temperature,
        "label": variant.label,
        "model_id": variant.model_id,
        **_summarise(variant, records, timings, plain_timings),
        "by_kind": {
            kind: _summarise(
                variant,
                [record for record in records if record.category == kind],
                [timing for timing in timings if timing.category == kind],
                [timing for timing in plain_timings if timing.category == kind],
            )
            for kind in kinds
        },
    }
    row["equals_plain"] = None if divergences is None else _equality(records, divergences)
    return row


def _equality(records: Sequence[TurnRecord], divergences: Sequence[tuple[TurnRecord, Divergence]]) -> dict[str, Any]:
    return {
        "identical": len(records) - len(divergences),
        "compared": len(records),
        "divergences": [
            {"question_id": record.question_id, "turn": record.turn, **divergence.to_json()}
            for record, divergence in divergences
        ],
    }


def _summarise(
    variant: Variant,
    records: Sequence[TurnRecord],
    timings: Sequence[GroupTiming],
    plain_timings: Sequence[GroupTiming],
) -> dict[str, Any]:
    answered = [record for record in records if not record.completion.failed]
    num_tokens = sum(len(record.completion.token_ids) for record in answered)
    repetition = [(repeated_ngram_share(r.completion.token_ids), len(r.completion.token_ids)) for r in answered]
    acceptance = summarise_acceptance(answered)
    summary: dict[str, Any] = {
        "acceptance": acceptance,
        "block_efficiency": acceptance["acceptance_length"],
        "num_tokens": num_tokens,
        "num_answers": len(answered),
        "num_empty": sum(1 for record in answered if not record.completion.token_ids),
        "num_failed": len(records) - len(answered),
        "repeated_4gram_share": (sum(share * size for share, size in repetition) / num_tokens if num_tokens else None),
        **_speed(timings),
    }
    if not variant.is_plain:
        summary["speed_up"] = _speed_up(timings, plain_timings)
    return summary


def summarise_acceptance(records: Sequence[TurnRecord]) -> dict[str, Any]:
    """Acceptance of a set of answers; a step is a target call, its recovered or bonus token counts.

    `acceptance_length` is pooled, `acceptance_length_mean_of_requests` the unweighted mean of the answers' own,
    `acceptance_length_where_drafted` leaves out steps without drafts, `joint[i]` is how often position i and all
    before it were accepted, `conditional[i]` how often it was where all before it were.
    """
    summary = metrics.summarise([record.completion for record in records])
    counts = summary.counts
    committed: dict[str | int, int] = {}
    calls: dict[str | int, int] = {}
    for record in records:
        if record.completion.steps:
            # Turns of one conversation are not independent: they are one unit of the bootstrap.
            own = metrics.count_steps(record.completion.steps)
            committed[record.question_id] = committed.get(record.question_id, 0) + own.num_committed
            calls[record.question_id] = calls.get(record.question_id, 0) + own.num_calls
    interval = metrics.bootstrap_ratio(
        np.array(list(committed.values()), np.float64), np.array(list(calls.values()), np.float64)
    )
    return {
        "acceptance_length": finite_or_none(counts.acceptance_length),
        "acceptance_length_interval": interval_json(interval),
        "acceptance_length_mean_of_requests": finite_or_none(summary.mean_request_acceptance_length),
        "acceptance_length_where_drafted": finite_or_none(counts.drafting_acceptance_length),
        "accepted_per_step": finite_or_none(counts.accepted_per_call),
        "acceptance_rate": finite_or_none(counts.acceptance_rate),
        "joint": [finite_or_none(rate) for rate in counts.joint_acceptance],
        "conditional": [finite_or_none(rate) for rate in counts.conditional_acceptance],
        "num_steps": counts.num_calls,
        "num_drafted": counts.num_drafted,
        "num_accepted": counts.num_accepted,
        "num_committed": counts.num_committed,
    }


def _speed(timings: Sequence[GroupTiming]) -> dict[str, Any]:
    tokens = [timing.num_tokens for timing in timings]
    seconds = [timing.decode_seconds for timing in timings]
    rate = metrics.bootstrap_ratio(np.array(tokens, np.float64), np.array(seconds, np.float64))
    return {
        "tokens_per_second": interval_json(rate),
        "tokens_per_second_mean_of_prompts": finite_or_none(mean_of_ratios(tokens, seconds)),
        "decode_seconds": sum(seconds),
        "num_calls": sum(timing.num_calls for timing in timings),
        "prefill_seconds": sum(timing.prefill_seconds for timing in timings),
    }


def _speed_up(timings: Sequence[GroupTiming], plain: Sequence[GroupTiming]) -> dict[str, Any]:
    by_group = {timing.group: timing for timing in plain}
    own = [timing for timing in timings if timing.group in by_group]
    other = [by_group[timing.group] for timing in own]
    tokens, plain_tokens = [t.num_tokens for t in own], [t.num_tokens for t in other]
    seconds, plain_seconds = [t.decode_seconds for t in own], [t.decode_seconds for t in other]
    decoding = bootstrap_rate_ratio(tokens, seconds, plain_tokens, plain_seconds)
    whole = bootstrap_rate_ratio(tokens, [t.wall_seconds for t in own], plain_tokens, [t.wall_seconds for t in other])
    per_prompt = [
        ratio_of_sums([a], [b]) / ratio_of_sums([c], [d])
        for a, b, c, d in zip(tokens, seconds, plain_tokens, plain_seconds, strict=True)
        if min(a, b, c, d) > 0
    ]
    return {
        **interval_json(decoding),
        "with_prefill": interval_json(whole),
        "mean_of_prompts": sum(per_prompt) / len(per_prompt) if per_prompt else None,
    }
