"""The acceptance-cost plane: statistics of its points, geometry of its lines, and a whole one on a tiny model."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval import plane_runner
from eval.dissection import StepParts
from eval.heads_directory import HeadsDirectory
from eval.loading import LoadedSystem
from eval.plane_chart import iso_speed_up, levels, plane_svg
from eval.plane_heads import FULL, PlaneHead, load_heads
from eval.plane_results import (
    PlaneInputs,
    best_of_kinds,
    group_sums,
    make_points,
    rho_tau_interval,
    summarise_ceiling,
    summarise_head,
)
from eval.plane_runner import PlaneSettings, measure_plane
from eval.plane_tables import print_plane
from eval.provenance import describe_target
from eval.questions import Question
from specjax import cost
from specjax.checkpoints.eagle import export_drafter
from specjax.checkpoints.target import Target
from specjax.decoding import LawParams
from specjax.drafters.base import empty_proposal
from specjax.drafters.eagle3 import Eagle3Config
from specjax.drafters.eagle3_init import init_drafter
from specjax.heads import get_head
from specjax.text.chat_template import encode_prompt

LENGTH = 2
KINDS = {
    "full": {},
    "vocab_trim": {"head_options": {"rows": 20}},
    "spec_vocab": {"rank": 2, "head_options": {"candidates": 8}},
}
QUESTIONS = [
    Question("a", "chat", ("hello world", "never asked")),
    Question("b", "chat", ("the user and the world",)),
    Question("c", "code", ("1 and 2 and 1 and",)),
]
SETTINGS = PlaneSettings(draft_lengths=(LENGTH,), batches=(1,), max_new_tokens=8, num_steps=2)


def fake_head(name: str, seed: int = 0) -> PlaneHead:
    return PlaneHead(
        name, seed, "trained", None, LoadedSystem(name, None, None), f"{name}{seed}".encode().hex().ljust(8, "0")
    )


def decoding_row(
    head: PlaneHead,
    group: int,
    committed: int,
    calls: int,
    *,
    seconds: float = 1.0,
    plain_seconds: float = 2.0,
    category: str = "chat",
) -> dict[str, Any]:
    return {
        "model_id": f"decoding-{head.mark}-L{LENGTH}-T0-g{group}",
        "group": group,
        "category": category,
        "questions": [
            {
                "question_id": f"q{group}",
                "num_committed": committed,
                "num_calls": calls,
                "accepted_at": [1],
                "tried_at": [2],
            }
        ],
        "num_equal": 1,
        "num_tokens": committed,
        "decode_seconds": seconds,
        "plain_num_tokens": committed,
        "plain_decode_seconds": plain_seconds,
    }


def cost_row(head: PlaneHead, *, nu: float, full_seconds: float = 1.0, rest: float = 4.0) -> dict[str, Any]:
    heads, own = LENGTH * full_seconds, nu * full_seconds
    return {
        "model_id": f"cost-{head.mark}-B1-L{LENGTH}",
        "batch": 1,
        "draft_length": LENGTH,
        "seconds": own,
        "nu": nu,
        "kappa": heads / rest,
        "plain_seconds": 3.0,
        "step_seconds": rest + LENGTH * own,
        "head_share_of_drafting": 0.5,
    }


def inputs_of(heads: Sequence[PlaneHead], rows: Sequence[dict[str, Any]], num_groups: int) -> PlaneInputs:
    by_name = {row["model_id"]: row for row in rows}
    return PlaneInputs(heads, by_name, (LENGTH,), (0.0,), (1,), 1, num_groups)


def test_rho_tau_pairs_prompts() -> None:
    """A head that keeps nine tenths of every prompt's length has no uncertainty, however unlike the prompts are."""
    full, slim = fake_head(FULL), fake_head("low_rank")
    lengths = [(20, 10), (400, 100), (90, 30), (1000, 200)]
    rows = [decoding_row(full, group, *counts) for group, counts in enumerate(lengths)]
    rows += [decoding_row(slim, g, 9 * committed, 10 * calls) for g, (committed, calls) in enumerate(lengths)]
    summary = summarise_head(inputs_of([full, slim], rows, 4), "low_rank", LENGTH, 0.0)
    assert summary["rho_tau"] == pytest.approx({"value": 0.9, "low": 0.9, "high": 0.9})
    assert summary["tau"]["value"] == pytest.approx(0.9 * 1510 / 340)
    assert summary["tau"]["high"] - summary["tau"]["low"] > 1.0
    assert summary["first_acceptance"] == 0.5
    assert summary["num_equal_to_plain"] == 4


