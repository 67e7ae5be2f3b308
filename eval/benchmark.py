"""Plain and speculative decoding measured in one run: acceptance, speed-up, equality.

python -m eval.benchmark --run=RUN_DIR
python -m eval.benchmark --target=... --drafter=slim=EXPORT_DIR --drafter=full=EXPORT_DIR --questions=FILE.jsonl
python -m eval.benchmark --target=... --self_draft_layers=0-15,18-29 --verifiers=all --num_drafts=1,3 --output_dir=DIR
"""

from __future__ import annotations

import functools
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags
from tqdm import tqdm

from eval import command_flags, files, matrix_command
from eval.command_line import float_list, int_list, run_command
from eval.divergence import Divergence, find_divergence
from eval.interleaved import Measurements, measure
from eval.loading import LoadedSystem, load_command
from eval.provenance import describe_run, describe_system, describe_target
from eval.questions import Question, load_questions, spread
from eval.records import PLAIN, TurnRecord, Variant
from eval.samples import choose_samples
from eval.spec_bench import answer_rows
from eval.summary import summarise_variant
from eval.tables import print_results
from specjax import verification
from specjax.checkpoints.target import Target
from specjax.decoding.engine import Engine
from specjax.decoding.request import Request, SamplingParams
from specjax.text.chat_template import encode_prompt
from specjax.text.prompts import load_prompts

_PROMPT_PIECE = 64
SCHEMA = 1


