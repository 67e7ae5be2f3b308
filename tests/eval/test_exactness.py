"""The exactness check passes what is exact and names what is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import pytest

from eval import exactness
from eval.exactness import check_exactness
from eval.replay import ReplayDrafter, replay_texts
from specjax.testing.tiny_models import TabularDrafter, tiny_target

PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 9), (2, 2)]


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(jax.random.key(8), num_layers=1)


@pytest.fixture(scope="module")
def systems(target: Any) -> dict[str, Any]:
    table = TabularDrafter(target.config.vocab_size)
    return {"table": (table, table.init_params(jax.random.key(9)))}


def test_speculative_decoding_is_exact_also_around_the_context_s_end(target: Any, systems: dict[str, Any]) -> None:
    seen: list[dict[str, Any]] = []
    result = check_exactness(
        target,
        systems,
        PROMPTS,
        draft_lengths=(3,),
        batch_sizes=(1, 2),
        max_new_tokens=40,
        cache_length=24,
        on_row=seen.append,
    )
    assert result["exact"]
    assert result["rows"] == seen
    assert [(row["system"], row["draft_length"], row["batch_size"]) for row in seen] == [
        ("plain", 0, 2),
        ("table", 3, 1),
        ("table", 3, 2),
    ]
    # Every prompt runs into the end of its 24 slots.
    assert all(row["num_tokens"] == sum(24 - len(prompt) for prompt in PROMPTS) for row in seen)


def test_a_wrong_engine_is_caught(target: Any, systems: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(
        target, params=target.params | {"lm_head": target.params["lm_head"].at[:, 3].add(jax.numpy.float32(4))}
    )
    real = exactness.Engine

    def engine(own: Any, drafter: Any, *args: Any, **sizes: Any) -> Any:
        return real(wrong if drafter is not None else own, drafter, *args, **sizes)

    monkeypatch.setattr(exactness, "Engine", engine)
    result = check_exactness(target, systems, PROMPTS, draft_lengths=(3,), max_new_tokens=40, cache_length=24)
    assert not result["exact"]
    (row,) = result["rows"]
    assert row["identical"] < row["compared"] == 4
    assert all(divergence["gap"] >= 0 for divergence in row["divergences"])


def test_prompts_that_cannot_be_served_do_not_pass_as_equal(target: Any, systems: dict[str, Any]) -> None:
    long = tuple([1] * 30)
    result = check_exactness(target, systems, [*PROMPTS, long], draft_lengths=(3,), max_new_tokens=40, cache_length=24)
    assert result["num_not_served"] == 1
    assert result["rows"][0]["compared"] == 4
    with pytest.raises(ValueError, match="no prompt can be served"):
        check_exactness(target, systems, [long], draft_lengths=(3,), cache_length=24)
    with pytest.raises(ValueError, match="at least one prompt"):
        check_exactness(target, systems, [], draft_lengths=(3,))


def test_a_log_keeps_what_was_checked(
    target: Any, systems: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    real = exactness.Engine

    def engine(*args: Any, **sizes: Any) -> Any:
        made.append(sizes["draft_length"])
        return real(*args, **sizes)

    monkeypatch.setattr(exactness, "Engine", engine)
    sizes: dict[str, Any] = {"max_new_tokens": 8, "log_path": tmp_path / "exactness.jsonl"}
    first = check_exactness(target, systems, PROMPTS, draft_lengths=(1,), **sizes)
    assert made == [0, 1]
    made.clear()
    again = check_exactness(target, systems, PROMPTS, draft_lengths=(1, 2), **sizes)
    assert made == [2]
    assert again["rows"][0] == first["rows"][0]
    made.clear()
    check_exactness(target, systems, PROMPTS, draft_lengths=(1,), **sizes, identity={"drafter": "another"})
    assert made == [0, 1]
    made.clear()
    monkeypatch.setattr(exactness, "source_digest", lambda: "other code")
    check_exactness(target, systems, PROMPTS, draft_lengths=(1,), **sizes)
    assert made == [0, 1]


def test_replayed_answers_have_every_number_of_drafts_accepted(target: Any) -> None:
    sizes: dict[str, Any] = {"draft_lengths": (1, 4), "batch_sizes": (1, 3), "max_new_tokens": 60}
    result = check_exactness(target, {}, PROMPTS, replay=0.3, **sizes)
    assert result["exact"]
    rows = [row for row in result["rows"] if row["system"] == "replay-0.3"]
    assert [(row["draft_length"], row["batch_size"]) for row in rows] == [(1, 1), (4, 1), (1, 3), (4, 3)]
    for row in rows:
        assert len(row["accepted"]) == row["draft_length"] + 1
        assert min(row["accepted"]) > 0
    # Rows do not influence each other: the same drafts, so the same steps.
    assert [row["accepted"] for row in rows[:2]] == [row["accepted"] for row in rows[2:]]


def test_replayed_answers_without_errors_are_accepted_to_the_end(target: Any) -> None:
    (row,) = check_exactness(target, {}, PROMPTS, draft_lengths=(4,), max_new_tokens=61, replay=0.0)["rows"]
    # Prefill gives the first token; sixty more come five at a time.
    assert row["identical"] == 4
    assert row["acceptance_length"] > 4.5
    for share in (-0.1, 1.0):
        with pytest.raises(ValueError, match="`replay` must be at least 0 and below 1"):
            check_exactness(target, {}, PROMPTS, draft_lengths=(4,), max_new_tokens=4, replay=share)


def test_a_text_that_is_not_known_is_not_drafted(target: Any) -> None:
    vocab_size = target.config.vocab_size
    drafter: Any = ReplayDrafter(vocab_size)
    known = replay_texts([(1, 2, 3, 4, 5)], error_rate=0.0, vocab_size=vocab_size)
    engine = exactness.Engine(target, drafter, known, num_slots=1, cache_length=24, draft_length=3)
    (completion,) = engine.generate([exactness.Request("a", (7, 8), exactness.SamplingParams(max_new_tokens=6))])
    assert all(step.num_drafted == 0 for step in completion.steps)
    with pytest.raises(ValueError, match="at least one text"):
        replay_texts([], error_rate=0.0, vocab_size=vocab_size)
    with pytest.raises(ValueError, match="`error_rate` must be at least 0"):
        replay_texts([(1, 2)], error_rate=-1.0, vocab_size=vocab_size)