def test_rho_tau_intervals_cover_the_true_ratio() -> None:
    """Nominal 95 %; over 200 draws of 40 prompts 164 or fewer covered would be a false alarm of less than 1e-6."""
    # A fixed seed: the assertion is about these 200 data sets, and any other seed has the same odds.
    rng = np.random.default_rng(20)
    full, slim = fake_head(FULL), fake_head("low_rank")
    covered = 0
    for _ in range(200):
        own, theirs = [], []
        for group in range(40):
            ease, calls = rng.uniform(0.2, 0.9), int(rng.integers(20, 60))
            theirs.append(decoding_row(full, group, calls + int(rng.binomial(calls, ease)), calls))
            own.append(decoding_row(slim, group, calls + int(rng.binomial(calls, 0.8 * ease)), calls))
        interval = rho_tau_interval({0: own}, {0: theirs}, num_resamples=500)
        covered += interval.low <= (1 + 0.8 * 0.55) / (1 + 0.55) <= interval.high
    assert covered > 164


def test_seeds_are_added_up_within_a_prompt_and_listed_beside() -> None:
    heads = [fake_head(name, seed) for seed in (0, 1) for name in (FULL, "low_rank")]
    committed = {(FULL, 0): 20, (FULL, 1): 30, ("low_rank", 0): 18, ("low_rank", 1): 30}
    rows = [decoding_row(h, group, committed[h.name, h.seed], 10) for h in heads for group in range(3)]
    summary = summarise_head(inputs_of(heads, rows, 3), "low_rank", LENGTH, 0.0)
    assert summary["seeds"] == [0, 1]
    assert summary["rho_tau"]["value"] == pytest.approx(48 / 50)
    assert summary["rho_tau_by_seed"] == pytest.approx({"0": 0.9, "1": 1.0})


def test_prompts_that_one_of_the_two_failed_to_answer_count_for_neither() -> None:
    full, slim = fake_head(FULL), fake_head("low_rank")
    rows = [decoding_row(full, group, 20, 10) for group in range(2)]
    rows += [decoding_row(slim, 0, 10, 10), {**decoding_row(slim, 1, 1, 1), "questions": []}]
    summary = summarise_head(inputs_of([full, slim], rows, 2), "low_rank", LENGTH, 0.0)
    assert summary["num_prompts"] == 1
    assert summary["rho_tau"]["value"] == pytest.approx(0.5)


def test_a_head_measured_on_a_slower_day_is_compared_by_plain_decoding() -> None:
    full, slim = fake_head(FULL), fake_head("low_rank")
    rows = [decoding_row(full, group, 20, 10, seconds=1.0, plain_seconds=2.0) for group in range(2)]
    # Everything takes three times as long, and the head is a quarter faster than the full one.
    rows += [decoding_row(slim, group, 20, 10, seconds=2.4, plain_seconds=6.0) for group in range(2)]
    inputs = inputs_of([full, slim], rows, 2)
    sums = group_sums({0: inputs.decoding(slim, LENGTH, 0.0)}, {0: inputs.decoding(full, LENGTH, 0.0)})
    assert sums["scaled_seconds"] == pytest.approx([0.8, 0.8])
    summary = summarise_head(inputs, "low_rank", LENGTH, 0.0)
    assert summary["measured_gain"]["value"] == pytest.approx(1.25)
    assert summary["measured_speed_up"]["value"] == pytest.approx(2.5)


def test_points_follow_the_cost_law() -> None:
    full, slim = fake_head(FULL), fake_head("low_rank")
    rows = [decoding_row(full, 0, 20, 10, category="chat"), decoding_row(full, 1, 30, 10, category="code")]
    rows += [decoding_row(slim, 0, 18, 10, category="chat"), decoding_row(slim, 1, 27, 10, category="code")]
    rows += [cost_row(full, nu=1.0), cost_row(slim, nu=0.25)]
    points = {point["head"]: point for point in make_points(inputs_of([full, slim], rows, 2))}
    slim_point = points["low_rank"]
    assert slim_point["predicted_gain"] == pytest.approx(0.9 * 1.5 / 1.125)
    assert slim_point["break_even_rho_tau"] == pytest.approx(1.125 / 1.5)
    assert slim_point["predicted_speed_up"] == pytest.approx(2.25 * 3.0 / 4.5)
    # Both views of one step agree: the gain over full is the ratio of the speed-ups over plain.
    assert slim_point["predicted_speed_up"] / points[FULL]["predicted_speed_up"] == pytest.approx(
        slim_point["predicted_gain"]
    )
    assert points[FULL]["predicted_gain"] == pytest.approx(1.0)
    assert points[FULL]["rho_tau"] == pytest.approx({"value": 1.0, "low": 1.0, "high": 1.0})
    assert slim_point["by_kind"]["code"]["tau"]["value"] == pytest.approx(2.7)
    best = best_of_kinds(list(points.values()), {FULL: "full", "low_rank": "low_rank"})
    assert [point["kind"] for point in best] == ["full", "low_rank"]


