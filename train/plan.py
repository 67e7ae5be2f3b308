"""What a run would do, worked out from shapes alone: no weights, no data, no device."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import jax
import numpy as np

from specjax import cost, models
from specjax.checkpoints.eagle import load_drafter
from specjax.drafters.eagle3_layer import Eagle3Config, Params, num_params, parameter_shapes
from specjax.heads import HeadConfig, get_head
from specjax.models import ModelConfig
from specjax.text.prompts import load_prompts
from train.config import TrainConfig

_BYTES = {"float32": 4, "bfloat16": 2}
# Optimiser state beside float32 weights: AdamW keeps two moments, Muon one for each matrix.
_MOMENTS = {"adamw": 2, "muon": 1}


@dataclasses.dataclass(frozen=True)
class Plan:
    """The numbers of a run. Bytes are bytes, FLOPs count a multiply-add as two.

    Attributes:
        sections: title -> (name -> text), in the order of printing.
    """

    sections: dict[str, dict[str, str]]

    def __str__(self) -> str:
        lines = []
        for title, rows in self.sections.items():
            lines.append(title)
            lines += [f"  {name:<34} {text}" for name, text in rows.items()]
        return "\n".join(lines)


def drafter_config(config: TrainConfig, model: ModelConfig) -> Eagle3Config:
    """The drafter that a run trains for a target.

    Raises:
        ValueError: naming the flag, if rank or feature layers do not fit the target.
    """
    layers = config.feature_layer_list
    if layers is not None and max(layers) >= model.num_layers:
        raise ValueError(
            f"`--feature_layers` must be below the target's {model.num_layers} layers; got {config.feature_layers}"
        )
    if config.rank is not None and config.rank > model.hidden_size:
        raise ValueError(f"`--rank` must be at most the target's width {model.hidden_size}; got {config.rank}")
    if config.batch_length > model.max_position_embeddings:
        raise ValueError(
            f"`--batch_length` must be at most the target's context of {model.max_position_embeddings} tokens; "
            f"got {config.batch_length}"
        )
    options = config.head_option_values
    try:
        head = HeadConfig(config.head, model.hidden_size, model.vocab_size, config.rank, tuple(options.items()))
    except ValueError as error:
        raise ValueError(f"`--head_options` must fit the target: {error}") from None
    if config.base is not None:
        base, _ = load_base(config.base)
        if (base.hidden_size, base.vocab_size) != (model.hidden_size, model.vocab_size) or base.head.kind != "full":
            raise ValueError(
                f"`--base` must have a full head of the target's width {model.hidden_size} and vocabulary "
                f"{model.vocab_size}; got a {base.head.kind} one of {base.hidden_size} and {base.vocab_size}"
            )
        return dataclasses.replace(base, head=head)
    return Eagle3Config.for_target(model, head=head, feature_layers=layers)


def load_base(path: str) -> tuple[Eagle3Config, Params]:
    """The drafter that `--base` names, by its run directory or its export.

    Raises:
        FileNotFoundError: if there is none.
        ValueError: if its files are broken.
    """
    export = Path(path) / "export"
    return load_drafter(export if export.is_dir() else path)


def make_plan(config: TrainConfig, model: ModelConfig) -> Plan:
    """Works out shapes, memory, operations, tokens and the head's expected cost ratio.

    Args:
        config: the run.
        model: the target's configuration.

    Returns:
        The plan.
    """
    drafter = drafter_config(config, model)
    return Plan(
        {
            "Target": _target_rows(config, model),
            "Drafter (EAGLE-3)": _drafter_rows(config, drafter),
            "Data": _data_rows(config),
            "Training": _training_rows(config, model, drafter),
            "Memory per device (estimate)": _memory_rows(config, model, drafter),
            "Operations (estimate)": _operation_rows(config, model, drafter),
            "Expected at decoding": _decoding_rows(drafter),
        }
    )


def target_num_params(model: ModelConfig) -> int:
    """Parameters of the target; a tied head counts once."""
    shapes = jax.tree.leaves(models.parameter_shapes(model), is_leaf=lambda node: isinstance(node, tuple))
    total = sum(math.prod(shape) for shape in shapes)
    return total - (model.hidden_size * model.vocab_size if model.tie_word_embeddings else 0)


def loss_entries(config: TrainConfig) -> int:
    """Entries of one row that the loss reads: whole windows."""
    wanted = min(config.loss_rows or config.batch_length, config.batch_length - 1)
    return -(-wanted // config.loss_window) * config.loss_window


def drafter_train_flops(config: TrainConfig, drafter: Eagle3Config, *, unroll_steps: int) -> int | float:
    """FLOPs of the drafter in one optimiser step: forward and backward count as three forwards."""
    head, shapes = get_head(drafter.head.kind), parameter_shapes(drafter)
    tokens, entries = config.batch_size * config.batch_length, config.batch_size * loss_entries(config)
    sizes = {name: math.prod(shape) for name, shape in shapes["midlayer"].items()}
    keys_values = sizes["k_proj"] + sizes["v_proj"]
    others = sum(size for name, size in sizes.items() if name.endswith("proj")) - keys_values
    # Keys and values of the first step cover all tokens; everything else is computed for the loss's entries.
    forward = 2 * tokens * (math.prod(shapes["fc"]) + keys_values) + 2 * entries * others
    forward += (unroll_steps - 1) * 2 * entries * (keys_values + others)
    forward += unroll_steps * 4 * entries * config.batch_length / 2 * drafter.num_heads * drafter.head_dim
    forward += unroll_steps * head.flops(drafter.head, entries)
    # Each position's law of the target comes from its head, forward only, and serves all steps.
    positions = entries // config.loss_window * (config.loss_window + unroll_steps - 1)
    return 3 * forward + 2 * positions * drafter.target_hidden_size * drafter.vocab_size


def target_forward_flops(model: ModelConfig, tokens: int, length: int) -> int | float:
    """FLOPs of the target's layers over `tokens` tokens in sequences of `length`, its head left out."""
    body = target_num_params(model) - (1 if model.tie_word_embeddings else 2) * model.hidden_size * model.vocab_size
    return tokens * (2 * body + 4 * (length / 2) * model.num_heads * model.head_dim * model.num_layers)


