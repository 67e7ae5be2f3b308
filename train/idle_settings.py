"""Which settings of a run say nothing beside the others, so that giving them would be a mistake."""

from __future__ import annotations

from train.config import TrainConfig
from train.head_flags import head_facts


def idle_settings(config: TrainConfig) -> dict[str, str]:
    """Settings that can have no effect beside the others: name and what makes them idle."""
    own_answers = config.answer_source == "dataset"
    no_sampling = config.answers_per_prompt == 1 and config.greedy_first
    distributed = config.coordinator is not None
    facts = head_facts(config.head)
    rules: list[tuple[bool, str, tuple[str, ...]]] = [
        (config.dataset is None, "without `--dataset`", ("dataset_split", "strict_data")),
        (config.dataset is not None, "with `--dataset`", ("prompt_kinds",)),
        (
            own_answers,
            "with `--answer_source=dataset`",
            (
                "answers_per_prompt",
                "greedy_first",
                "answer_temperature",
                "answer_top_p",
                "max_answer_tokens",
                "answer_slots",
                "answer_dtype",
            ),
        ),
        (no_sampling, "with one greedy answer a prompt", ("answer_temperature", "answer_top_p")),
        (config.text is None, "without `--text`", ("max_text_rows",)),
        (config.features == "online", "with `--features=online`", ("feature_dtype",)),
        (not facts.uses_rank, f"with `--head={config.head}`", ("rank",)),
        (not facts.uses_loss, f"with `--head={config.head}`", ("loss", "lk_decay")),
        (facts.counts != "corpus_counts", f"with `--head={config.head}`", ("frequency_text",)),
        (config.base is not None, "with `--base`", ("warm_start", "feature_layers")),
        (config.loss != "lk_hybrid", f"with `--loss={config.loss}`", ("lk_decay",)),
        (config.optimizer != "muon", f"with `--optimizer={config.optimizer}`", ("momentum", "adam_share")),
        (config.schedule != "cosine", f"with `--schedule={config.schedule}`", ("final_learning_rate",)),
        (config.unroll_steps == 1, "with `--unroll_steps=1`", ("stage1_steps", "loss_decay")),
        (not distributed, "without `--coordinator`", ("num_processes", "process_id")),
        (
            not config.evaluate,
            "with `--noevaluate`",
            ("draft_lengths", "eval_prompts", "eval_new_tokens", "eval_temperature", "eval_slots"),
        ),
    ]
    idle: dict[str, str] = {}
    for applies, reason, names in rules:
        if applies:
            for name in names:
                idle.setdefault(name, reason)
    return idle
