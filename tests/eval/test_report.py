"""The report shows what is there, names what is not, and needs nothing but itself."""

from __future__ import annotations

import html
import json
import pathlib
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

from eval.report import write_report
from eval.report_inputs import read_inputs
from eval.report_sections import thin
from eval.run_directory import RunDirectory
from eval.terminal import SOURCE_NAMES
from specjax.decoding.request import SOURCE_ACCEPTED, SOURCE_BONUS, SOURCE_RECOVERED, SOURCE_TARGET


def estimate(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def result_row(system: str, length: int, tau: float, speed: float, temperature: float = 0.0) -> dict[str, Any]:
    row: dict[str, Any] = {
        "system": system,
        "draft_length": length,
        "temperature": temperature,
        "label": system if system == "plain" else f"{system} L={length}",
        "acceptance": {
            "acceptance_length": tau,
            "acceptance_length_mean_of_requests": tau,
            "acceptance_length_interval": estimate(tau),
            "joint": [0.5] * length,
            "conditional": [0.5] + [None] * (length - 1) if length else [],
        },
        "num_answers": 3,
        "repeated_4gram_share": 0.25,
        "tokens_per_second": estimate(30.0 * speed),
        "equals_plain": {"identical": 3, "compared": 3, "divergences": []} if length else None,
    }
    if length:
        row["speed_up"] = estimate(speed) | {"with_prefill": estimate(speed), "mean_of_prompts": speed}
    return row | {"by_kind": {"chat": dict(row), "code": dict(row)}}


BENCHMARK: dict[str, Any] = {
    "time": "2026-01-02T03:04:05",
    "versions": {"jax": "0.10.2"},
    "machine": {"device_kind": "cpu", "num_devices": 1, "num_cpus": 2, "system": "Linux"},
    "target": {
        "name": "Small <Model>",
        "source": "folder",
        "digest": "ab" * 32,
        "template_digest": "cd" * 32,
        "num_params": 1000,
    },
    "systems": {"slim": {"num_params": 100, "digest": "ef" * 32}, "ngram": {"num_params": 0, "digest": ""}},
    "settings": {"num_slots": 1, "max_new_tokens": 64},
    "counts": {"conversations": 3, "turns": 3},
    "warnings": [],
    "results": [
        result_row("plain", 0, 1.0, 1.0),
        result_row("slim", 1, 1.4, 1.15),
        result_row("slim", 4, 1.8, 1.05),
        result_row("ngram", 4, 1.5, 1.30),
    ],
}
HEAD_COST: dict[str, Any] = {
    "heads": [
        {
            "name": "slim",
            "kind": "low_rank",
            "rank": 8,
            "num_params": 10,
            "seconds": 1e-3,
            "nu": 0.2,
            "byte_ratio": 0.13,
            "share_of_drafting": 0.4,
            "kappa": 0.1,
        }
    ],
    "steps": [
        {
            "system": "slim",
            "draft_length": 1,
            "label": "slim L=1",
            "parts": {"target forward": 0.03, "draft head": 0.001, "host": 0.001},
            "relative_step": 1.2,
        }
    ],
}
SAMPLES = [
    {
        "category": "chat",
        "prompt": "Is 1 < 2?",
        "system": "slim",
        "draft_length": 1,
        "acceptance_length": 1.4,
        "pieces": [
            {"text": "Yes", "source": "recovered", "num_tokens": 1},
            {"text": " & <b>always</b>", "source": "accepted", "num_tokens": 4},
        ],
    }
]


@pytest.fixture
def run_dir(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "run"
    (folder / "eval").mkdir(parents=True)
    (folder / "flags.txt").write_text("--head=low_rank\n--rank=8\n--nopacking\n--warm_start\n# a remark\n")
    (folder / "run.json").write_text(json.dumps({"command": ["train"], "seed": 0}))
    rows = [
        {"kind": "train", "step": step, "loss": 3.0 - step / 100, "acceptance_per_step": [0.3, 0.2]}
        for step in range(1, 101)
    ]
    rows += [{"kind": "held_out", "step": 50, "loss": 2.7, "acceptance_per_step": [0.25, 0.15]}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, value in (("benchmark", BENCHMARK), ("head_cost", HEAD_COST), ("samples", SAMPLES)):
        (folder / "eval" / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_whole_report_shows_every_part(run_dir: pathlib.Path) -> None:
    page = write_report(run_dir).read_text("utf-8")
    for heading in ("Decoding", "Where a step", "Training", "Sample answers", "Settings"):
        assert f"<h2>{heading}" in page
    # The best *trained* system is the headline, prompt lookup stands beside it.
    assert "<b>1.15x</b>" in page
    assert "9 of 9" in page
    assert "predicted 1.167" in page
    assert "To know" not in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    assert len(re.findall("<svg", page)) == 5


def test_report_is_one_light_file_without_scripts_or_network(run_dir: pathlib.Path) -> None:
    path = write_report(run_dir)
    page = path.read_text("utf-8")
    assert path.stat().st_size < 2**20
    assert "<script" not in page
    without_namespace = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|src=|@import|url\(", without_namespace)


def test_text_of_models_and_users_is_escaped(run_dir: pathlib.Path) -> None:
    page = write_report(run_dir).read_text("utf-8")
    assert "<b>always</b>" not in page
    assert "&amp; &lt;b&gt;always&lt;/b&gt;" in page
    assert "Small &lt;Model&gt;" in page


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("flags.txt", "All settings"),
        ("metrics.jsonl", "<h2>Training"),
        ("eval/benchmark.json", "<h2>Decoding"),
        ("eval/head_cost.json", "<h2>Where a step"),
        ("eval/samples.json", "<h2>Sample answers"),
        ("run.json", "The run</summary>"),
    ],
)
def test_a_missing_part_is_named_and_the_others_stay(run_dir: pathlib.Path, name: str, lost: str) -> None:
    assert lost in write_report(run_dir).read_text("utf-8")
    (run_dir / name).unlink()
    page = write_report(run_dir).read_text("utf-8")
    assert lost not in page
    assert f"{name} is missing" in page
    assert "<h2>Settings" in page


def test_an_empty_directory_gives_a_page_that_says_so(tmp_path: pathlib.Path) -> None:
    page = write_report(tmp_path).read_text("utf-8")
    assert page.count("is missing") == 6
    assert "Nothing was recorded yet." in page
    with pytest.raises(FileNotFoundError, match="no run directory"):
        write_report(tmp_path / "none")


def test_damaged_files_are_named(run_dir: pathlib.Path) -> None:
    (run_dir / "eval" / "benchmark.json").write_text('{"results": [')
    (run_dir / "eval" / "samples.json").write_text('{"not": "a list"}')
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    page = write_report(run_dir).read_text("utf-8")
    assert "eval/benchmark.json cannot be read" in page
    assert "eval/samples.json has an unknown form" in page
    assert "metrics.jsonl has 1 damaged line, left out" in page
    assert "<h2>Training" in page


def test_a_difference_from_plain_decoding_is_told(run_dir: pathlib.Path) -> None:
    changed = json.loads(json.dumps(BENCHMARK))
    changed["results"][1]["equals_plain"] = {
        "identical": 2,
        "compared": 3,
        "divergences": [{"question_id": "q7", "turn": 0, "position": 17, "gap": 2e-5}],
    }
    changed["warnings"] = ["slim was trained with another chat template"]
    (run_dir / "eval" / "benchmark.json").write_text(json.dumps(changed))
    page = write_report(run_dir).read_text("utf-8")
    assert "8 of 9" in page
    assert "the answer to q7 parts from plain decoding at token 17" in page
    assert "another chat template" in page


def test_flags_are_read_as_they_are_written(run_dir: pathlib.Path) -> None:
    assert read_inputs(run_dir).flags == {"head": "low_rank", "rank": "8", "packing": "false", "warm_start": "true"}


def test_steps_that_were_written_twice_count_once(run_dir: pathlib.Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "train", "step": 100, "loss": 9.0}) + "\n")
    train = read_inputs(run_dir).train
    assert [row["step"] for row in train] == list(range(1, 101))
    assert train[-1]["loss"] == 9.0


def test_thinning_keeps_means() -> None:
    points = [(float(x), float(x % 2)) for x in range(1000)]
    thinned = thin(points, 100)
    assert len(thinned) == 100
    assert thinned[0] == (4.5, 0.5)
    assert thin(points[:50], 100) == points[:50]


FIELD_OF_ANOTHER_KIND = [{**BENCHMARK["results"][1], "temperature": "warm"}]


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("eval/benchmark.json", '{"results": [{}]}', "a record lacks `system`): left out of Decoding"),
        ("eval/benchmark.json", '{"results": 5}', "left out of the headline"),
        ("eval/benchmark.json", json.dumps({"results": FIELD_OF_ANOTHER_KIND}), "a value is of the wrong kind"),
        ("eval/benchmark.json", '{"target": 5}', "left out of the title"),
        ("eval/benchmark.json", json.dumps(BENCHMARK | {"warnings": 5}), "left out of the warnings"),
        ("eval/head_cost.json", '{"steps": [{"parts": 5}]}', "left out of Where a step"),
        ("eval/samples.json", "[{}]", "a record lacks `pieces`): left out of Sample answers"),
        ("eval/samples.json", "[1]", "left out of Sample answers"),
        (
            "metrics.jsonl",
            '{"kind": "train", "step": 1, "acceptance_per_step": 5}',
            "left out of Training",
        ),
    ],
)
def test_a_file_of_another_form_is_one_line_and_the_others_stay(
    run_dir: pathlib.Path, name: str, text: str, line: str
) -> None:
    (run_dir / name).write_text(text)
    page = html.unescape(write_report(run_dir).read_text("utf-8"))
    (told,) = [item for item in re.findall("<li>(.*?)</li>", page) if line in item]
    assert told.startswith(f"{name} has an unknown form (")
    own = {"eval/benchmark.json": "Decoding", "eval/head_cost.json": "Where a step", "eval/samples.json": "Sample"}
    for heading in {"Decoding", "Where a step", "Training", "Sample", "Settings"} - {own.get(name, "Training")}:
        assert f"<h2>{heading}" in page


