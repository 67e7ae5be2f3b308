"""What the trained drafter is worth: measured on held-out prompts, as it was exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval import benchmark, files, head_cost, questions
from eval.loading import NGRAM, LoadedSystem, load_system
from specjax.checkpoints.target import Target
from specjax.drafters.ngram import NgramDrafter
from train.config import TrainConfig
from train.conversations import held_out_questions

_SETTINGS = ("draft_lengths", "eval_prompts", "eval_new_tokens", "eval_temperature", "eval_slots")
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
    """
    folder = run_dir / "eval"
    settings = {name: getattr(config, name) for name in _SETTINGS}
    marker = folder / "settings.json"
    done = files.read_json(marker) if marker.exists() else None
    if done != settings:
        asked = _questions(config)
        system = load_system(config.head, run_dir / "export", target)
        measured = _benchmark(config, target, system, asked)
        benchmark.write_benchmark(measured, folder)
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
        files.write_json(marker, settings)
    return summary(files.read_json(folder / "benchmark.json"), config.head)


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
