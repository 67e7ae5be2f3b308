"""The acceptance-cost plane of all heads of one run: what each costs, what it keeps of acceptance, what that is worth.

python -m eval.plane --run=RUN_DIR
python -m eval.plane --run=RUN_DIR --quick

RUN_DIR is a directory of `python -m train.heads`, which ends with this measurement by itself. Killed at any time, the
same command goes on where it stopped, and after more heads were trained it measures those alone. docs/plane.md says
how to read the result.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from eval.command_line import float_list, int_list, run_command
from eval.heads_directory import HeadsDirectory
from eval.plane_heads import FULL, load_heads
from eval.plane_runner import PlaneSettings, measure_plane, write_plane
from eval.plane_tables import print_plane
from eval.questions import Question, load_questions, spread
from specjax.checkpoints.target import load_target
from specjax.text.prompts import load_prompts

# Of each setting its default, and the small one of a quick run.
_DEFAULTS: dict[str, Any] = {
    "draft_lengths": ["1", "2", "4"],
    "temperatures": ["0"],
    "batches": ["1", "8"],
    "num_slots": 1,
    "kinds": ["chat", "code", "maths"],
    "num_questions": 36,
    "max_new_tokens": 64,
    "num_steps": 24,
    "seed": 0,
}
_QUICK: dict[str, Any] = {
    **_DEFAULTS,
    "draft_lengths": ["2"],
    "batches": ["1"],
    "num_questions": 6,
    "max_new_tokens": 12,
    "num_steps": 4,
}


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    flags.DEFINE_string("run", None, "Directory of `python -m train.heads`.", required=True)
    flags.DEFINE_list("heads", [], "Names of heads in it; all by default. The full head is always among them.")
    flags.DEFINE_list("draft_lengths", _DEFAULTS["draft_lengths"], "Drafts a step.")
    flags.DEFINE_list("temperatures", _DEFAULTS["temperatures"], "Temperatures.")
    flags.DEFINE_list("batches", _DEFAULTS["batches"], "Rows of the cost measurements.")
    flags.DEFINE_integer(
        "num_slots", _DEFAULTS["num_slots"], "Prompts decoded side by side for acceptance and wall clock."
    )
    flags.DEFINE_string("questions", None, "File of questions in MT-Bench's form, one JSON object a line.")
    flags.DEFINE_list("kinds", _DEFAULTS["kinds"], "Kinds of shipped held-out prompts.")
    flags.DEFINE_integer(
        "num_questions", _DEFAULTS["num_questions"], "Prompts, taken in turn from each kind.", lower_bound=1
    )
    flags.DEFINE_integer("max_new_tokens", _DEFAULTS["max_new_tokens"], "Longest answer.")
    flags.DEFINE_integer("num_steps", _DEFAULTS["num_steps"], "Timed steps of each cost measurement.")
    flags.DEFINE_integer("seed", _DEFAULTS["seed"], "Seed of the first prompt.")
    flags.DEFINE_bool("quick", False, "Few prompts and steps: checks that everything works, measures nothing.")
    flags.DEFINE_string("output_dir", None, "Folder for result files; eval/ of the run directory by default.")
    flags.DEFINE_string("cache_dir", None, "Where fetched weights are kept; the user's cache by default.")


def read_settings(value: Callable[[str], Any] | None = None) -> PlaneSettings:
    """The settings that the flags ask for, or other values.

    Args:
        value: a setting by name; the flag of that name by default.

    Raises:
        ValueError: if one is out of range.
    """
    value = _flag if value is None else value
    return PlaneSettings(
        draft_lengths=int_list("draft_lengths", value("draft_lengths"), minimum=1),
        temperatures=tuple(dict.fromkeys(float_list("temperatures", value("temperatures"), minimum=0.0))),
        batches=int_list("batches", value("batches"), minimum=1),
        num_slots=value("num_slots"),
        max_new_tokens=value("max_new_tokens"),
        num_steps=value("num_steps"),
        seed=value("seed"),
    )


def measure_with_defaults(run_dir: str | pathlib.Path, *, quick: bool = False) -> None:
    """Measures, prints and writes what the command does without further flags; `python -m train.heads` ends so.

    Args:
        run_dir: directory of heads.
        quick: as `--quick`.

    Raises:
        ValueError: if a file there is damaged.
        FileNotFoundError: if the directory holds no heads.
    """
    value = (_QUICK if quick else _DEFAULTS).__getitem__
    questions = spread(_shipped(value("kinds")), value("num_questions"))
    _measure(HeadsDirectory.open(run_dir), questions, read_settings(value))


def main() -> None:
    """The command."""
    values = flags.FLAGS
    settings = read_settings()
    directory = HeadsDirectory.open(values.run)
    if values.heads:
        known = list(dict.fromkeys(head.name for head in directory.heads))
        unknown = [name for name in values.heads if name not in known]
        if unknown:
            raise ValueError(f"`--heads` must be among {', '.join(known)}; got {unknown[0]!r}")
        chosen = tuple(head for head in directory.heads if head.name in (FULL, *values.heads))
        directory = dataclasses.replace(directory, heads=chosen)
    folder = None if values.output_dir is None else pathlib.Path(values.output_dir)
    _measure(directory, _questions(), settings, folder=folder, cache_dir=values.cache_dir)


def _measure(
    directory: HeadsDirectory,
    questions: Sequence[Question],
    settings: PlaneSettings,
    *,
    folder: pathlib.Path | None = None,
    cache_dir: str | None = None,
) -> None:
    folder = directory.results if folder is None else folder
    target = load_target(directory.target, dtype=directory.target_dtype, cache_dir=cache_dir, date=directory.started)
    heads = load_heads(directory, target)
    result = measure_plane(target, heads, questions, settings, folder, on_line=lambda line: print(line, flush=True))
    print_plane(result)
    for path in write_plane(result, folder):
        print(path)


def _flag(name: str) -> Any:
    """A flag's value; what is not given is small in a quick run."""
    flag = flags.FLAGS[name]
    return _QUICK[name] if flags.FLAGS.quick and not flag.present else flag.value


def _shipped(kinds: Sequence[str]) -> list[Question]:
    return [Question(p.id, p.kind, p.turns) for p in load_prompts("held_out", tuple(kinds))]


def _questions() -> list[Question]:
    values = flags.FLAGS
    if values.questions is not None:
        if values["kinds"].present:
            raise ValueError("`--kinds` chooses shipped prompts and has no effect with `--questions`")
        questions = load_questions(values.questions)
    else:
        questions = _shipped(values.kinds)
    return spread(questions, _flag("num_questions"))


if __name__ == "__main__":
    define_flags()
    run_command(main)
