"""What the trained drafter is worth: measured on held-out prompts, as it was exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval import benchmark, files, head_cost, questions
from eval.loading import NGRAM, LoadedSystem, load_system
from specjax.checkpoints.sources import file_digest
from specjax.checkpoints.target import Target
from specjax.drafters.ngram import NgramDrafter
from specjax.json_files import read_object
from train.artifacts import RunError
from train.config import TrainConfig
from train.conversations import held_out_questions
from train.json_fields import field_problem

_SETTINGS = ("draft_lengths", "eval_prompts", "eval_new_tokens", "eval_temperature", "eval_slots")
_RESULTS = ("benchmark.json", "head_cost.json", "samples.json")
# Taking a step apart needs few prompts: its wall clock is measured over all their tokens.
_HEAD_COST_PROMPTS = 2


def evaluate(config: TrainConfig, target: Target, run_dir: Path) -> str:
    """Decodes held-out prompts plainly, with the exported drafter and with prompt lookup, and takes a step apart.

    Args:
        config: the settings.
        target: the model.
        run_dir: of the run; `eval/` below it gets the results. Results of the same settings are kept.

    Returns:
        One line about the result.

    Raises:
        RunError: if a file that this run measured was replaced by another measurement.
    """
    folder = run_dir / "eval"
    settings = {name: getattr(config, name) for name in _SETTINGS}
    marker = folder / "settings.json"
    if not _is_measured(folder, marker, settings):
        asked = _questions(config)
        system = load_system(config.head, run_dir / "export", target)
        measured = _benchmark(config, target, system, asked)
        # A kill between two of the files must leave results to measure again, not ones that the marker calls strange.
        marker.unlink(missing_ok=True)
        benchmark.write_benchmark(measured, folder)
        digests = {name: file_digest(folder / name) for name in ("benchmark.json", "samples.json")}
        cost = head_cost.measure_head_cost(
            target,
            {system.name: (system.drafter, system.params)},
            asked[:_HEAD_COST_PROMPTS],
            draft_lengths=config.draft_length_list,
            max_new_tokens=config.eval_new_tokens,
            # Its own decoding would be greedy; where that was measured already, it is the same minutes' figure.
            benchmark=measured if config.eval_temperature == 0 else None,
        )
        files.write_json(folder / "head_cost.json", cost)
        digests["head_cost.json"] = file_digest(folder / "head_cost.json")
        files.write_json(marker, {**settings, "sha256": digests})
    return summary(files.read_json(folder / "benchmark.json"), config.head)


def _is_measured(folder: Path, marker: Path, settings: dict[str, Any]) -> bool:
    """Whether the results in a folder are this run's own with these settings, and all there."""
    if not marker.exists():
        return False
    done = read_object(marker)
    # An earlier version wrote no digests.
    problem = field_problem(done, {"sha256": dict}) if "sha256" in done else None
    if problem is not None:
        raise RunError(f"{marker}: {problem}: the file is damaged; remove it to measure again")
    digests = done.pop("sha256", {})
    there = [name for name in _RESULTS if (folder / name).is_file()]
    for name in there:
        if name in digests and file_digest(folder / name) != digests[name]:
            raise RunError(
                f"{folder / name} was replaced by another measurement; remove it and {marker} to measure again"
            )
    return done == settings and {"benchmark.json", *digests} <= set(there)


def summary(result: dict[str, Any], system: str) -> str:
    """The best draft length of a system, by measured speed-up, in one line."""
    rows = [row for row in result["results"] if row["system"] == system and row["acceptance"]["acceptance_length"]]
    if not rows:
        return "no prompt was answered"
    best = max(rows, key=lambda row: row["speed_up"]["value"])
    return (
        f"acceptance length {best['acceptance']['acceptance_length']:.2f} and speed-up "
        f"{best['speed_up']['value']:.2f} at draft length {best['draft_length']}, "
        f"{best['num_answers']} held-out answers"
    )


def _questions(config: TrainConfig) -> list[questions.Question]:
    prompts = held_out_questions(config)
    return questions.spread([questions.Question(p.id, p.kind, p.turns) for p in prompts], config.eval_prompts)


def _benchmark(
    config: TrainConfig, target: Target, system: LoadedSystem, asked: list[questions.Question]
) -> dict[str, Any]:
    with tqdm(desc="measuring", unit="group", disable=not config.progress) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return benchmark.run_benchmark(
            target,
            {
                system.name: (system.drafter, system.params),
                NGRAM: (NgramDrafter(vocab_size=target.config.vocab_size), None),
            },
            asked,
            draft_lengths=config.draft_length_list,
            temperature=config.eval_temperature,
            num_slots=config.eval_slots,
            max_new_tokens=config.eval_new_tokens,
            seed=config.seed,
            training_templates={system.name: system.template_digest},
            on_progress=progress,
        )
