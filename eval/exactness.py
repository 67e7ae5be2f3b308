"""Checks that greedy speculative decoding gives the tokens of plain decoding, one by one.

python -m eval.exactness --run=RUN_DIR --draft_lengths=1,2,3,4,5,6,7,8 --batch_sizes=1,8

`--replay=0.15` adds a drafter that drafts the plain answers with that share of wrong tokens, so that every number of
accepted drafts occurs at every draft length; `accepted` in the output counts them.
"""

from __future__ import annotations

import collections
import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from absl import flags

from eval import command_flags, files
from eval.command_line import int_list, run_command
from eval.configuration_log import ConfigurationLog, settings_digest
from eval.divergence import Divergence, find_divergence
from eval.loading import load_command
from eval.provenance import describe_run, describe_system, describe_target, source_digest
from eval.questions import Question, load_questions, spread
from eval.records import PLAIN
from eval.replay import ReplayDrafter, check_error_rate, replay_texts
from specjax.decoding import Completion, Engine, Request, SamplingParams
from specjax.text.chat_template import encode_prompt
from specjax.text.prompts import load_prompts


def check_exactness(
    target: Any,
    systems: Mapping[str, tuple[Any, Any]],
    prompts: Sequence[Sequence[int]],
    *,
    draft_lengths: Sequence[int],
    batch_sizes: Sequence[int] = (1,),
    max_new_tokens: int = 256,
    cache_length: int | None = None,
    replay: float | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
    log_path: pathlib.Path | None = None,
    identity: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Decodes all prompts greedily in every way and compares with plain decoding of one prompt at a time.

    Args:
        target: a loaded target.
        systems: name to (drafter, parameters).
        prompts: token ids of each prompt.
        draft_lengths: drafts a step.
        batch_sizes: rows side by side; larger ones than 1 are checked without drafts too.
        max_new_tokens: longest answer.
        cache_length: slots; None fits the longest prompt and answer within the context.
        replay: share of wrong tokens of a drafter that drafts the plain answers; None leaves it out.
        on_row: told each row as it is done.
        log_path: a growing file of rows; those that it holds for the same settings are not measured again.
        identity: what else tells runs apart in that file, such as the drafters' digests.

    Returns:
        A JSON-able dict with `rows`, `exact` (whether all rows are identical) and what ran where. A row counts
        `compared`, `identical` and `num_tokens`, says how many steps accepted 0, 1, ... drafts (`accepted`) and lists
        `divergences`, each with the gap of the target's two top logits where the texts part.

    Raises:
        ValueError: if there are no prompts, or none that fits, or `replay` is no share, or the log is no such file.
    """
    if not prompts:
        raise ValueError("`prompts` must hold at least one prompt")
    if replay is not None:
        check_error_rate("replay", replay)
    if cache_length is None:
        longest = max(len(prompt) for prompt in prompts) + max_new_tokens
        cache_length = min(longest, target.config.max_position_embeddings)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    requests = [Request(str(index), tuple(prompt), params) for index, prompt in enumerate(prompts)]

    def decode(drafter: Any, drafter_params: Any, length: int, batch: int) -> list[Completion]:
        engine = Engine(
            target, drafter, drafter_params, num_slots=batch, cache_length=cache_length, draft_length=length
        )
        return engine.generate(requests)

    settings = {"max_new_tokens": max_new_tokens, "cache_length": cache_length, "num_prompts": len(prompts)}
    log = None
    if log_path is not None:
        prompts_digest = settings_digest({"prompts": [list(map(int, prompt)) for prompt in prompts]})
        log = ConfigurationLog(
            log_path,
            {
                **settings,
                "prompts_digest": prompts_digest,
                "target": describe_target(target),
                "jax": jax.__version__,
                # Rows of other code say nothing about this one.
                "source": source_digest(),
                **(identity or {}),
            },
        )
    reference = _reference(log, lambda: decode(None, None, 0, 1))
    # A prompt that cannot be served has no answer to compare; it must not pass as two equal ones.
    served = [index for index, plain in enumerate(reference) if not plain.failed]
    if not served:
        raise ValueError(f"no prompt can be served: {reference[0].finish_reason}")
    requests, reference = [requests[index] for index in served], [reference[index] for index in served]
    ways = [(PLAIN, None, None, 0, batch) for batch in batch_sizes if batch != 1]
    if replay is not None:
        texts = [(*plain.prompt_ids, *plain.token_ids) for plain in reference]
        known = replay_texts(texts, error_rate=replay, vocab_size=target.config.vocab_size)
        systems = {f"replay-{replay:g}": (ReplayDrafter(target.config.vocab_size), known), **systems}
    for name, (drafter, drafter_params) in systems.items():
        ways += [(name, drafter, drafter_params, length, batch) for batch in batch_sizes for length in draft_lengths]
    rows = []
    for name, drafter, drafter_params, length, batch in ways:
        model_id = f"{name} L={length} batch={batch}"
        if log is not None and model_id in log.rows:
            rows.append(log.rows[model_id]["row"])
        else:
            own = decode(drafter, drafter_params, length, batch)
            rows.append(_compare(target, name, length, batch, reference, own))
            if log is not None:
                log.add({"model_id": model_id, "row": rows[-1]}, [])
        if on_row is not None:
            on_row(rows[-1])
    return {
        "schema": 1,
        "kind": "exactness",
        **describe_run(),
        "target": describe_target(target),
        "settings": settings,
        "num_not_served": len(prompts) - len(served),
        "exact": all(row["identical"] == row["compared"] for row in rows),
        "rows": rows,
    }


@dataclasses.dataclass(frozen=True)
class _Plain:
    """What is kept of a plain completion."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str
    failed: bool


def _reference(log: ConfigurationLog | None, decode: Callable[[], list[Completion]]) -> list[_Plain]:
    """The plain answers, from the log where it has them."""
    name = "reference"
    if log is not None and name in log.rows:
        return [
            _Plain(tuple(row["prompt_ids"]), tuple(row["token_ids"]), row["finish_reason"], row["failed"])
            for row in log.answers[name]
        ]
    plain = [_Plain(c.prompt_ids, c.token_ids, c.finish_reason, c.failed) for c in decode()]
    if log is not None:
        answers = [
            {"model_id": name, "question_id": index, **dataclasses.asdict(each)} for index, each in enumerate(plain)
        ]
        log.add({"model_id": name}, answers)
    return plain


def _compare(
    target: Any, name: str, length: int, batch: int, reference: Sequence[_Plain], own: Sequence[Completion]
) -> dict[str, Any]:
    divergences: list[tuple[str, Divergence]] = []
    for expected, completion in zip(reference, own, strict=True):
        found = find_divergence(target, expected.prompt_ids, expected.token_ids, completion.token_ids)
        if found is not None:
            divergences.append((completion.request_id, found))
    accepted = collections.Counter(step.num_accepted for completion in own for step in completion.steps)
    steps = accepted.total()
    num_tokens = sum(len(completion.token_ids) for completion in own)
    return {
        "system": name,
        "draft_length": length,
        "batch_size": batch,
        "compared": len(own),
        "identical": len(own) - len(divergences),
        "num_tokens": num_tokens,
        "acceptance_length": num_tokens / steps if steps else None,
        "accepted": [accepted[count] for count in range(length + 1)],
        "divergences": [{"prompt": prompt, **divergence.to_json()} for prompt, divergence in divergences],
    }


def print_header() -> None:
    """Prints the table's first line."""
    print(f"{'system':<14}{'L':>3}{'batch':>7}{'tokens':>9}{'tau':>7}{'identical':>12}  first difference")


def print_row(row: Mapping[str, Any]) -> None:
    """Prints one row of the table."""
    tau = "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
    told = [
        f"prompt {d['prompt']} token {d['position']}: {d['plain_token']} became {d['speculative_token']}, "
        f"top-2 gap {d['gap']:.2g}"
        for d in row["divergences"][:1]
    ]
    print(
        f"{row['system'][:14]:<14}{row['draft_length']:>3}{row['batch_size']:>7}{row['num_tokens']:>9}{tau:>7}"
        f"{row['identical']:>6}/{row['compared']:<5}  {''.join(told)}",
        flush=True,
    )


def main() -> int:
    """The command; its status is 1 if anything differs."""
    values = flags.FLAGS
    draft_lengths = int_list("draft_lengths", values.draft_lengths, minimum=1)
    batch_sizes = int_list("batch_sizes", values.batch_sizes, minimum=1)
    if values.replay is not None:
        check_error_rate("--replay", values.replay)
    folder = command_flags.output_folder()
    if values.questions is not None:
        questions = load_questions(values.questions)
    else:
        questions = [Question(prompt.id, prompt.kind, prompt.turns) for prompt in load_prompts("held_out")]
    target, systems = load_command(**command_flags.source_arguments(), ngram=values.ngram)
    prompts = [
        encode_prompt(target.tokenizer, target.chat_template, [{"role": "user", "content": question.turns[0]}])
        for question in spread(questions, values.num_questions or None)
    ]
    print_header()
    result = check_exactness(
        target,
        {name: (system.drafter, system.params) for name, system in systems.items()},
        prompts,
        draft_lengths=draft_lengths,
        batch_sizes=batch_sizes,
        max_new_tokens=values.max_new_tokens,
        cache_length=values.cache_length,
        replay=values.replay,
        on_row=print_row,
        log_path=folder / "exactness.jsonl" if folder is not None else None,
        identity={"drafters": {name: describe_system(s.drafter, s.params) for name, s in systems.items()}},
    )
    if folder is not None:
        print(files.write_json(folder / "exactness.json", result))
    if not result["exact"]:
        print("error: speculative and plain decoding differ at temperature 0", file=sys.stderr)
        return 1
    return 0


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    command_flags.define_source()
    command_flags.define_output()
    flags.DEFINE_bool("ngram", True, "Check prompt lookup as well.")
    flags.DEFINE_float("replay", None, "Also draft the plain answers with this share of wrong tokens, in [0, 1).")
    flags.DEFINE_string("questions", None, "File of questions in MT-Bench's form; shipped held-out prompts by default.")
    flags.DEFINE_integer("num_questions", 12, "Prompts, in turn from every kind; 0 takes all.", lower_bound=0)
    flags.DEFINE_list("draft_lengths", ["1", "2", "4", "8"], "Drafts a step.")
    flags.DEFINE_list("batch_sizes", ["1", "8"], "Rows side by side.")
    flags.DEFINE_integer("max_new_tokens", 256, "Longest answer.", lower_bound=1)
    flags.DEFINE_integer("cache_length", None, "Slots of the cache; a small one tests the context's end.")


if __name__ == "__main__":
    define_flags()
    run_command(main)
