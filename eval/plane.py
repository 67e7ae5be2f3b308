"""The acceptance-cost plane of all heads of one run: what each costs, what it keeps of acceptance, what that is worth.

python -m eval.plane --run=RUN_DIR
python -m eval.plane --run=RUN_DIR --quick

RUN_DIR is a directory of `python -m train.heads`, which ends with this measurement by itself. Killed at any time, the
same command goes on where it stopped, and after more heads were trained it decodes with those alone; costs are timed
for all heads at once. docs/plane.md says how to read the result.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from absl import flags

from eval.command_line import float_list, int_list, run_command
from eval.heads_directory import HeadsDirectory
from eval.plane_heads import FULL, load_heads
from eval.plane_runner import PlaneSettings, measure_plane, write_plane
from eval.plane_tables import print_plane
from eval.questions import Question, load_questions, spread
from specjax.checkpoints.target import load_target
from specjax.text.prompts import load_prompts

_KINDS = ("chat", "code", "maths")
# By whether the run is a quick one.
_SETTINGS = {
    False: PlaneSettings(),
    True: PlaneSettings(draft_lengths=(2,), batches=(1,), max_new_tokens=12, num_steps=4),
}
_NUM_QUESTIONS = {False: 24, True: 6}


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    flags.DEFINE_string("run", None, "Directory of `python -m train.heads`.", required=True)
    flags.DEFINE_list("heads", [], "Names of heads in it; all by default. The full head is always among them.")
    usual = _SETTINGS[False]
    flags.DEFINE_list("draft_lengths", [str(length) for length in usual.draft_lengths], "Drafts a step.")
    flags.DEFINE_list("temperatures", [str(temperature) for temperature in usual.temperatures], "Temperatures.")
    flags.DEFINE_list("batches", [str(batch) for batch in usual.batches], "Rows of the cost measurements.")
    flags.DEFINE_integer("num_slots", usual.num_slots, "Prompts decoded side by side for acceptance and wall clock.")
    flags.DEFINE_string("questions", None, "File of questions in MT-Bench's form, one JSON object a line.")
    flags.DEFINE_list("kinds", list(_KINDS), "Kinds of shipped held-out prompts.")
    flags.DEFINE_integer(
        "num_questions", _NUM_QUESTIONS[False], "Prompts, taken in turn from each kind.", lower_bound=1
    )
    flags.DEFINE_integer("max_new_tokens", usual.max_new_tokens, "Longest answer.")
    flags.DEFINE_integer("num_steps", usual.num_steps, "Timed steps of each cost measurement.")
    flags.DEFINE_integer("seed", usual.seed, "Seed of the first prompt.")
    flags.DEFINE_bool("quick", False, "Few prompts and steps: checks that everything works, measures nothing.")
    flags.DEFINE_string("output_dir", None, "Folder for result files; eval/ of the run directory by default.")
    flags.DEFINE_string("cache_dir", None, "Where fetched weights are kept; the user's cache by default.")


def read_settings() -> PlaneSettings:
    """The settings that the flags ask for; what is not given is small in a quick run.

    Raises:
        ValueError: if one is out of range.
    """
    values = flags.FLAGS
    lists = {
        "draft_lengths": int_list("draft_lengths", values.draft_lengths, minimum=1),
        "temperatures": tuple(dict.fromkeys(float_list("temperatures", values.temperatures, minimum=0.0))),
        "batches": int_list("batches", values.batches, minimum=1),
    }
    names = [field.name for field in dataclasses.fields(PlaneSettings) if values[field.name].present]
    given = {name: lists.get(name, values[name].value) for name in names}
    return dataclasses.replace(_SETTINGS[values.quick], **given)


def measure_with_defaults(run_dir: str | pathlib.Path, *, quick: bool = False, cache_dir: str | None = None) -> None:
    """Measures, prints and writes what the command does without further flags; `python -m train.heads` ends so.

    Args:
        run_dir: directory of heads.
        quick: as `--quick`.
        cache_dir: as `--cache_dir`.

    Raises:
        ValueError: if a file there is damaged.
        FileNotFoundError: if the directory holds no heads.
    """
    questions = spread(_shipped(_KINDS), _NUM_QUESTIONS[quick])
    _measure(HeadsDirectory.open(run_dir), questions, _SETTINGS[quick], cache_dir=cache_dir)


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
    is_given = values["num_questions"].present
    return spread(questions, values.num_questions if is_given else _NUM_QUESTIONS[values.quick])


if __name__ == "__main__":
    define_flags()
    run_command(main)
