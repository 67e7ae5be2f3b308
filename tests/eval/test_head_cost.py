"""The cost measurement on a tiny model: its parts add up and its law is the one of `specjax.cost`."""

from __future__ import annotations

import json
from typing import Any

import jax
import pytest

from eval.head_cost import measure_head_cost
from eval.questions import Question
from eval.tables import print_head_cost
from specjax import cost
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter

PARTS = {
    "target forward",
    "drafter backbone",
    "draft head",
    "drafter extension",
    "laws and verification",
    "host",
}


@pytest.fixture(scope="module")
def result(chat_target: Any) -> dict[str, Any]:
    config = Eagle3Config.for_target(chat_target.config, head_kind="low_rank")
    params = init_drafter(
        jax.random.key(6), config, chat_target.params, chat_target.config, head_init="random", warm_start=False
    )
    systems = {"slim": (Eagle3Drafter(config), {**params, "embed_tokens": chat_target.params["embed_tokens"]})}
    return measure_head_cost(
        chat_target,
        systems,
        [Question("b", "chat", ("the user and the world",))],
        draft_lengths=(2,),
        max_new_tokens=12,
        num_steps=4,
        cache_length=128,
    )


def test_parts_of_a_step_add_up(result: dict[str, Any]) -> None:
    assert [(row["system"], row["draft_length"]) for row in result["steps"]] == [("plain", 0), ("slim", 2)]
    for row in result["steps"]:
        assert set(row["parts"]) == PARTS
        assert all(seconds >= 0 for seconds in row["parts"].values())
        assert sum(row["parts"].values()) == pytest.approx(row["step_seconds"], rel=1e-9)


def test_prediction_is_the_cost_law_s(result: dict[str, Any]) -> None:
    plain, row = result["steps"]
    expected = cost.speed_up(
        tau=row["acceptance_length"], plain_seconds=plain["step_seconds"], step_seconds=row["step_seconds"]
    )
    assert row["predicted_speed_up"] == pytest.approx(expected)
    assert row["relative_step"] == pytest.approx(row["step_seconds"] / plain["step_seconds"])
    assert row["prediction_error"] == pytest.approx(row["predicted_speed_up"] / row["measured_speed_up"] - 1)


def test_head_has_its_size_and_its_byte_ratio(chat_target: Any, result: dict[str, Any]) -> None:
    (head,) = result["heads"]
    width, vocab = chat_target.config.hidden_size, chat_target.config.vocab_size
    assert head["rank"] == width // 8
    assert head["num_params"] == cost.low_rank_head_params(width, vocab, width // 8)
    assert head["byte_ratio"] == pytest.approx(cost.low_rank_byte_ratio(width, vocab, width // 8))
    assert head["alone"]["own"]["median"] > 0
    assert head["nu_alone"] == pytest.approx(head["alone"]["own"]["median"] / head["alone"]["full"]["median"])


def test_result_is_json_and_a_table(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    json.dumps(result, allow_nan=False)
    print_head_cost(result)
    out = capsys.readouterr().out
    assert "laws and verification" in out
    assert "slim" in out


def test_a_benchmark_must_hold_what_is_compared(chat_target: Any) -> None:
    with pytest.raises(ValueError, match="it lacks plain at L=0, slim at L=2"):
        measure_head_cost(
            chat_target,
            {"slim": (None, None)},
            [Question("a", "chat", ("hello",))],
            draft_lengths=(2,),
            benchmark={"results": [{"system": "slim", "draft_length": 2, "temperature": 1.0}]},
        )


def test_steps_must_be_timed_at_least_once(chat_target: Any) -> None:
    with pytest.raises(ValueError, match="`num_steps` must be at least 1"):
        measure_head_cost(chat_target, {}, [Question("a", "chat", ("hello",))], num_steps=0)
