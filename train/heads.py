"""Trains or derives all draft heads on one backbone and one set of data, and draws their acceptance-cost plane.

python -m train.heads --flagfile=smollm2.flags --heads=all
python -m train.heads --flagfile=smollm2.flags --heads=full,low_rank:rank=72,vocab_trim:rows=v/4 --seeds=0,1,2

Every flag of `python -m train.slimspec` but those of a single head applies to all of them. The same command goes on
where an earlier one stopped, and one with more heads adds them. `python -m eval.plane` measures at the end;
`--nomeasure` leaves that out, for settings of one's own.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Sequence

from specjax.heads import get_head
from train.config import MOST_STEPS, TrainConfig
from train.error_file import REPORTED_ERRORS, error_file
from train.flag_values import parse_numbers
from train.flagfile import PACKAGED_FOLDER
from train.flags import EMBEDDED_DEFAULT, parse_command_line
from train.head_list import ALL, HeadRequest, PlannedHead, parse_heads, plan_heads
from train.slimspec import EXIT_BAD_FLAGS, EXIT_FAILED, EXIT_INTERRUPTED, report_error

QUICK_FLAGS = PACKAGED_FOLDER / "quick.flags"

_OWN = re.compile(r"--?(heads|seeds|quick|noquick|measure|nomeasure|frequency_text)(?:=(.*))?$", re.DOTALL)
_ONE_HEAD = re.compile(r"--?(?:no)?(head|rank|head_options|base)(=|$)")
_HELP = """Trains several draft heads on the same data: python -m train.heads --flagfile=smollm2.flags --heads=all

  --heads: Heads with commas between, settings behind a colon: full,low_rank:rank=d/8,vocab_trim:rows=v/4,trained=true.
    'all' is every kind of head at the sizes of published comparisons. The full head is always among them.
    (default: 'all')
  --seeds: Seeds with commas between; one drafter of each head for each, all on the data of `--seed`.
    (default: `--seed`)
  --[no]quick: Small sizes, for minutes: checks that everything works, measures nothing. (default: 'false')

Flags of python -m train.slimspec, for all heads; without `--run_dir` the directory has "-heads" behind its name, and
without `--held_out_every` a head is tested once, at its end:
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Args:
        arguments: what follows the program's name; the process's own by default.

    Returns:
        0, or after one line on standard error: 1 if a run could not go on, 2 if the flags are wrong, 130 if it was
        interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        settings = _parse(arguments)
    except ValueError as error:
        return report_error(error, EXIT_BAD_FLAGS)
    try:
        _run(settings, arguments)
    except KeyboardInterrupt:
        return report_error("interrupted; the same command goes on where this one stopped", EXIT_INTERRUPTED)
    except REPORTED_ERRORS as error:
        return report_error(error, EXIT_FAILED)
    return 0


@dataclasses.dataclass(frozen=True)
class _Settings:
    """Settings of all heads, the heads, and what else was asked for."""

    config: TrainConfig
    requests: tuple[HeadRequest, ...]
    seeds: tuple[int, ...]
    quick: bool
    measure: bool


def _parse(arguments: Sequence[str]) -> _Settings:
    own: dict[str, str] = {}
    rest: list[str] = []
    for argument in arguments:
        if match := _OWN.match(argument):
            own[match[1].removeprefix("no")] = _value(match)
        elif match := _ONE_HEAD.match(argument):
            raise ValueError(f"`--{match[1]}` must be written in `--heads` (KIND:name=value); got {argument!r}")
        else:
            rest.append(argument)
    if any(re.fullmatch(r"--?help(full|short)?|-h|-\?", argument) for argument in rest):
        print(_HELP)
    quick = own.get("quick", "false") == "true"
    requests = parse_heads(own.get("heads", ALL), quick=quick)
    config = parse_command_line(_with_defaults(rest, quick))
    if not any(re.match(r"--?run_dir(=|$)", argument) for argument in rest):
        config = dataclasses.replace(config, run_dir=f"{config.run_dir}-heads{'-quick' if quick else ''}")
    if "frequency_text" in own:
        # A single run refuses it with a head that does not read it; here some heads may.
        config = dataclasses.replace(config, frequency_text=own["frequency_text"])
    seeds = parse_numbers("seeds", own["seeds"]) if "seeds" in own else (config.seed,)
    if max(seeds) >= 2**32:
        raise ValueError(f"`--seeds` must be below 2**32; got {max(seeds)}")
    return _Settings(config, requests, seeds, quick, own.get("measure", "true") == "true")


def _value(match: re.Match[str]) -> str:
    name, value = match.groups()
    if name in ("heads", "seeds", "frequency_text"):
        if not value:
            raise ValueError(f"`--{name}` must be written as --{name}=VALUE; got {match[0]!r}")
        return value
    if name.startswith("no") and value is None:
        return "false"
    if not name.startswith("no") and value in (None, "true", "false"):
        return value or "true"
    raise ValueError(f"`--{name.removeprefix('no')}` must be true or false; got {match[0]!r}")


def _with_defaults(arguments: Sequence[str], quick: bool) -> list[str]:
    """The arguments behind what they win over: one test of each head, at its end, and the sizes of a quick run."""
    files = [index for index, argument in enumerate(arguments) if re.match(r"--?flagfile(=|$)", argument)]
    if not files:
        arguments, files = [f"--flagfile={EMBEDDED_DEFAULT}", *arguments], [0]
    # A flagfile's path may be an argument of its own.
    end = files[-1] + (1 if "=" in arguments[files[-1]] else 2)
    sizes = [f"--flagfile={QUICK_FLAGS}"] if quick else []
    return ["--noevaluate", f"--held_out_every={MOST_STEPS}", *arguments[:end], *sizes, *arguments[end:]]


def _run(settings: _Settings, arguments: Sequence[str]) -> None:
    # Imported here, so that a wrong flag is reported at once.
    from specjax.checkpoints.target import load_config
    from train import mesh
    from train.head_runs import head_config, run_heads
    from train.inputs import check_inputs

    config = settings.config
    check_inputs(config)
    planned = plan_heads(settings.requests, load_config(config.target), settings.seeds, data_seed=config.seed)
    if config.dry_run:
        for head in planned:
            head_config(config, head)  # what the run would refuse, the plan refuses
        print("\n".join(_plan_line(head) for head in planned))
        return
    mesh.start_processes(config.coordinator, config.num_processes, config.process_id)
    folder = run_heads(config, planned, arguments, on_line=lambda line: print(line, flush=True))
    print(f"done: {folder}", flush=True)
    if settings.measure and not config.process_id:
        from eval.plane import measure_with_defaults

        with error_file(folder):
            measure_with_defaults(folder, quick=settings.quick, cache_dir=config.cache_dir)


def _plan_line(head: PlannedHead) -> str:
    made = f"{'trained' if head.is_trained else 'derived'}{f' from {head.base}' if head.base else ''}"
    return f"{head.folder:<36} {get_head(head.config.kind).describe(head.config):<36} {made}"


if __name__ == "__main__":
    sys.exit(main())
