"""A comparison of rules on a tiny model: complete, resumable, compiled once for each K and L."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import pytest

from eval import matrix_command, verifier_matrix
from eval.loading import LoadedSystem
from eval.matrix_command import MatrixOptions
from eval.matrix_plan import AUTOREGRESSIVE, make_plan
from eval.matrix_runner import MatrixSettings
from eval.questions import Question
from eval.verifier_matrix import run_matrix, write_matrix
from specjax.drafters.ngram import NgramDrafter
from specjax.testing.tiny_models import TabularDrafter

RULES = ("token", "greedy_block", "spectr_gbv")
SIZES: dict[str, Any] = {"num_drafts": (1, 2), "draft_lengths": (2,), "temperatures": (0.0, 1.0)}
SETTINGS = MatrixSettings(num_slots=2, max_new_tokens=10)
QUESTIONS = [
    Question("a", "chat", ("hello world", "never asked")),
    Question("b", "chat", ("the user and the world",)),
    Question("c", "code", ("1 and 2 and 1 and",)),
    Question(4, "code", ("another world of the user and one more",)),
]


@pytest.fixture(scope="module")
def system(chat_target: Any) -> tuple[str, Any, Any]:
    drafter = TabularDrafter(chat_target.config.vocab_size)
    return "table", drafter, drafter.init_params(jax.random.key(3))


@pytest.fixture(scope="module")
def plan(system: tuple[str, Any, Any]) -> Any:
    return make_plan(system[0], system[1], RULES, **SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("matrix")


@pytest.fixture(scope="module")
def result(chat_target: Any, system: Any, plan: Any, folder: pathlib.Path) -> dict[str, Any]:
    return run_matrix(chat_target, system, QUESTIONS, plan, SETTINGS, folder)


def answers_of(folder: pathlib.Path) -> dict[str, dict[Any, Any]]:
    answers: dict[str, dict[Any, Any]] = {}
    for line in (folder / "verifier_matrix.jsonl").read_text("utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "answer":
            answers.setdefault(row["model_id"], {})[row["question_id"]] = row["choices"][0]
    return answers


def test_every_configuration_is_measured(result: dict[str, Any], folder: pathlib.Path) -> None:
    measured = [(r["verifier"], r["num_drafts"], r["temperature"]) for r in result["configurations"]]
    assert measured == [
        *((AUTOREGRESSIVE, 1, t) for t in (0.0, 1.0)),
        *((rule, 1, t) for rule in RULES for t in (0.0, 1.0)),
        *(("spectr_gbv", 2, t) for t in (0.0, 1.0)),
    ]
    answers = answers_of(folder)
    for row in result["configurations"]:
        own = answers[row["model_id"]]
        assert set(own) == {"a", "b", "c", 4}
        assert all(len(answer["turns"]) == 1 for answer in own.values())
        tokens = sum(sum(answer["accept_lengths"]) for answer in own.values())
        calls = sum(len(answer["accept_lengths"]) for answer in own.values())
        assert row["num_tokens"] == tokens
        assert row["block_efficiency"]["value"] == pytest.approx(tokens / calls)
        gain = row["plain_seconds_per_call"] / row["seconds_per_call"]
        assert row["speed_up"]["value"] == pytest.approx(gain * tokens / calls)
    assert result["configurations"][0]["block_efficiency"]["value"] == 1.0


def test_greedy_answers_are_those_of_plain_decoding(result: dict[str, Any], folder: pathlib.Path) -> None:
    answers = answers_of(folder)
    plain = {name: answer["turns"] for name, answer in answers["autoregressive-T0"].items()}
    for row in result["configurations"]:
        if row["temperature"] == 0:
            assert {name: answer["turns"] for name, answer in answers[row["model_id"]].items()} == plain


def test_equal_sizes_compile_once_and_never_under_the_clock(result: dict[str, Any]) -> None:
    rows = result["configurations"]
    assert [row["label"] for row in rows if row["seconds"]["compile"]] == [
        "autoregressive",
        "token K=1 L=2",
        "spectr_gbv K=2 L=2",
    ]
    assert {row["num_compilations"] for row in rows} == {0}
    assert all(row["seconds"]["all"] >= row["seconds"]["decode"] > 0 for row in rows)


def test_order_is_judged_over_all_and_each_temperature(result: dict[str, Any]) -> None:
    judged = {(c["first"], c["relation"], c["second"], c["temperature"]) for c in result["comparisons"]}
    for temperature in (0.0, 1.0, None):
        assert ("greedy_block K=1 L=2", "=", "spectr_gbv K=1 L=2", temperature) in judged
    assert result["order"]["num_contradicted"] == 0
    assert 0 < result["order"]["num_judged"] < len(result["comparisons"])
    # At temperature 0 the two are the same rule.
    (same,) = [c for c in result["comparisons"] if c["relation"] == "=" and c["temperature"] == 0]
    assert same["difference"] == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_a_finished_comparison_is_not_repeated(
    chat_target: Any, system: Any, plan: Any, folder: pathlib.Path, result: dict[str, Any]
) -> None:
    known: list[bool] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verifier_matrix, "MatrixRunner", None)
        again = run_matrix(
            chat_target, system, QUESTIONS, plan, SETTINGS, folder, on_row=lambda row, is_known: known.append(is_known)
        )
    assert all(known)
    assert len(known) == len(plan.configurations)
    for field in ("configurations", "comparisons", "order", "settings"):
        assert again[field] == result[field]


def test_an_interrupted_comparison_goes_on_to_the_same_numbers(
    chat_target: Any, system: Any, plan: Any, result: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    def stop(row: Any, is_known: bool) -> None:
        if row["verifier"] == "greedy_block":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_matrix(chat_target, system, QUESTIONS, plan, SETTINGS, tmp_path, on_row=stop)
    log = tmp_path / "verifier_matrix.jsonl"
    log.write_bytes(log.read_bytes() + b'{"kind": "ans')
    known: list[bool] = []
    whole = run_matrix(
        chat_target, system, QUESTIONS, plan, SETTINGS, tmp_path, on_row=lambda row, is_known: known.append(is_known)
    )
    assert known == [True] * 5 + [False] * 5
    for mine, theirs in zip(whole["configurations"], result["configurations"], strict=True):
        assert mine["block_efficiency"] == theirs["block_efficiency"]
        assert mine["acceptance"] == theirs["acceptance"]


def test_other_settings_are_measured_anew(
    chat_target: Any, system: Any, result: dict[str, Any], folder: pathlib.Path
) -> None:
    plan = make_plan(system[0], system[1], ("token",), (1,), (2,), (1.0,))
    known: list[bool] = []
    settings = MatrixSettings(num_slots=2, max_new_tokens=10, seed=5)
    before = (folder / "verifier_matrix.jsonl").read_bytes()
    run_matrix(
        chat_target, system, QUESTIONS, plan, settings, folder, on_row=lambda row, is_known: known.append(is_known)
    )
    assert known == [False, False]
    assert (folder / "verifier_matrix.jsonl").read_bytes().startswith(before)


def test_page_stands_alone(result: dict[str, Any], tmp_path: pathlib.Path) -> None:
    log, summary, page = write_matrix(result | {"skipped": ["<all> of it"]}, tmp_path)
    assert log.name == "verifier_matrix.jsonl"
    assert json.loads(summary.read_text())["kind"] == "verifier_matrix"
    text = page.read_text("utf-8")
    # Two figures for each temperature and length.
    assert text.count("<svg") == 2 * 2
    assert "Skipped: &lt;all&gt; of it." in text
    assert "spectr_gbv K=2" in text
    assert not any(word in text for word in ("<script", "src=", "href=", "@import"))


def options_in(folder: pathlib.Path) -> MatrixOptions:
    return MatrixOptions(RULES, (1, 2), (2,), (0.0, 1.0), SETTINGS, folder)


def test_command_prints_and_fails_where_the_order_is_contradicted(
    chat_target: Any, system: Any, result: dict[str, Any], folder: pathlib.Path, capsys: Any
) -> None:
    systems = {"table": LoadedSystem(*system), "ngram": LoadedSystem("ngram", NgramDrafter(9), None)}
    assert matrix_command.run(options_in(folder), QUESTIONS, chat_target, systems) == 0
    out, error = capsys.readouterr()
    assert error == ""
    assert out.count("measured before") == 10
    assert "none of" in out.splitlines()[-1]
    assert (folder / "verifier_matrix.html").is_file()

    contradicted = result | {"order": result["order"] | {"num_contradicted": 2}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matrix_command, "run_matrix", lambda *_, **__: contradicted)
        assert matrix_command.run(options_in(folder), QUESTIONS, chat_target, systems) == 1
    _, error = capsys.readouterr()
    assert error.startswith("error: 2 of ")
    assert error.count("\n") == 1


def test_exactly_one_drafter_is_compared(chat_target: Any, system: Any, tmp_path: pathlib.Path) -> None:
    table, other = LoadedSystem(*system), LoadedSystem("other", *system[1:])
    for systems, names in (({}, "none"), ({"table": table, "other": other}, "table, other")):
        with pytest.raises(ValueError, match=f"`--verifiers` compares rules on one drafter .*; got {names}"):
            matrix_command.run(options_in(tmp_path), QUESTIONS, chat_target, systems)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_slots": 0}, "`num_slots` must be at least 1; got 0"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be at least 1; got 0"),
        ({"top_k": -1}, "`top_k` must be at least 0"),
    ],
)
def test_faulty_settings_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MatrixSettings(**fields)
