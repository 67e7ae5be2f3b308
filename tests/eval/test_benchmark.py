"""The benchmark on a tiny model: what it counts, what it compares, what it writes."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from eval import benchmark as benchmark_lib
from eval.benchmark import run_benchmark, write_benchmark
from eval.questions import Question
from specjax.drafters.ngram import NgramDrafter
from specjax.testing.tiny_models import TabularDrafter
from specjax.text.chat_template import ChatTemplate, encode_prompt

# One size for all tests: engines of equal sizes share their compiled functions.
SIZES: dict[str, Any] = {"draft_lengths": (2,), "cache_length": 128, "max_new_tokens": 12}
QUESTIONS = [
    Question("a", "chat", ("hello world", "and the other one?")),
    Question("b", "chat", ("the user and the world",)),
    Question("c", "code", ("1 and 2 and 1 and",)),
]


@pytest.fixture(scope="module")
def systems(chat_target: Any) -> dict[str, Any]:
    vocab_size = chat_target.config.vocab_size
    table = TabularDrafter(vocab_size)
    return {
        "table": (table, table.init_params(jax.random.key(3))),
        "ngram": (NgramDrafter(vocab_size=vocab_size), None),
    }


@pytest.fixture(scope="module")
def result(chat_target: Any, systems: dict[str, Any]) -> dict[str, Any]:
    return run_benchmark(chat_target, systems, QUESTIONS, **SIZES)


def row(result: dict[str, Any], system: str, length: int) -> dict[str, Any]:
    (found,) = [r for r in result["results"] if (r["system"], r["draft_length"]) == (system, length)]
    return found


def test_every_variant_is_measured_once_beside_plain_decoding(result: dict[str, Any]) -> None:
    assert [(r["system"], r["draft_length"]) for r in result["results"]] == [
        ("plain", 0),
        ("table", 2),
        ("ngram", 2),
    ]
    assert "speed_up" not in row(result, "plain", 0)
    assert row(result, "plain", 0)["acceptance"]["acceptance_length"] == pytest.approx(1.0)


def test_greedy_answers_equal_plain_decoding(result: dict[str, Any]) -> None:
    for entry in result["results"][1:]:
        assert entry["equals_plain"] == {"identical": 4, "compared": 4, "divergences": []}
        assert entry["num_tokens"] == row(result, "plain", 0)["num_tokens"]


def test_prompt_lookup_gains_on_looping_text(chat_target: Any, systems: dict[str, Any]) -> None:
    # Without what the layers add, the next token depends on the last one alone: greedy text must run into a loop.
    layers = [
        layer | {name: jnp.zeros_like(layer[name]) for name in ("o_proj", "down_proj")}
        for layer in chat_target.params["layers"]
    ]
    looping = dataclasses.replace(chat_target, params=chat_target.params | {"layers": layers})
    result = run_benchmark(looping, {"ngram": systems["ngram"]}, QUESTIONS[1:2], **SIZES | {"max_new_tokens": 90})
    entry = row(result, "ngram", 2)
    assert entry["equals_plain"]["identical"] == 1
    assert entry["repeated_4gram_share"] > 0.2
    assert entry["acceptance"]["acceptance_length"] > 1.2
    assert entry["acceptance"]["joint"][0] >= entry["acceptance"]["joint"][1] > 0.0


def test_tables_by_kind_add_up(result: dict[str, Any]) -> None:
    entry = row(result, "table", 2)
    assert set(entry["by_kind"]) == {"chat", "code"}
    for field in ("num_tokens", "num_answers"):
        assert sum(part[field] for part in entry["by_kind"].values()) == entry[field]
    steps = [part["acceptance"]["num_steps"] for part in entry["by_kind"].values()]
    assert sum(steps) == entry["acceptance"]["num_steps"]


def test_case_e7_second_turn_includes_the_first_answer(
    chat_target: Any, systems: dict[str, Any], result: dict[str, Any]
) -> None:
    assert result["counts"] == {"conversations": 3, "turns": 4, "asked_turns": 4, "failed_turns": 0}
    first = next(r for r in result["answers"] if r["question_id"] == "a" and r["model_id"] == "plain-L0-T0")
    assert len(first["choices"][0]["turns"]) == 2

    asked: list[list[dict[str, str]]] = []

    def record(tokenizer: Any, template: Any, messages: list[dict[str, str]]) -> list[int]:
        asked.append(messages)
        return encode_prompt(tokenizer, template, messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_lib, "encode_prompt", record)
        run_benchmark(chat_target, {}, QUESTIONS[:1], **SIZES)
    messages = [
        {"role": "user", "content": "hello world"},
        {"role": "assistant", "content": first["choices"][0]["turns"][0]},
        {"role": "user", "content": "and the other one?"},
    ]
    assert asked == [messages[:1], messages]


def test_case_e9_result_carries_configuration_and_weight_digest_of_what_ran(
    chat_target: Any, systems: dict[str, Any], result: dict[str, Any]
) -> None:
    assert result["target"]["digest"] == chat_target.digest
    assert result["target"]["config"]["num_layers"] == 1
    assert result["systems"]["table"]["drafter"]["class"] == "TabularDrafter"
    digest = result["systems"]["table"]["digest"]
    drafter, params = systems["table"]
    other = jax.tree.map(lambda leaf: leaf.at[0, 0].add(jnp.float32(1e-3)), params)
    changed = run_benchmark(chat_target, {"table": (drafter, other)}, QUESTIONS[2:], **SIZES)
    assert len(digest) == 64
    assert changed["systems"]["table"]["digest"] != digest
    assert result["versions"]["jax"] == jax.__version__


def test_case_e6_template_is_recorded_and_a_mismatch_with_training_warns(
    chat_target: Any, systems: dict[str, Any], result: dict[str, Any]
) -> None:
    own = chat_target.chat_template.digest
    assert result["target"]["template_digest"] == own
    assert result["warnings"] == []
    other = ChatTemplate("{{ messages[0]['content'] }}").digest
    arguments = SIZES | {"max_new_tokens": 2}
    same = run_benchmark(
        chat_target, {"table": systems["table"]}, QUESTIONS[2:], training_templates={"table": own}, **arguments
    )
    assert same["warnings"] == []
    wrong = run_benchmark(
        chat_target, {"table": systems["table"]}, QUESTIONS[2:], training_templates={"table": other}, **arguments
    )
    assert len(wrong["warnings"]) == 1
    assert "table was trained with another chat template" in wrong["warnings"][0]


def test_case_e4_failed_and_empty_answers_are_counted_and_never_negative(
    chat_target: Any, systems: dict[str, Any]
) -> None:
    questions = [Question("long", "chat", ("hello " * 400, "more?")), Question("short", "chat", ("hello",))]
    result = run_benchmark(
        chat_target,
        {"table": systems["table"]},
        questions,
        **SIZES,
    )
    assert result["counts"] == {"conversations": 2, "turns": 3, "asked_turns": 2, "failed_turns": 1}
    entry = row(result, "table", 2)
    assert (entry["num_failed"], entry["num_answers"]) == (1, 1)
    assert entry["num_tokens"] > 0
    long = next(r for r in result["answers"] if r["question_id"] == "long" and r["model_id"] == "table-L2-T0")
    assert long["choices"][0]["new_tokens"] == [0]
    assert long["choices"][0]["decoding_steps"] == [0]


def test_case_e4_new_tokens_are_the_engine_s_own_and_not_counted_again_from_text(
    chat_target: Any, result: dict[str, Any]
) -> None:
    plain = [r for r in result["answers"] if r["model_id"] == "plain-L0-T0"]
    written = sum(sum(r["choices"][0]["new_tokens"]) for r in plain)
    assert written == row(result, "plain", 0)["num_tokens"]
    for answer in plain:
        assert sum(answer["choices"][0]["accept_lengths"]) == sum(answer["choices"][0]["new_tokens"])


def test_sampled_answers_are_not_compared_with_plain_ones(chat_target: Any, systems: dict[str, Any]) -> None:
    result = run_benchmark(
        chat_target,
        {"table": systems["table"]},
        QUESTIONS[1:],
        temperature=(0.0, 1.0),
        num_slots=2,
        **SIZES,
    )
    assert [r["temperature"] for r in result["results"]] == [0.0, 0.0, 1.0, 1.0]
    assert result["results"][1]["equals_plain"] is not None
    assert result["results"][3]["equals_plain"] is None
    assert result["results"][3]["speed_up"]["value"] > 0


def test_divergence_is_reported_with_the_gap(chat_target: Any, systems: dict[str, Any]) -> None:
    # Another target behind the speculative engine: its greedy text must differ.
    params = dict(chat_target.params)
    params["lm_head"] = params["lm_head"][:, ::-1]
    wrong = dataclasses.replace(chat_target, params=params)
    real = benchmark_lib.Engine

    def engine(target: Any, drafter: Any = None, drafter_params: Any = None, **sizes: Any) -> Any:
        return real(wrong if drafter is not None else target, drafter, drafter_params, **sizes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_lib, "Engine", engine)
        result = run_benchmark(chat_target, {"table": systems["table"]}, QUESTIONS[1:2], **SIZES)
    equality = row(result, "table", 2)["equals_plain"]
    assert equality["identical"] == 0
    (divergence,) = equality["divergences"]
    assert divergence["position"] == 0
    assert divergence["plain_token"] == divergence["top_tokens"][0]
    assert divergence["gap"] > 0


def test_files_are_json_and_spec_bench_rows(result: dict[str, Any], tmp_path: pathlib.Path) -> None:
    path = write_benchmark(result, tmp_path / "eval")
    assert json.loads(path.read_text())["kind"] == "benchmark"
    rows = [json.loads(line) for line in (tmp_path / "eval" / "benchmark.jsonl").read_text().splitlines()]
    assert len(rows) == 3 * 3
    assert set(rows[0]) == {"question_id", "category", "model_id", "choices"}
    choice = rows[0]["choices"][0]
    assert {"index", "turns", "decoding_steps", "new_tokens", "wall_time", "accept_lengths"} <= set(choice)
    assert len(choice["turns"]) == len(choice["new_tokens"]) == len(choice["wall_time"]) == 2
    samples = json.loads((tmp_path / "eval" / "samples.json").read_text())
    assert {sample["category"] for sample in samples} == {"chat", "code"}
    assert all(sample["system"] == "table" for sample in samples)


def test_slots_are_the_same_for_plain_and_speculative(chat_target: Any, systems: dict[str, Any]) -> None:
    sizes: list[int] = []
    real = benchmark_lib.Engine

    def engine(*args: Any, num_slots: int, **fields: Any) -> Any:
        sizes.append(num_slots)
        return real(*args, num_slots=num_slots, **fields)

    def stop(*args: Any, num_slots: int, **fields: Any) -> Any:
        sizes.append(num_slots)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmark_lib, "Engine", engine)
        patch.setattr(benchmark_lib, "measure", stop)
        with pytest.raises(KeyboardInterrupt):
            run_benchmark(chat_target, systems, QUESTIONS[:2], num_slots=2, **SIZES)
    assert sizes == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_lengths": (0, 1)}, "`draft_lengths` must be at least 1"),
        ({"temperature": -1.0}, "`temperature` must be at least 0"),
        ({"num_slots": 0}, "`num_slots` must be at least 1"),
        ({"repeats": 0}, "`repeats` must be at least 1"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1"),
    ],
)
def test_faulty_settings_are_named(
    chat_target: Any, systems: dict[str, Any], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_benchmark(chat_target, systems, QUESTIONS, **arguments)


def test_faulty_systems_and_targets_are_named(chat_target: Any, systems: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must not use the name 'plain'"):
        run_benchmark(chat_target, {"plain": systems["ngram"]}, QUESTIONS)
    with pytest.raises(ValueError, match="has no chat template"):
        run_benchmark(dataclasses.replace(chat_target, chat_template=None), systems, QUESTIONS)
    with pytest.raises(ValueError, match="at least one conversation"):
        run_benchmark(chat_target, systems, [])