def run_benchmark(
    target: Any,
    systems: Mapping[str, tuple[Any, Any]],
    questions: Sequence[Any],
    *,
    draft_lengths: Sequence[int] = (1, 2, 4),
    temperature: float | Sequence[float] = 0.0,
    num_slots: int = 1,
    max_new_tokens: int = 256,
    cache_length: int | None = None,
    num_drafts: int = 1,
    verifier: str = "token",
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    repeats: int = 1,
    training_templates: Mapping[str, str | None] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Decodes all questions plainly and with every system at every draft length, interleaved, in one run.

    Args:
        target: a loaded target with a chat template.
        systems: name to (drafter, its parameters). "plain" is always measured and no name for a system.
        questions: conversations with `id`, `category` (or `kind`) and `turns`.
        draft_lengths: drafts a step, each at least 1.
        temperature: one or several; all variants are measured at each.
        num_slots: prompts decoded side by side, the same for all variants.
        max_new_tokens: longest answer.
        cache_length: slots of the cache; None fits the longest conversation, within the target's context.
        num_drafts: independent drafts a step.
        verifier: name of the verification rule.
        top_k: truncation, 0 is off.
        top_p: truncation, 1 is off.
        min_p: truncation, 0 is off.
        seed: of the first question; each question has its own.
        repeats: timed runs of each prompt and variant.
        training_templates: for systems that know it, digest of the chat template they were trained with; a digest
            that differs from the target's becomes an entry of `warnings`.
        on_progress: told (groups done, all groups).

    Returns:
        A JSON-able dict: `target`, `systems`, `settings`, `counts`, `results` (one row a variant, see
        `eval.summary.summarise_variant`), `answers` (Spec-Bench rows), `samples`, `warnings` and what ran where.

    Raises:
        ValueError: if a setting is out of range, the target has no chat template or nothing is to be asked.
    """
    temperatures = (temperature,) if isinstance(temperature, int | float) else tuple(temperature)
    questions = [_as_question(question) for question in questions]
    _check(target, systems, questions, draft_lengths, temperatures, num_slots, max_new_tokens, repeats)
    if cache_length is None:
        cache_length = _fitting_length(target, questions, max_new_tokens, max(draft_lengths) * num_drafts)

    def encode(messages: list[dict[str, str]]) -> tuple[int, ...]:
        return tuple(encode_prompt(target.tokenizer, target.chat_template, messages))

    # One width of prompt pieces: every width is compiled for every variant, which takes longer than it computes.
    make_engine = functools.partial(
        Engine,
        target,
        num_slots=num_slots,
        cache_length=cache_length,
        prefill_chunk=_PROMPT_PIECE,
        prefill_padding=_PROMPT_PIECE,
    )
    engines = {(PLAIN, 0): make_engine(draft_length=0)}
    for name, (drafter, params) in systems.items():
        for length in draft_lengths:
            engines[name, length] = make_engine(
                drafter, params, draft_length=length, num_drafts=num_drafts, verifier=verifier
            )
    results, answers, samples = [], [], []
    counts: dict[str, int] = {}
    for index, value in enumerate(temperatures):

        def make_request(name: str, messages: list[dict[str, str]], number: int, value: float = value) -> Request:
            params = SamplingParams(
                temperature=value,
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                seed=(seed + number) % 2**32,
                max_new_tokens=max_new_tokens,
            )
            return Request(id=name, prompt_ids=encode(messages), params=params)

        def progress(done: int, total: int, index: int = index) -> None:
            if on_progress is not None:
                on_progress(index * total + done, len(temperatures) * total)

        measured = measure(
            {Variant(name, length, value): engine for (name, length), engine in engines.items()},
            questions,
            make_request,
            num_slots=num_slots,
            repeats=repeats,
            on_progress=progress,
        )
        rows = _summarise(target, measured, greedy=value == 0.0)
        results.extend(rows)
        for variant, records in measured.records.items():
            answers.extend(answer_rows(variant, records))
        samples.extend(choose_samples(target.tokenizer, measured, rows, questions))
        counts = _counts(questions, measured)
    return {
        "schema": SCHEMA,
        "kind": "benchmark",
        **describe_run(),
        "target": describe_target(target),
        "systems": {name: describe_system(drafter, params) for name, (drafter, params) in systems.items()},
        "settings": {
            "draft_lengths": list(draft_lengths),
            "temperatures": list(temperatures),
            "num_slots": num_slots,
            "max_new_tokens": max_new_tokens,
            "cache_length": cache_length,
            "num_drafts": num_drafts,
            "verifier": verifier,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "repeats": repeats,
        },
        "counts": counts,
        "warnings": _template_warnings(target, training_templates or {}),
        "results": results,
        "answers": answers,
        "samples": samples,
    }


def write_benchmark(result: Mapping[str, Any], folder: str | pathlib.Path) -> pathlib.Path:
    """Writes `benchmark.json`, `benchmark.jsonl` (Spec-Bench rows) and `samples.json`; returns the first one's path."""
    folder = pathlib.Path(folder)
    apart = ("answers", "samples")
    files.write_jsonl(folder / "benchmark.jsonl", result["answers"])
    files.write_json(folder / "samples.json", result["samples"])
    return files.write_json(
        folder / "benchmark.json", {name: value for name, value in result.items() if name not in apart}
    )


def _as_question(question: Any) -> Question:
    category = getattr(question, "category", None) or getattr(question, "kind", None) or "all"
    return Question(question.id, category, tuple(question.turns))


def _check(
    target: Any,
    systems: Mapping[str, Any],
    questions: Sequence[Question],
    draft_lengths: Sequence[int],
    temperatures: Sequence[float],
    num_slots: int,
    max_new_tokens: int,
    repeats: int,
) -> None:
    if target.chat_template is None:
        raise ValueError(f"the target {target.name} has no chat template: questions cannot be asked")
    if PLAIN in systems:
        raise ValueError(f"`systems` must not use the name {PLAIN!r}: plain decoding is always measured")
    if not questions:
        raise ValueError("`questions` must hold at least one conversation")
    if not draft_lengths or min(draft_lengths) < 1:
        raise ValueError(f"`draft_lengths` must be at least 1 each; got {list(draft_lengths)}")
    if not temperatures or min(temperatures) < 0:
        raise ValueError(f"`temperature` must be at least 0; got {list(temperatures)}")
    for name, value in (("num_slots", num_slots), ("max_new_tokens", max_new_tokens), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"`{name}` must be at least 1; got {value}")


def _fitting_length(target: Any, questions: Sequence[Question], max_new_tokens: int, num_draft_tokens: int) -> int:
    longest = 0
    for question in questions:
        messages: list[dict[str, str]] = []
        for turn in question.turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        prompt = len(encode_prompt(target.tokenizer, target.chat_template, messages[:-1]))
        longest = max(longest, prompt + len(question.turns) * max_new_tokens)
    # Multiples of 64 keep arrays aligned; the margin is for one packed proposal behind the text.
    needed = -(-(longest + num_draft_tokens + 1) // 64) * 64
    return min(needed, target.config.max_position_embeddings)


def _summarise(target: Any, measured: Measurements, *, greedy: bool) -> list[dict[str, Any]]:
    plain = next(variant for variant in measured.records if variant.is_plain)
    plain_answers = {record.key: record for record in measured.records[plain]}
    rows = []
    for variant, records in measured.records.items():
        divergences: list[tuple[TurnRecord, Divergence]] | None = None
        if greedy and not variant.is_plain:
            divergences = []
            for record in records:
                other = plain_answers[record.key].completion
                own = record.completion
                found = find_divergence(target, own.prompt_ids, other.token_ids, own.token_ids)
                if found is not None:
                    divergences.append((record, found))
        rows.append(
            summarise_variant(variant, records, measured.timings[variant], measured.timings[plain], divergences)
        )
    return rows


def _counts(questions: Sequence[Question], measured: Measurements) -> dict[str, int]:
    plain = next(records for variant, records in measured.records.items() if variant.is_plain)
    return {
        "conversations": len(questions),
        "turns": sum(len(question.turns) for question in questions),
        "asked_turns": len(plain),
        "failed_turns": sum(1 for record in plain if record.completion.failed),
    }


def _template_warnings(target: Any, training_templates: Mapping[str, str | None]) -> list[str]:
    own = target.chat_template.digest
    return [
        f"{name} was trained with another chat template ({digest[:12]}) than the target's ({own[:12]}): "
        "expect lower acceptance"
        for name, digest in training_templates.items()
        if digest is not None and digest != own
    ]


def main() -> int:
    """The command."""
    values = flags.FLAGS
    if values.questions is not None and (values.prompts != "held_out" or values.kinds):
        raise ValueError("`--prompts` and `--kinds` choose shipped prompts and have no effect with `--questions`")
    if values.verifiers:
        options = matrix_command.read_options()
        return matrix_command.run(options, _questions(), *_load())
    num_drafts, *others = int_list("num_drafts", values.num_drafts, minimum=1)
    if others:
        raise ValueError(f"`--num_drafts` must be one number without `--verifiers`; got {[num_drafts, *others]}")
    draft_lengths = int_list("draft_lengths", values.draft_lengths, minimum=1)
    temperatures = float_list("temperatures", values.temperatures, minimum=0.0)
    verification.get_verifier(values.verifier)  # a wrong name is said before minutes of loading
    folder = command_flags.output_folder()
    questions = _questions()
    target, systems = _load()
    with tqdm(desc="measuring", unit="group", disable=not sys.stderr.isatty()) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        result = run_benchmark(
            target,
            {name: (system.drafter, system.params) for name, system in systems.items()},
            questions,
            draft_lengths=draft_lengths,
            temperature=temperatures,
            num_slots=values.num_slots,
            max_new_tokens=values.max_new_tokens,
            cache_length=values.cache_length,
            num_drafts=num_drafts,
            verifier=values.verifier,
            top_k=values.top_k,
            top_p=values.top_p,
            min_p=values.min_p,
            seed=values.seed,
            repeats=values.repeats,
            training_templates={name: system.template_digest for name, system in systems.items()},
            on_progress=on_progress,
        )
    result["warnings"] += [note for system in systems.values() for note in system.notes]
    print_results(result)
    for warning in result["warnings"]:
        print(f"warning: {warning}", file=sys.stderr)
    if folder is not None:
        print(write_benchmark(result, folder))
    return 0


def _questions() -> list[Question]:
    values = flags.FLAGS
    if values.questions is not None:
        questions = load_questions(values.questions)
    else:
        questions = [_as_question(prompt) for prompt in load_prompts(values.prompts, tuple(values.kinds) or None)]
    return spread(questions, values.num_questions)


def _load() -> tuple[Target, dict[str, LoadedSystem]]:
    values = flags.FLAGS
    return load_command(
        **command_flags.source_arguments(), ngram=values.ngram, self_draft_layers=values.self_draft_layers
    )


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    command_flags.define_source()
    command_flags.define_output()
    flags.DEFINE_bool("ngram", True, "Measure prompt lookup as well.")
    flags.DEFINE_string(
        "self_draft_layers", None, "Draft with these layers of the target itself, without training: 0-15,18-29."
    )
    flags.DEFINE_string("questions", None, "File of questions in MT-Bench's form, one JSON object a line.")
    flags.DEFINE_enum("prompts", "held_out", ["held_out", "train"], "Shipped prompts, where no --questions are given.")
    flags.DEFINE_list("kinds", [], "Kinds of shipped prompts; all by default.")
    flags.DEFINE_integer("num_questions", None, "Questions to ask, taken in turn from every kind; all by default.")
    flags.DEFINE_list("draft_lengths", ["1", "2", "4"], "Drafts a step.")
    flags.DEFINE_list("temperatures", ["0"], "Temperatures; 0 is greedy.")
    flags.DEFINE_integer("top_k", 0, "Keep the k likeliest tokens; 0 is off.")
    flags.DEFINE_float("top_p", 1.0, "Keep the likeliest tokens of this total probability; 1 is off.")
    flags.DEFINE_float("min_p", 0.0, "Keep tokens of at least this share of the largest probability; 0 is off.")
    flags.DEFINE_integer("num_slots", 1, "Prompts decoded side by side.")
    flags.DEFINE_integer("max_new_tokens", 256, "Longest answer.")
    flags.DEFINE_integer("cache_length", None, "Slots of the cache; fits the longest conversation by default.")
    flags.DEFINE_list("num_drafts", ["1"], "Independent drafts a step; several numbers with --verifiers.")
    flags.DEFINE_string("verifier", "token", "Verification rule.")
    flags.DEFINE_list(
        "verifiers",
        [],
        "Compare rules on one drafter, at all numbers of drafts, lengths and temperatures: names, or all.",
    )
    flags.DEFINE_integer("repeats", 1, "Timed runs of each prompt.")
    flags.DEFINE_integer("seed", 0, "Seed of the first question.", lower_bound=0)


if __name__ == "__main__":
    define_flags()
    run_command(main)