def _target_rows(config: TrainConfig, model: ModelConfig) -> dict[str, str]:
    return {
        "source": config.target,
        "layers x width, feed-forward": f"{model.num_layers} x {model.hidden_size}, {model.intermediate_size}",
        "heads / key-value heads x width": f"{model.num_heads} / {model.num_kv_heads} x {model.head_dim}",
        "vocabulary, context": f"{model.vocab_size}, {model.max_position_embeddings}",
        "parameters": f"{_count(target_num_params(model))} in {config.target_dtype}",
    }


def _drafter_rows(config: TrainConfig, drafter: Eagle3Config) -> dict[str, str]:
    head = get_head(drafter.head.kind)
    backbone = num_params(drafter) - head.num_params(drafter.head) if head.trains_backbone else 0
    in_head = _trained_in_head(config, drafter)
    total = backbone + in_head
    width = drafter.hidden_size
    layer = ", layer copied from the target" if config.warm_start else ""
    start = f"{config.head_init}{layer if config.base is None else f', all else from {config.base}'}"
    options = {"head options": config.head_options} if config.head_options else {}
    return {
        "feature layers (outputs)": ", ".join(map(str, drafter.feature_layers)),
        "fc, attention input": f"[{3 * drafter.target_hidden_size}, {width}], {drafter.target_hidden_size + width}",
        "LM head": f"{drafter.head.kind} {head.describe(drafter.head)}",
        **options,
        "trained parameters": f"{_count(total)}, of them {_count(in_head)} in the head",
        "start": start,
    }


def _trained_in_head(config: TrainConfig, drafter: Eagle3Config) -> int:
    head = get_head(drafter.head.kind)
    if not config.train_head:
        return 0
    shapes = head.shapes(drafter.head)
    return head.num_params(drafter.head) - sum(
        math.prod(shapes[name]) for name in head.fixed_parameters(drafter.head) if name not in head.integers()
    )


def _data_rows(config: TrainConfig) -> dict[str, str]:
    if config.dataset is None:
        prompts = load_prompts("train", config.prompt_kind_list)
        count = min(len(prompts), config.num_prompts or len(prompts))
        answers = sum(len(prompt.turns) for prompt in prompts[:count]) * config.answers_per_prompt
        return {
            "prompts": f"{count} shipped, {config.answers_per_prompt} answer(s) each",
            "answer tokens, at most": _count(answers * config.max_answer_tokens),
            "held-out prompts": str(config.held_out_prompts),
        }
    rows = {
        "prompts": f"{config.num_prompts or 'all'} of {config.dataset}",
        "answers": "the dataset's own" if config.answer_source == "dataset" else "by the target",
        "held-out prompts": str(config.held_out_prompts),
    }
    if config.num_prompts and config.answer_source == "target":
        rows["answer tokens, at most"] = _count(
            config.num_prompts * config.answers_per_prompt * config.max_answer_tokens
        )
    return rows


