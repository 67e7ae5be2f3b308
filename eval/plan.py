"""What every draft head would cost and gain on a target and a machine, before anything is trained.

    python -m eval.plan --target=llama-3.1-8b --hardware=h200 --batch=1
    python -m eval.plan --target=FOLDER/config.json --hardware_file=mine.json --output=plan.json

Predicts kappa, nu, the break-even of rho_tau and the expected speed-up of each head from shapes alone, recommends a
rank, and shows how the same formulas do on published measurements. docs/plan.md has the formulas and the limits.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence

from absl import flags

from eval import files
from eval.command_line import int_list, run_command
from eval.plan_tables import plan_document, print_plan, print_published
from specjax.roofline import Hardware, Setting, get_hardware, load_target_shape, plan_heads, read_hardware
from specjax.roofline.hardware import HARDWARE
from specjax.roofline.published import DRAFT_LENGTH, predict_cells, predict_speed_ups

DEFAULT_HARDWARE = "h200"


def define_flags() -> None:
    """The command's flags; only a command defines any."""
    flags.DEFINE_string(
        "target",
        None,
        "llama-3.1-8b, gpt-oss-20b, qwen3-30b-a3b, a config.json, a folder with one, a .gguf file or a hub name.",
        required=True,
    )
    flags.DEFINE_string("hardware", None, f"{', '.join(HARDWARE)}; {DEFAULT_HARDWARE} by default.")
    flags.DEFINE_string("hardware_file", None, "JSON file that describes a machine; see docs/plan.md.")
    flags.DEFINE_integer("batch", 1, "Rows that decode together.", lower_bound=1)
    flags.DEFINE_integer("draft_length", DRAFT_LENGTH, "Drafts a cycle.", lower_bound=1)
    flags.DEFINE_integer("context", 512, "Tokens in each row's cache.", lower_bound=0)
    flags.DEFINE_enum("dtype", None, ["float32", "bfloat16", "float8"], "Of the weights; the machine's by default.")
    flags.DEFINE_list("ranks", [], "Ranks of the low-rank head; d/2, d/4, d/8, d/16 and d/32 by default.")
    flags.DEFINE_integer(
        "drafter_intermediate_size", None, "Feed-forward width of the draft layer; the target's by default."
    )
    flags.DEFINE_float("full_tau", None, "Acceptance length with the full head; a published one by default.")
    flags.DEFINE_multi_string(
        "rho_tau", [], "HEAD=VALUE: relative acceptance length that you know better; HEAD as in the table, or its kind."
    )
    flags.DEFINE_bool("published", True, "Also show the same formulas beside published measurements.")
    flags.DEFINE_string("cache_dir", None, "Where fetched models are kept; the user's cache by default.")
    flags.DEFINE_string("output", None, "Write everything as one JSON document to this file.")


def main() -> None:
    """Prints the plan that the flags ask for.

    Raises:
        ValueError: for a value out of range or a flag without effect.
        FileNotFoundError: if the target or the hardware file is not there.
    """
    values = flags.FLAGS
    # A hub that cannot be reached is one line of ours, not a dozen about retries.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    if values.output is not None and pathlib.Path(values.output).is_dir():
        raise ValueError(f"`--output` must be a file; got the folder {values.output}")
    hardware = _hardware(values.hardware, values.hardware_file)
    rho_tau = parse_rho_tau(values.rho_tau)
    ranks = int_list("ranks", values.ranks, minimum=1)[::-1] if values.ranks else None
    setting = Setting(values.batch, values.draft_length, values.context, values.dtype or hardware.dtype)
    plan = plan_heads(
        load_target_shape(values.target, cache_dir=values.cache_dir),
        hardware,
        setting,
        ranks=ranks,
        drafter_intermediate_size=values.drafter_intermediate_size,
        full_tau=values.full_tau,
        rho_tau=rho_tau,
    )
    cells, speed_ups = (predict_cells(), predict_speed_ups()) if values.published else ([], [])
    if values.output is not None:
        files.write_json(pathlib.Path(values.output), plan_document(plan, cells, speed_ups))
    print_plan(plan)
    if values.published:
        print_published(cells, speed_ups)


def _hardware(name: str | None, path: str | None) -> Hardware:
    if path is not None:
        if name is not None:
            raise ValueError("`--hardware` has no effect with `--hardware_file`: a file names its own `base`")
        return read_hardware(path)
    return get_hardware(name or DEFAULT_HARDWARE)


def parse_rho_tau(entries: Sequence[str]) -> dict[str, float]:
    """Relative acceptance lengths out of HEAD=VALUE entries; the value follows the last equals sign.

    Raises:
        ValueError: if an entry is not of that form.
    """
    result = {}
    for entry in entries:
        name, separator, text = entry.rpartition("=")
        try:
            result[name] = float(text)
        except ValueError:
            separator = ""
        if not separator or not name:
            raise ValueError(f"`--rho_tau` must be HEAD=VALUE, for example low_rank=0.97; got {entry!r}")
    return result


if __name__ == "__main__":
    define_flags()
    run_command(main)