def test_lines_of_equal_speed_pass_where_the_cost_law_says() -> None:
    for kappa in (0.1, 0.25, 2.0):
        assert iso_speed_up(1.0, kappa, [1.0]) == [(1.0, pytest.approx(1.0))]
        for level in (0.8, 1.0, 1.15):
            for nu, rho in iso_speed_up(level, kappa, [0.0, 0.21, 0.5, 1.0]):
                assert cost.rho_tps(rho_tau=rho, nu=nu, kappa=kappa) == pytest.approx(level)
        # A head that costs nothing and keeps everything gains 1 + kappa, and none can gain more at rho_tau = 1.
        assert iso_speed_up(1.0 + kappa, kappa, [0.0]) == [(0.0, pytest.approx(1.0))]
        shown = levels(kappa, (0.0, 1.05), (0.85, 1.05))
        assert 1.0 not in shown
        for level in shown:
            (_, left), (_, right) = iso_speed_up(level, kappa, [0.0, 1.05])
            assert left < 1.05
            assert right > 0.85


def test_ceilings_are_ratios_of_sums_with_kinds_apart() -> None:
    rows = [{"question_id": name, "mass": mass, "num_positions": n} for name, mass, n in (("a", 3.0, 4), ("b", 4.0, 6))]
    rows.append({"question_id": "c", "mass": 0.0, "num_positions": 0})
    ceiling = summarise_ceiling(rows, {"a": "chat", "b": "code", "c": "code"})
    assert ceiling["value"] == pytest.approx(0.7)
    assert ceiling["by_kind"]["code"]["value"] == pytest.approx(4 / 6)


def synthetic_result() -> dict[str, Any]:
    """What a plane of two heads looks like, without measuring anything."""
    full, slim = fake_head(FULL), fake_head("low_rank")
    rows = [
        decoding_row(h, g, c, 10, category=k) for h, c in ((full, 20), (slim, 18)) for g, k in enumerate(("x", "y"))
    ]
    rows += [cost_row(full, nu=1.0), cost_row(slim, nu=0.25)]
    points = make_points(inputs_of([full, slim], rows, 2))
    ceiling = summarise_ceiling([{"question_id": 1, "mass": 3.0, "num_positions": 4}], {1: "x"})
    return {
        "target": {"name": "tiny"},
        "settings": {"draft_lengths": [LENGTH], "temperatures": [0.0], "batches": [1]},
        "heads": [{"name": name, "kind": name, "byte_ratio": 0.5} for name in (FULL, "low_rank")],
        "cycles": [cost_row(full, nu=1.0)],
        "points": [{**point, "ceiling": ceiling if point["head"] == "low_rank" else None} for point in points],
        "best": best_of_kinds(points, {FULL: FULL, "low_rank": "low_rank"}),
    }


def test_the_picture_is_the_same_for_the_same_result_and_names_all_heads() -> None:
    result = synthetic_result()
    picture = plane_svg(result)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    for name in (FULL, "low_rank", "break-even"):
        assert f">{name}<" in picture
    assert plane_svg(result) == picture


def test_a_head_without_figures_is_left_out_of_the_picture_and_a_dash_in_the_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = synthetic_result()
    for point in result["points"]:
        point |= {"nu": None, "kappa": None, "predicted_gain": None, "break_even_rho_tau": None}
    assert "break-even" not in plane_svg(result)
    print_plane(result)
    assert "      -" in capsys.readouterr().out


def test_the_table_shows_heads_kinds_and_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    print_plane(synthetic_result())
    shown = capsys.readouterr().out
    for words in ("kappa 0.500", "[0.900, 0.900]", "0.750", "rho_tau by kind of prompt", "over plain"):
        assert words in shown


def test_the_table_lists_seeds_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    print_plane(synthetic_result())
    assert "by seed" not in capsys.readouterr().out
    result = synthetic_result()
    for point in result["points"]:
        point["rho_tau_by_seed"] = {"0": 0.875, "4294967295": None} if point["head"] == "low_rank" else {"0": 1.0}
    print_plane(result)
    _, shown = capsys.readouterr().out.split("rho_tau by seed of training")
    header, row, *_ = shown.splitlines()[1:]
    assert header.split() == ["head", "T", "L", "seed", "0", "seed", "4294967295"]
    assert row.split() == ["low_rank", "0", "2", "0.875", "-"]