def test_a_machine_of_another_form_costs_its_own_lines_alone(run_dir: pathlib.Path) -> None:
    (run_dir / "eval" / "benchmark.json").write_text(json.dumps(BENCHMARK | {"machine": {"cpus": 2}}))
    page = html.unescape(write_report(run_dir).read_text("utf-8"))
    problem = (
        "eval/benchmark.json has an unknown form (a record lacks `num_cpus`): left out of the line below the title"
    )
    assert problem in page
    assert "(a record lacks `num_devices`): left out of Settings" in page
    assert "low-rank head of rank 8, 100 training steps" in page
    assert "<h2>Decoding" in page


def test_several_faulty_files_are_all_named(run_dir: pathlib.Path) -> None:
    (run_dir / "eval" / "benchmark.json").write_text('{"results": 5}')
    (run_dir / "eval" / "head_cost.json").write_text('{"steps": 5, "heads": [1]}')
    page = html.unescape(write_report(run_dir).read_text("utf-8"))
    assert "eval/benchmark.json has an unknown form" in page
    assert "eval/head_cost.json has an unknown form" in page
    assert "<h2>Training" in page


def test_settings_that_are_no_utf8_are_not_called_missing(run_dir: pathlib.Path) -> None:
    (run_dir / "flags.txt").write_bytes(b"--head=\xff\n")
    with pytest.raises(ValueError, match=r"flags\.txt: not UTF-8 text: invalid start byte at byte 7"):
        RunDirectory.open(run_dir)
    page = write_report(run_dir).read_text("utf-8")
    assert "flags.txt cannot be read" in page
    assert "flags.txt is missing" not in page


def test_time_that_the_parts_do_not_explain_may_be_negative(run_dir: pathlib.Path) -> None:
    changed = json.loads(json.dumps(HEAD_COST))
    changed["steps"][0]["measured_step_seconds"] = 0.0295
    (run_dir / "eval" / "head_cost.json").write_text(json.dumps(changed))
    page = write_report(run_dir).read_text("utf-8")
    assert "<td>slim L=1</td><td>31.00</td><td>29.50</td><td>-1.50</td>" in page


def test_the_key_of_sample_text_names_every_source(run_dir: pathlib.Path) -> None:
    page = html.unescape(write_report(run_dir).read_text("utf-8"))
    for source in SOURCE_ACCEPTED, SOURCE_RECOVERED, SOURCE_BONUS, SOURCE_TARGET:
        assert f'<span class="key {source}">{SOURCE_NAMES[source]}</span>' in page
