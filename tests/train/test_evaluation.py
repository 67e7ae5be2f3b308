"""Results of a measurement: kept while they are this run's own and whole, measured again where they are gone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specjax.checkpoints.target import Target
from train import evaluation
from train.artifacts import RunError
from train.config import TrainConfig

CONFIG = TrainConfig.create(draft_lengths="2")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was measured, in order; nothing really is."""
    calls: list[str] = []

    def benchmark(*args: Any) -> dict[str, Any]:
        calls.append("benchmark")
        return {"results": [], "answers": [], "samples": [len(calls)]}

    def head_cost(*args: Any, **kwargs: Any) -> dict[str, Any]:
        calls.append("head_cost")
        return {"steps": []}

    class System:
        name, drafter, params = "low_rank", None, None

    monkeypatch.setattr(evaluation, "load_system", lambda *args: System)
    monkeypatch.setattr(evaluation, "_questions", lambda config: [])
    monkeypatch.setattr(evaluation, "_benchmark", benchmark)
    monkeypatch.setattr(evaluation.head_cost, "measure_head_cost", head_cost)
    return calls


def evaluate(run_dir: Path, config: TrainConfig = CONFIG) -> str:
    return evaluation.evaluate(config, object.__new__(Target), run_dir)


def test_own_results_are_kept(measured: list[str], tmp_path: Path) -> None:
    assert evaluate(tmp_path) == evaluate(tmp_path) == "no prompt was answered"
    assert measured == ["benchmark", "head_cost"]
    digests = json.loads((tmp_path / "eval" / "settings.json").read_text())["sha256"]
    assert set(digests) == {"benchmark.json", "head_cost.json", "samples.json"}


@pytest.mark.parametrize("name", ["benchmark.json", "head_cost.json", "samples.json", "settings.json"])
def test_lost_results_are_measured_again(measured: list[str], tmp_path: Path, name: str) -> None:
    evaluate(tmp_path)
    (tmp_path / "eval" / name).unlink()
    evaluate(tmp_path)
    assert measured == ["benchmark", "head_cost"] * 2


@pytest.mark.parametrize("eval_prompts", [CONFIG.eval_prompts, CONFIG.eval_prompts + 1])
@pytest.mark.parametrize("name", ["benchmark.json", "head_cost.json", "samples.json"])
def test_another_measurement_is_named_and_kept(
    measured: list[str], tmp_path: Path, name: str, eval_prompts: int
) -> None:
    evaluate(tmp_path)
    path = tmp_path / "eval" / name
    path.write_text('{"results": [1]}')
    config = TrainConfig.create(draft_lengths="2", eval_prompts=eval_prompts)
    with pytest.raises(RunError, match=rf"{path} was replaced by another measurement; remove it and .*settings\.json"):
        evaluate(tmp_path, config)
    assert path.read_text() == '{"results": [1]}'
    path.unlink()
    (tmp_path / "eval" / "settings.json").unlink()
    evaluate(tmp_path, config)
    assert measured == ["benchmark", "head_cost"] * 2


def test_a_kill_while_results_are_written_costs_only_the_measurement(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate(tmp_path)
    other = TrainConfig.create(draft_lengths="3")

    def killed(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(evaluation.head_cost, "measure_head_cost", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(tmp_path, other)
    evaluate(tmp_path, other)
    assert measured == ["benchmark", "head_cost", "benchmark", "benchmark", "head_cost"]


def test_results_of_an_earlier_version_are_kept(measured: list[str], tmp_path: Path) -> None:
    evaluate(tmp_path)
    marker = tmp_path / "eval" / "settings.json"
    settings = json.loads(marker.read_text())
    del settings["sha256"]
    marker.write_text(json.dumps(settings))
    evaluate(tmp_path)
    assert measured == ["benchmark", "head_cost"]
    (tmp_path / "eval" / "benchmark.json").unlink()
    evaluate(tmp_path)
    assert measured == ["benchmark", "head_cost"] * 2


def test_damaged_digests_are_one_line(measured: list[str], tmp_path: Path) -> None:
    evaluate(tmp_path)
    (tmp_path / "eval" / "settings.json").write_text('{"sha256": 1}')
    with pytest.raises(RunError, match=r"settings\.json: `sha256` must be an object; got 1: .*; remove it"):
        evaluate(tmp_path)