def test_directories_that_are_none_are_one_line(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run directory at"):
        HeadsDirectory.open(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"holds no heads\.json"):
        HeadsDirectory.open(tmp_path)
    (tmp_path / "heads.json").write_text('{"schema": 7}')
    with pytest.raises(ValueError, match="`schema` must be 1; got 7"):
        HeadsDirectory.open(tmp_path)


@pytest.fixture(scope="module")
def directory(chat_target: Target, run_directory: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What `train.heads` leaves behind, without any training."""
    folder = tmp_path_factory.mktemp("heads")
    entries = []
    base = Eagle3Config.for_target(chat_target.config, head_kind="full")
    key = jax.random.key(1)
    backbone = init_drafter(key, base, chat_target.params, chat_target.config, head_init="random", warm_start=False)
    for kind, fields in KINDS.items():
        config = Eagle3Config.for_target(chat_target.config, head_kind=kind, **fields)
        head = backbone["head"] if kind == "full" else get_head(kind).init(key, config.head)
        export_drafter(folder / kind / "export", config, {**backbone, "head": head}, describe_target(chat_target), {})
        (folder / kind / "flags.txt").write_text(f"--head={kind}\n")
        made = {"made": "derived", "base": "full"} if kind == "vocab_trim" else {"made": "trained", "base": None}
        entries.append({"name": kind, "kind": kind, "seed": 0, "folder": kind, **made})
    record = {"schema": 1, "target": str(run_directory / "model"), "target_dtype": "float32", "started": "2026-01-01"}
    (folder / "heads.json").write_text(json.dumps({**record, "heads": entries}))
    return HeadsDirectory.open(folder)


@pytest.fixture(scope="module")
def heads(directory: HeadsDirectory, chat_target: Target) -> list[PlaneHead]:
    return load_heads(directory, chat_target)


@pytest.fixture(scope="module")
def result(chat_target: Target, heads: list[PlaneHead], directory: HeadsDirectory) -> dict[str, Any]:
    """Measured in two goes: first without the last head."""
    measure_plane(chat_target, heads[:-1], QUESTIONS, SETTINGS, directory.results)
    lines: list[str] = []
    plane = measure_plane(chat_target, heads, QUESTIONS, SETTINGS, directory.results, on_line=lines.append)
    # Costs compare within one run alone, so the heads that were there are timed again.
    assert lines[0].startswith("[costs, 1 row(s)] 3 heads measured in one run")
    return plane


@pytest.mark.slow
def test_every_head_has_a_point(result: dict[str, Any], chat_target: Target) -> None:
    points = {point["head"]: point for point in result["points"]}
    assert list(points) == list(KINDS)
    for point in points.values():
        # Greedy drafts change nothing about the text, so the heads differ in steps alone.
        assert point["num_equal_to_plain"] == point["num_answers"] == len(QUESTIONS)
        assert point["tau"]["value"] >= 1.0
        assert set(point["by_kind"]) == {"chat", "code"}
        assert point["measured_speed_up"]["value"] > 0
    assert points["full"]["nu"] in (1.0, None)
    assert {head["name"]: head["support"] for head in result["heads"]} == {
        "full": None,
        "vocab_trim": "fixed",
        "spec_vocab": "by state",
    }
    assert points["full"]["ceiling"] is None
    for name in ("vocab_trim", "spec_vocab"):
        assert 0.0 <= points[name]["ceiling"]["value"] <= 1.0
        assert points[name]["first_acceptance"] <= points[name]["ceiling"]["value"] + 1e-6 or name == "spec_vocab"


@pytest.mark.slow
def test_the_fixed_ceiling_is_the_share_of_plain_tokens_inside(
    result: dict[str, Any], heads: list[PlaneHead], directory: HeadsDirectory
) -> None:
    log = [json.loads(line) for line in (directory.results / "plane.jsonl").read_text().splitlines()]
    plain = {row["model_id"]: row for row in log if row.get("mark") == "plain"}
    tokens = [token for row in plain.values() for answer in row["token_ids"] for token in answer]
    trimmed = next(head for head in heads if head.name == "vocab_trim")
    kept = set(np.asarray(get_head("vocab_trim").support(trimmed.system.params["head"])).tolist())
    (point,) = [point for point in result["points"] if point["head"] == "vocab_trim"]
    assert point["ceiling"]["value"] == pytest.approx(sum(token in kept for token in tokens) / len(tokens))


@pytest.mark.slow
def test_the_ceiling_by_state_is_that_of_drafting_step_by_step(
    result: dict[str, Any], chat_target: Target, heads: list[PlaneHead], directory: HeadsDirectory
) -> None:
    log = [json.loads(line) for line in (directory.results / "plane.jsonl").read_text().splitlines()]
    answers = {
        asked["question_id"]: answer
        for row in log
        if row.get("mark") == "plain"
        for asked, answer in zip(row["questions"], row["token_ids"], strict=True)
    }
    preview = next(head for head in heads if head.name == "spec_vocab")
    (row,) = [row for row in log if row.get("part") == "ceiling" and row["head"] == "spec_vocab"]
    for asked in row["questions"]:
        (question,) = [question for question in QUESTIONS if question.id == asked["question_id"]]
        messages = [{"role": "user", "content": question.turns[0]}]
        prompt = encode_prompt(chat_target.tokenizer, chat_target.chat_template, messages)
        answer = answers[question.id]
        assert asked["num_positions"] == len(answer)
        assert asked["mass"] == num_draftable(chat_target, preview, prompt, answer)


def num_draftable(target: Target, head: PlaneHead, prompt: Sequence[int], answer: Sequence[int]) -> int:
    """Tokens of a greedy answer that a head could have drafted, by a decoding run in which nothing is accepted."""
    drafter, params = head.pair
    parts = StepParts(target.config, drafter, 1)
    state = parts.start(target.params, params, prompt, 1, len(prompt) + 2 * len(answer))
    open_laws = dataclasses.replace(LawParams.greedy(1), temperature=jnp.ones(1, jnp.float32))
    drafter_state, cache, last, length, found = state.drafter_state, state.cache, state.last_token, state.length, 0
    for token in answer:
        proposal, drafter_state = parts.propose(params, drafter_state, state.rng_keys, last, open_laws)
        found += bool(np.isfinite(proposal.draft_log_laws[0, 0, token]))
        logits, features, cache = parts.verify_forward(target.params, cache, proposal.tokens, length)
        plain = empty_proposal(last, parts.tree, target.config.vocab_size)
        committed, count, last, length = parts.decide(state.rng_keys, plain, logits, LawParams.greedy(1), length)
        assert int(last[0]) == token
        drafter_state = parts.extend(params, drafter_state, committed, features, count)
    return found


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_steps": 0}, "`num_steps` must be at least 1; got 0"),
        ({"seed": -1}, r"`seed` must be in \[0, 2\*\*32\); got -1"),
        ({"seed": 2**32}, r"`seed` must be in \[0, 2\*\*32\); got 4294967296"),
    ],
)
def test_impossible_settings_are_named(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PlaneSettings(**settings)


def test_costs_count_as_one_run_only_if_all_heads_were_in_it() -> None:
    assert plane_runner._is_one_run([{"run": "a"}, {"run": "a"}])
    for rows in ([{"run": "a"}, None], [{"run": "a"}, {"run": "b"}], [{}, {}], [None]):
        assert not plane_runner._is_one_run(rows)


@pytest.mark.slow
def test_a_finished_plane_is_not_measured_again(
    result: dict[str, Any], chat_target: Target, heads: list[PlaneHead], directory: HeadsDirectory
) -> None:
    before = (directory.results / "plane.jsonl").read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plane_runner, "measure_costs", None)
        patch.setattr(plane_runner.PlaneDecoding, "run_group", None)
        patch.setattr(plane_runner, "Ceilings", None)
        again = measure_plane(chat_target, heads, QUESTIONS, SETTINGS, directory.results)
    assert (directory.results / "plane.jsonl").read_bytes() == before
    for field in ("points", "cycles", "heads", "best", "settings"):
        assert again[field] == result[field]


@pytest.mark.slow
def test_other_settings_and_other_weights_are_measured_apart(heads: list[PlaneHead]) -> None:
    assert dataclasses.replace(heads[1], digest="f" * 64).mark != heads[1].mark
    assert dataclasses.replace(SETTINGS, max_new_tokens=9).identity() != SETTINGS.identity()
    assert dataclasses.replace(SETTINGS, draft_lengths=(1, 2)).identity() == SETTINGS.identity()


@pytest.mark.slow
def test_a_plane_needs_the_full_head(directory: HeadsDirectory, chat_target: Target) -> None:
    lacking = dataclasses.replace(directory, heads=directory.heads[1:])
    with pytest.raises(ValueError, match="no drafter with the full head of seed 0"):
        load_heads(lacking, chat_target)
