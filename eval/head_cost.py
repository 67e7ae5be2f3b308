"""What a draft head costs and what the cost law makes of it, beside what was measured.

python -m eval.head_cost --run=RUN_DIR
python -m eval.head_cost --target=... --drafter=slim=EXPORT_DIR --drafter=full=EXPORT_DIR
"""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from absl import flags

from eval import command_flags, files
from eval.benchmark import run_benchmark
from eval.command_line import int_list, run_command
from eval.dissection import DECIDE, EXTEND, PROPOSE, TARGET
from eval.head_timing import FULL, time_heads_alone
from eval.loading import load_command
from eval.provenance import describe_run, describe_target
from eval.questions import Question, spread
from eval.records import PLAIN
from eval.tables import print_head_cost
from eval.variant_dissection import PLAIN_KEY, Dissection
from specjax import cost
from specjax.heads.base import HeadConfig, get_head
from specjax.text.chat_template import encode_prompt
from specjax.text.prompts import load_prompts

SCHEMA = 1


def measure_head_cost(
    target: Any,
    systems: Mapping[str, tuple[Any, Any]],
    questions: Sequence[Any],
    *,
    draft_lengths: Sequence[int] = (1, 2, 4),
    num_slots: int = 1,
    max_new_tokens: int = 64,
    num_steps: int = 24,
    cache_length: int | None = None,
    benchmark: Mapping[str, Any] | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Times heads and the parts of a step, and compares the cost law's speed-up with the wall clock's.

    * nu: the time that the head adds to a proposal, over the time that a full head adds, in one run. What a head adds
      is the proposal's time less that of the same drafter without a head, each after a target forward, in real
      decoding. Beside it, the head alone (logits and argmax) on rotated buffers.
    * kappa: all full-head calls of a step over the rest of the step.
    * predicted speed-up: tau * t_plain / t_step with t_step of `specjax.cost.StepTime` out of the parts, and the host
      time of *plain* decoding; no speculative step as a whole enters it. Greedy decoding.

    Args:
        target: a loaded target with a chat template.
        systems: name to (drafter, parameters); those with a `config.head` are taken apart.
        questions: a few conversations for tau and the wall clock; the first turn of the first one is dissected.
        draft_lengths: drafts a step.
        num_slots: rows.
        max_new_tokens: longest answer of the wall-clock measurement.
        num_steps: timed steps of each dissection.
        cache_length: slots of the wall-clock measurement; None fits the questions.
        benchmark: a result of `run_benchmark` of the same systems and lengths, to take tau and wall clock from
            instead of measuring them here; best one of the same minutes on the same machine.
        on_progress: told what comes next.

    Returns:
        A JSON-able dict: `heads`, `steps` (one row a system and length, plain first), `settings`, `target` and what
        ran where.

    Raises:
        ValueError: as `run_benchmark`, or if `num_steps` is below 1 or `benchmark` lacks a greedy row.
    """
    if num_steps < 1:
        raise ValueError(f"`num_steps` must be at least 1; got {num_steps}")
    say = on_progress or (lambda text: None)
    if benchmark is None:
        say("decoding with a wall clock")
        benchmark = run_benchmark(
            target,
            systems,
            questions,
            draft_lengths=draft_lengths,
            num_slots=num_slots,
            max_new_tokens=max_new_tokens,
            cache_length=cache_length,
        )
    prompt_ids = encode_prompt(
        target.tokenizer, target.chat_template, [{"role": "user", "content": questions[0].turns[0]}]
    )
    rows = _greedy_rows(benchmark, [(PLAIN, 0), *((name, length) for name in systems for length in draft_lengths)])
    dissection = Dissection(target, prompt_ids, num_steps, num_slots)
    for name, (drafter, params) in systems.items():
        for length in draft_lengths:
            dissection.add((name, length), drafter, params, length)
    say("parts of a step")
    dissection.run()
    plain_parts, _ = dissection.parts(PLAIN_KEY)
    host = max(dissection.plain_step_seconds - sum(plain_parts.values()), 0.0)
    plain = cost.StepTime(
        draft_length=0,
        verify=plain_parts[TARGET],
        backbone=0.0,
        head=0.0,
        overhead=plain_parts[DECIDE] + host,
    )
    steps = [_step_row(PLAIN, plain, plain, plain_parts[DECIDE], rows[PLAIN, 0])]
    heads: dict[str, dict[str, Any]] = {}
    for name, (drafter, _) in systems.items():
        for length in sorted(draft_lengths):
            parts, added = dissection.parts((name, length))
            step = step_time(parts, added, length, parts[DECIDE] + host)
            steps.append(_step_row(name, step, plain, parts[DECIDE], rows[name, length]))
            if added is not None:
                heads[name] = _head_row(name, drafter.config.head, step, added)
    say("heads alone")
    _add_heads_alone(target, systems, heads, num_slots)
    return {
        "schema": SCHEMA,
        "kind": "head_cost",
        **describe_run(),
        "target": describe_target(target),
        "settings": {
            "draft_lengths": list(draft_lengths),
            "num_slots": num_slots,
            "num_steps": num_steps,
            "max_new_tokens": benchmark["settings"]["max_new_tokens"],
            "cache_length": benchmark["settings"]["cache_length"],
        },
        "warnings": [],
        "heads": list(heads.values()),
        "steps": steps,
    }


def _greedy_rows(benchmark: Mapping[str, Any], wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    rows = {(row["system"], row["draft_length"]): row for row in benchmark["results"] if row["temperature"] == 0}
    missing = [f"{system} at L={length}" for system, length in wanted if (system, length) not in rows]
    if missing:
        raise ValueError(f"`benchmark` must hold greedy rows of all systems and lengths; it lacks {', '.join(missing)}")
    return rows


def step_time(
    parts: Mapping[str, float], added: Mapping[str, float] | None, length: int, overhead: float
) -> cost.StepTime:
    """A step of `length` drafts out of the medians of its parts and what its head adds to one call, in seconds."""
    head = added["own"] if added is not None else 0.0
    rest = max(parts[PROPOSE] - length * head, 0.0)
    # The first draft comes out of the extension, so L drafts take L - 1 passes of the drafter.
    passes = max(length - 1, 1)
    return cost.StepTime(
        draft_length=length,
        verify=parts[TARGET],
        backbone=rest / passes,
        head=head,
        extend=parts[EXTEND],
        overhead=overhead,
        backbone_calls=passes,
    )


def _step_seconds(row: Mapping[str, Any]) -> float:
    # Slots share a step, so a step's time is not the sum over the answers that took part in it.
    return row["decode_seconds"] / max(row["num_calls"], 1)


def _step_row(
    system: str, step: cost.StepTime, plain: cost.StepTime, decide: float, row: Mapping[str, Any]
) -> dict[str, Any]:
    measured_step = _step_seconds(row)
    tau = row["acceptance"]["acceptance_length"]
    entry = {
        "system": system,
        "draft_length": step.draft_length,
        "label": row["label"],
        "parts": {
            "target forward": step.verify,
            "drafter backbone": step.drafting - step.heads - step.extend,
            "draft head": step.heads,
            "drafter extension": step.extend,
            "laws and verification": decide,
            "host": step.overhead - decide,
        },
        "step_seconds": step.total,
        "measured_step_seconds": measured_step,
        "relative_step": step.total / plain.total,
        "acceptance_length": tau,
        "head_share_of_drafting": step.head_share_of_drafting,
    }
    if system == PLAIN:
        return entry
    predicted = cost.speed_up(tau=tau, plain_seconds=plain.total, step_seconds=step.total)
    measured = row["speed_up"]["value"]
    return entry | {
        "break_even_acceptance_length": cost.break_even_acceptance_length(
            plain_seconds=plain.total, step_seconds=step.total
        ),
        "predicted_speed_up": predicted,
        "measured_speed_up": measured,
        "prediction_error": predicted / measured - 1.0 if measured else None,
    }


def _head_row(name: str, config: HeadConfig, step: cost.StepTime, added: Mapping[str, float]) -> dict[str, Any]:
    """A head's figures at one draft length; the longest one is measured last and stays."""
    full = step.with_head(added["full"])
    full_bytes = 4 * cost.full_head_params(config.hidden_size, config.vocab_size)
    byte_ratio = get_head(config.kind).bytes_per_call(config, np.float32) / full_bytes
    nu = cost.nu(added["own"], added["full"]) if min(added.values()) > 0.0 else None
    return {
        "name": name,
        "kind": config.kind,
        "rank": config.rank,
        "num_params": get_head(config.kind).num_params(config),
        "draft_length": step.draft_length,
        "seconds": added["own"],
        "full_head_seconds": added["full"],
        "nu": nu,
        "byte_ratio": byte_ratio,
        "nu_over_byte_ratio": nu / byte_ratio if nu is not None else None,
        "share_of_drafting": step.head_share_of_drafting,
        "full_head_share_of_drafting": full.head_share_of_drafting,
        "kappa": full.kappa if added["full"] > 0.0 else None,
        "break_even_rho_tau": (
            cost.break_even_rho_tau(nu=nu, kappa=full.kappa) if nu is not None and added["full"] > 0.0 else None
        ),
    }


def _add_heads_alone(
    target: Any, systems: Mapping[str, tuple[Any, Any]], heads: Mapping[str, dict[str, Any]], num_slots: int
) -> None:
    for name, row in heads.items():
        drafter, params = systems[name]
        own = drafter.config.head
        full = HeadConfig(FULL, own.hidden_size, own.vocab_size)
        kernel = target.params["lm_head"] if own.kind != FULL else params["head"]["kernel"]
        pair = {"own": (own, params["head"]), FULL: (full, {"kernel": kernel})}
        timings = time_heads_alone(pair, batch=num_slots)
        row["alone"] = {which: timing.to_json() for which, timing in timings.items()}
        row["nu_alone"] = timings["own"].median / timings[FULL].median


def write_head_cost(result: Mapping[str, Any], folder: str | pathlib.Path) -> pathlib.Path:
    """Writes `head_cost.json`; returns its path."""
    return files.write_json(pathlib.Path(folder) / "head_cost.json", result)


def main() -> None:
    """The command."""
    values = flags.FLAGS
    draft_lengths = int_list("draft_lengths", values.draft_lengths, minimum=1)
    folder = command_flags.output_folder()
    target, systems = load_command(**command_flags.source_arguments(), ngram=values.ngram)
    prompts = spread([Question(p.id, p.kind, p.turns[:1]) for p in load_prompts("held_out")], values.num_questions)
    result = measure_head_cost(
        target,
        {name: (system.drafter, system.params) for name, system in systems.items()},
        prompts,
        draft_lengths=draft_lengths,
        num_slots=values.num_slots,
        max_new_tokens=values.max_new_tokens,
        num_steps=values.num_steps,
        on_progress=lambda text: print(f"timing: {text}", file=sys.stderr),
    )
    print_head_cost(result)
    if folder is not None:
        print(write_head_cost(result, folder))


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    command_flags.define_source()
    command_flags.define_output()
    flags.DEFINE_bool("ngram", True, "Measure prompt lookup as well.")
    flags.DEFINE_list("draft_lengths", ["1", "2", "4"], "Drafts a step.")
    flags.DEFINE_integer("num_slots", 1, "Rows decoded side by side.", lower_bound=1)
    flags.DEFINE_integer("num_questions", 6, "Shipped held-out prompts for acceptance and wall clock.", lower_bound=1)
    flags.DEFINE_integer("max_new_tokens", 64, "Longest answer.", lower_bound=1)
    flags.DEFINE_integer("num_steps", 24, "Timed steps of each dissection.", lower_bound=1)


if __name__ == "__main__":
    define_flags()
    run_command(main)