def _training_rows(config: TrainConfig, model: ModelConfig, drafter: Eagle3Config) -> dict[str, str]:
    tokens = config.batch_size * config.batch_length
    stages = f"S = {config.unroll_steps}"
    if config.unroll_steps > 1 and config.stage1_steps:
        stages = f"S = 1 for {config.stage1_steps}, then {stages}"
    optimizer = (
        f"{config.optimizer}, {config.learning_rate:g}, {config.schedule} after {config.warmup_steps} warm-up steps"
    )
    rows = {
        "steps": f"{config.train_steps} ({stages})",
        "batch": f"{config.batch_size} rows x {config.batch_length} tokens = {_count(tokens)} tokens a step",
        "tokens in all": _count(tokens * config.train_steps),
        "optimiser": f"{optimizer}, clip {config.clip_norm:g}",
        "loss": config.loss if config.loss != "lk_hybrid" else f"lk_hybrid, decay {config.lk_decay:g}",
        "mesh": ", ".join(f"{name} {size}" for name, size in config.mesh_axes.items()) or "one device",
        "features": config.features,
    }
    if config.features == "cached":
        per_token = (3 * model.hidden_size + model.hidden_size) * _BYTES[config.feature_dtype]
        rows["feature cache"] = f"{_size(per_token)} a token"
    return rows


def _memory_rows(config: TrainConfig, model: ModelConfig, drafter: Eagle3Config) -> dict[str, str]:
    axes = config.mesh_axes
    split = axes.get("fsdp", 1) * axes.get("tensor", 1)
    rows = -(-config.batch_size // (config.accumulation_steps * axes.get("data", 1) * axes.get("fsdp", 1)))
    tokens, entries = rows * config.batch_length, rows * loss_entries(config)
    online = config.features == "online"
    embeddings = 2 * model.hidden_size * model.vocab_size * _BYTES[config.target_dtype]
    layers = (target_num_params(model)) * _BYTES[config.target_dtype]
    target = max(embeddings, layers if online else embeddings)
    trained = num_params(drafter) * 4 * (2 + _MOMENTS[config.optimizer])
    width = 8 * drafter.hidden_size + 3 * drafter.intermediate_size
    kept = 1 if config.rematerialise else config.unroll_steps
    activations = kept * entries * width * _BYTES[config.train_dtype]
    features = tokens * 4 * model.hidden_size * _BYTES[config.target_dtype]
    logits = 4 * 4 * min(config.chunk_rows, entries) * drafter.vocab_size
    memory = {
        "target weights" if online else "target embedding and head": target / split,
        "drafter, gradient, optimiser": trained / split,
        "features of a batch": float(features),
        "activations": float(activations),
        "logits of a chunk": float(logits),
    }
    if online:
        # Scores of one layer of the target's forward over whole rows, float32.
        rows_of_scores = rows * model.num_heads * config.batch_length**2
        memory["attention scores"] = 4.0 * rows_of_scores
    memory["sum"] = sum(memory.values())
    return {name: _size(value) for name, value in memory.items()}


def _operation_rows(config: TrainConfig, model: ModelConfig, drafter: Eagle3Config) -> dict[str, str]:
    tokens = config.batch_size * config.batch_length
    stage1 = config.stage1_steps if config.unroll_steps > 1 else 0
    drafting = stage1 * drafter_train_flops(config, drafter, unroll_steps=1)
    per_step = drafter_train_flops(config, drafter, unroll_steps=config.unroll_steps)
    drafting += (config.train_steps - stage1) * per_step
    forward = target_forward_flops(model, tokens, config.batch_length)
    rows = {"drafter, one step": _flops(per_step), "drafter, all steps": _flops(drafting)}
    if config.features == "online":
        rows["target forward, one step"] = _flops(forward)
        rows["target forward, all steps"] = _flops(forward * config.train_steps)
    else:
        rows["target forward, a token (once)"] = _flops(forward / tokens)
    return rows


def _decoding_rows(drafter: Eagle3Config) -> dict[str, str]:
    head, full = get_head(drafter.head.kind), get_head("full")
    full_config = HeadConfig("full", drafter.hidden_size, drafter.vocab_size)
    nu = head.bytes_per_call(drafter.head, np.float16) / full.bytes_per_call(full_config, np.float16)
    rows = {"nu (bytes of the head over full)": f"{nu:.3f}"}
    for kappa in (0.25, 1.0):
        needed = cost.break_even_rho_tau(nu=nu, kappa=kappa)
        rows[f"pays at kappa = {kappa:g} if rho_tau is above"] = f"{needed:.3f}"
    return rows


def _count(value: int | float) -> str:
    return _scaled(value, 1000.0, ("", "K", "M", "B", "T"), "")


def _size(value: int | float) -> str:
    return _scaled(value, 1024.0, ("", "Ki", "Mi", "Gi", "Ti"), "B")


def _flops(value: int | float) -> str:
    return _scaled(value, 1000.0, ("", "K", "M", "G", "T", "P", "E", "Z", "Y"), "FLOP")


def _scaled(value: int | float, base: float, prefixes: tuple[str, ...], unit: str) -> str:
    index = 0
    while value >= base and index < len(prefixes) - 1:
        value, index = value / base, index + 1
    number = f"{value:.0f}" if index == 0 else f"{value:.3g}"
    return f"{number} {prefixes[index]}{unit}".strip() if prefixes[index] or unit else number
