"""Text with the origin of each piece: what a report and a terminal colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eval.interleaved import Measurements
from eval.questions import Question
from eval.records import PLAIN, Variant
from specjax.text.tokenizer import StreamDecoder

_MAX_SAMPLES = 5
SOURCES = ("accepted", "recovered", "bonus", "target")


def pieces(token_ids: Sequence[int], token_sources: Sequence[str], decoder: StreamDecoder) -> list[dict[str, Any]]:
    """Splits a text into runs of tokens of equal origin.

    Args:
        token_ids: tokens of the text.
        token_sources: origin of each token, one of `SOURCES`.
        decoder: fresh; a character that spans tokens appears with the token that completes it.

    Returns:
        Dicts of `text`, `source` and `num_tokens`, in order; joined texts are the whole text.

    Raises:
        ValueError: if tokens and sources differ in number.
    """
    if len(token_ids) != len(token_sources):
        raise ValueError(f"`token_sources` must have one entry a token ({len(token_ids)}); got {len(token_sources)}")
    runs: list[dict[str, Any]] = []
    for token, source in zip(token_ids, token_sources, strict=True):
        text = decoder.push([token])
        if runs and runs[-1]["source"] == source:
            runs[-1]["text"] += text
            runs[-1]["num_tokens"] += 1
        else:
            runs.append({"text": text, "source": source, "num_tokens": 1})
    if runs:
        runs[-1]["text"] += decoder.finish()
    return runs


def choose_samples(
    tokenizer: Any, measured: Measurements, rows: Sequence[Mapping[str, Any]], questions: Sequence[Question]
) -> list[dict[str, Any]]:
    """One answer of each category from the fastest trained system, split into pieces.

    Args:
        tokenizer: decodes the answers.
        measured: all answers.
        rows: the result rows of `measured`, which say what was fastest.
        questions: for the prompts' texts.

    Returns:
        JSON-able dicts; empty when nothing speculative ran.
    """
    speculative = [row for row in rows if row["system"] != PLAIN]
    if not speculative:
        return []
    trained = [row for row in speculative if row["system"] != "ngram"] or speculative
    best = max(trained, key=lambda row: row["speed_up"]["value"] or 0.0)
    variant = Variant(best["system"], best["draft_length"], best["temperature"])
    turns = {question.id: question.turns for question in questions}
    samples: list[dict[str, Any]] = []
    seen: set[str] = set()
    for record in measured.records[variant]:
        completion = record.completion
        if record.category in seen or not completion.token_ids or len(samples) == _MAX_SAMPLES:
            continue
        seen.add(record.category)
        steps = len(completion.steps)
        samples.append(
            {
                "question_id": record.question_id,
                "category": record.category,
                "prompt": turns[record.question_id][record.turn],
                "system": variant.system,
                "draft_length": variant.draft_length,
                "temperature": variant.temperature,
                "acceptance_length": sum(s.num_committed for s in completion.steps) / steps if steps else None,
                "pieces": pieces(completion.token_ids, completion.token_sources, StreamDecoder(tokenizer)),
            }
        )
    return samples
