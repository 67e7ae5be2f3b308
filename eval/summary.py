"""One row of a benchmark's result: everything about one variant, compared with plain decoding of the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.acceptance import acceptance_summary, count_steps
from eval.divergence import Divergence
from eval.estimates import bootstrap_ratio, mean_of_ratios, ratio_of_sums, repeated_ngram_share
from eval.records import GroupTiming, TurnRecord, Variant


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
    counts = [count_steps(record.completion.steps) for record in answered]
    num_tokens = sum(len(record.completion.token_ids) for record in answered)
    repetition = [(repeated_ngram_share(r.completion.token_ids), len(r.completion.token_ids)) for r in answered]
    acceptance = acceptance_summary(counts)
    interval = bootstrap_ratio(*_per_conversation(answered, counts)) if answered else None
    summary: dict[str, Any] = {
        "acceptance": acceptance | {"acceptance_length_interval": interval.to_json() if interval else None},
        # Reading the prompt gives no token here, so this is the acceptance length unless a text was cut afterwards.
        "block_efficiency": num_tokens / acceptance["num_steps"] if acceptance["num_steps"] else None,
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


def _per_conversation(records: Sequence[TurnRecord], counts: Sequence[Any]) -> tuple[list[float], list[float]]:
    # Turns of one conversation are not independent: they are one unit of the bootstrap.
    committed: dict[str | int, float] = {}
    steps: dict[str | int, float] = {}
    for record, count in zip(records, counts, strict=True):
        committed[record.question_id] = committed.get(record.question_id, 0.0) + count.num_committed
        steps[record.question_id] = steps.get(record.question_id, 0.0) + count.num_steps
    return list(committed.values()), list(steps.values())


def _speed(timings: Sequence[GroupTiming]) -> dict[str, Any]:
    tokens = [float(timing.num_tokens) for timing in timings]
    seconds = [timing.decode_seconds for timing in timings]
    rate = bootstrap_ratio(tokens, seconds)
    mean_rate = mean_of_ratios(tokens, seconds)
    return {
        "tokens_per_second": rate.to_json(),
        "tokens_per_second_mean_of_prompts": mean_rate if mean_rate == mean_rate else None,
        "decode_seconds": sum(seconds),
        "num_calls": sum(timing.num_calls for timing in timings),
        "prefill_seconds": sum(timing.prefill_seconds for timing in timings),
    }


def _speed_up(timings: Sequence[GroupTiming], plain: Sequence[GroupTiming]) -> dict[str, Any]:
    by_group = {timing.group: timing for timing in plain}
    pairs = [(timing, by_group[timing.group]) for timing in timings if timing.group in by_group]
    decoding = bootstrap_ratio(
        [float(own.num_tokens) for own, _ in pairs],
        [own.decode_seconds for own, _ in pairs],
        other_numerators=[float(other.num_tokens) for _, other in pairs],
        other_denominators=[other.decode_seconds for _, other in pairs],
    )
    whole = bootstrap_ratio(
        [float(own.num_tokens) for own, _ in pairs],
        [own.wall_seconds for own, _ in pairs],
        other_numerators=[float(other.num_tokens) for _, other in pairs],
        other_denominators=[other.wall_seconds for _, other in pairs],
    )
    per_prompt = [
        ratio_of_sums([own.num_tokens], [own.decode_seconds])
        / ratio_of_sums([other.num_tokens], [other.decode_seconds])
        for own, other in pairs
        if own.num_tokens and other.num_tokens and own.decode_seconds and other.decode_seconds
    ]
    return {
        **decoding.to_json(),
        "with_prefill": whole.to_json(),
        "mean_of_prompts": sum(per_prompt) / len(per_prompt) if per_prompt else None,
    }
