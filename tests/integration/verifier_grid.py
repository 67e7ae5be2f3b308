"""What the tests of all rules on the engine share: which rules there are, and how their answers are compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax import verification
from specjax.decoding import Completion, Engine, Request, SamplingParams

Prompts = Sequence[tuple[int, ...]]


def rules_for(num_drafts: int) -> tuple[str, ...]:
    """All registered lossless rules that use K drafts."""
    verifiers = [verification.get_verifier(name) for name in verification.verifier_names()]
    return tuple(v.name for v in verifiers if v.lossless and (v.multi_draft or num_drafts == 1))


def requests_of(prompts: Prompts, lengths: Sequence[int | None], **params: Any) -> list[Request]:
    """Every prompt at every draft length; None is the engine's."""
    return [
        Request(f"{n} {length}", prompt, SamplingParams(num_speculative_tokens=length, **params))
        for length in lengths
        for n, prompt in enumerate(prompts)
    ]


def plain_answers(target: Any, prompts: Prompts, *, cache_length: int, **params: Any) -> list[tuple[int, ...]]:
    """Plain decoding, one prompt at a time."""
    engine = Engine(target, num_slots=1, cache_length=cache_length)
    return [completion.token_ids for completion in engine.generate(requests_of(prompts, [None], **params))]


def engines_of(target: Any, drafter: tuple[Any, Any], *, num_drafts: int, **sizes: Any) -> Iterator[tuple[str, Engine]]:
    """An engine for each rule that uses K drafts; all of them share one compiled step."""
    rules = rules_for(num_drafts)
    for rule in rules:
        yield rule, Engine(target, *drafter, num_drafts=num_drafts, verifier=rule, shared_verifiers=rules, **sizes)


def assert_rules_equal_plain_decoding(
    target: Any,
    drafter: tuple[Any, Any],
    prompts: Prompts,
    plain: Sequence[tuple[int, ...]],
    *,
    lengths: Sequence[int | None] = (None,),
    sizes: Mapping[str, int],
    **params: Any,
) -> dict[str, list[Completion]]:
    """Runs every prompt at every length through all rules, compares every token; returns the completions by rule."""
    requests = requests_of(prompts, lengths, **params)
    answers = {}
    for rule, engine in engines_of(target, drafter, **sizes):
        answers[rule] = engine.generate(requests)
        for request, completion in zip(requests, answers[rule], strict=True):
            assert completion.token_ids == plain[int(request.id.split()[0])], (rule, sizes, request.id)
    return answers
