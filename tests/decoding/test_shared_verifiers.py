"""Several rules in one compiled step: each request is verified by its engine's own rule, as in a step of its own."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from engine_helpers import engine_of, random_prompts, request

from specjax.decoding import SamplingParams
from specjax.decoding.scheduler import RunningRequest

RULES = ("spectr", "multi_draft_block", "spectr_gbv")


def requests_of(count: int = 12):
    prompts = random_prompts(count, seed=31)
    return [request(str(n), prompt, temperature=1.0, seed=n, max_new_tokens=14) for n, prompt in enumerate(prompts)]


def engine_with(verifier: str, shared: tuple[str, ...] = RULES, **settings):
    sizes = {"num_slots": 4, "num_drafts": 2, "draft_length": 3}
    return engine_of("tabular", verifier=verifier, shared_verifiers=shared, **sizes, **settings)


def test_each_rule_gives_what_it_gives_alone_and_only_one_step_is_compiled():
    outputs = {name: engine_with(name).generate(requests_of()) for name in RULES}
    assert engine_with("spectr")._program is engine_with("spectr_gbv")._program
    assert engine_with("spectr")._program.trace_counts["step"] == 1
    alone = engine_with("spectr_gbv", ()).generate(requests_of())
    for mine, own in zip(outputs["spectr_gbv"], alone, strict=True):
        assert (mine.token_ids, mine.steps) == (own.token_ids, own.steps)
    # The rules differ, so nothing above holds by accident.
    assert len({tuple(c.token_ids for c in completions) for completions in outputs.values()}) == 3


def test_the_rule_of_the_next_run_may_be_chosen():
    engine = engine_with("spectr")
    before = [completion.token_ids for completion in engine.generate(requests_of())]
    engine.verifier = "spectr_gbv"
    other = [completion.token_ids for completion in engine.generate(requests_of())]
    assert other == [completion.token_ids for completion in engine_with("spectr_gbv").generate(requests_of())]
    engine.verifier = "spectr"
    assert [completion.token_ids for completion in engine.generate(requests_of())] == before
    with pytest.raises(ValueError, match=r"`verifier` must be among the rules of this engine's step, .*; got 'token'"):
        engine.verifier = "token"


def test_kept_prefills_serve_requests_with_other_settings():
    """Laws, seeds, limits and carries are those of the request, whoever asked the prompt first."""
    others = [
        dataclasses.replace(one, params=SamplingParams(temperature=0.6, top_k=5, seed=99 + n, max_new_tokens=3 + n))
        for n, one in enumerate(requests_of())
    ]
    kept = engine_with("spectr_gbv", keep_prefills=True)
    for requests in (requests_of(), others, requests_of()):
        expected = engine_with("spectr_gbv").generate(requests)
        for mine, own in zip(kept.generate(requests), expected, strict=True):
            assert (mine.token_ids, mine.steps, mine.finish_reason) == (own.token_ids, own.steps, own.finish_reason)


def carried_positions(verifier: str) -> int:
    """Most positions that the carry of `spectr_gbv` holds in some steps of an engine of another rule or of its own."""
    engine = engine_with(verifier)
    state = engine._fill(engine._program.empty(4, np.float32), 0, RunningRequest(requests_of()[0], None))
    most = 0
    for _ in range(5):
        state, _ = engine._program.step(engine._target.params, engine._drafter_params, state, *engine._rule)
        most = max(most, int(np.max(state.carry[RULES.index("spectr_gbv")].remaining)))
    return most


def test_a_rule_moves_its_own_carry_only():
    assert carried_positions("spectr_gbv") > 0
    assert carried_positions("multi_draft_block") == 0


def test_the_own_rule_must_be_among_them():
    with pytest.raises(
        ValueError, match=r"`shared_verifiers` must hold the engine's own rule 'token'; got \['block'\]"
    ):
        engine_of("tabular", verifier="token", shared_verifiers=("block",))
    with pytest.raises(ValueError, match="`verifier` 'token' uses one chain of drafts"):
        engine_of("tabular", num_drafts=2, verifier="spectr", shared_verifiers=("spectr", "token"))
