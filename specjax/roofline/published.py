"""Published measurements beside this model's predictions, and the two of them that its constants are fitted on.

All of SlimSpec's (arXiv 2605.10453: vLLM, one H200, EAGLE-3 drafters, temperature 0). Two constants are free:

* `kernel_seconds`, from nu = 0.21 of the low-rank head at d/8 (Llama-3.1-8B, one row);
* `pass_overhead_seconds`, from kappa = 0.25 (same target and setting).

Everything else is a prediction, the shares of three targets included. The number of drafts a cycle is not in what we
could read of the paper; six is its example.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

from specjax import cost
from specjax.roofline.hardware import HARDWARE, Hardware
from specjax.roofline.head_shapes import HeadShape
from specjax.roofline.passes import DrafterShape, Setting, step_time, target_seconds
from specjax.roofline.target_shapes import PUBLISHED_SHAPES, SHORT_NAMES, TargetShape

DRAFT_LENGTH = 6
# Relative acceptance lengths of the same table, for the cells that are speed-ups.
_RHO_TAU = {"low_rank d/8": 0.99, "low_rank d/16": 0.98, "spec_vocab d/8": 1.01, "vocab_trim 64K": 0.995}
_FULL_TAU = 4.42


@dataclasses.dataclass(frozen=True)
class Cell:
    """One published number and its prediction.

    Attributes:
        target: short name of the target.
        quantity: what it is.
        published: the paper's value.
        predicted: ours.
        fitted: whether a constant was fitted on it.
    """

    target: str
    quantity: str
    published: float
    predicted: float
    fitted: bool = False

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.published - 1.0


def _shape(name: str) -> TargetShape:
    return PUBLISHED_SHAPES[SHORT_NAMES[name]]


def _heads(target: TargetShape) -> dict[str, HeadShape]:
    width, vocab = target.hidden_size, target.vocab_size
    return {
        "full": HeadShape("full", width, vocab),
        "low_rank d/8": HeadShape("low_rank", width, vocab, rank=width // 8),
        "low_rank d/16": HeadShape("low_rank", width, vocab, rank=width // 16),
        "spec_vocab d/8": HeadShape("spec_vocab", width, vocab, rank=width // 8, num_candidates=2048),
        **{f"vocab_trim {k}K": HeadShape("vocab_trim", width, vocab, num_rows=1024 * k) for k in (64, 32, 16)},
    }


@dataclasses.dataclass(frozen=True)
class _Case:
    """Step times of all heads of one target at one batch."""

    plain: float
    steps: dict[str, cost.StepTime]

    def nu(self, head: str) -> float:
        return cost.nu(self.steps[head].head, self.steps["full"].head)

    @property
    def kappa(self) -> float:
        return self.steps["full"].kappa

    def gain(self, head: str, rho_tau: float) -> float:
        return cost.rho_tps(rho_tau=rho_tau, nu=self.nu(head), kappa=self.kappa)

    def speed_up(self, head: str, tau: float) -> float:
        return cost.speed_up(tau=tau, plain_seconds=self.plain, step_seconds=self.steps[head].total)


def _case(
    name: str, hardware: Hardware, draft_length: int, batch: int = 1, only: Collection[str] | None = None
) -> _Case:
    target, setting = _shape(name), Setting(batch=batch, draft_length=draft_length)
    drafter = DrafterShape.for_target(target)
    heads = {label: head for label, head in _heads(target).items() if only is None or label in only}
    steps = {label: step_time(target, drafter, head, setting, hardware) for label, head in heads.items()}
    return _Case(target_seconds(target, setting, hardware), steps)


def predict_cells(hardware: Hardware | None = None, *, draft_length: int = DRAFT_LENGTH) -> list[Cell]:
    """Cost figures of the paper: nu, kappa and the head's share of drafting time.

    Args:
        hardware: another set of constants; None is the built-in H200.
        draft_length: drafts a cycle.
    """
    hardware = hardware or HARDWARE["h200"]
    llama = _case("llama-3.1-8b", hardware, draft_length)
    nus = {"low_rank d/8": 0.21, "low_rank d/16": 0.14, "spec_vocab d/8": 0.46}
    nus |= {"vocab_trim 64K": 0.58, "vocab_trim 32K": 0.33, "vocab_trim 16K": 0.20}
    cells = [
        Cell("llama-3.1-8b", f"nu, {head}", value, llama.nu(head), fitted=head == "low_rank d/8")
        for head, value in nus.items()
    ]
    cells.append(Cell("llama-3.1-8b", "kappa", 0.25, llama.kappa, fitted=True))
    for name, value in (("llama-3.1-8b", 0.46), ("gpt-oss-20b", 0.58), ("qwen3-30b-a3b", 0.51)):
        step = _case(name, hardware, draft_length).steps["full"]
        cells.append(Cell(name, "full head's share of drafting", value, step.head_share_of_drafting))
    return cells


def predict_speed_ups(hardware: Hardware | None = None, *, draft_length: int = DRAFT_LENGTH) -> list[Cell]:
    """Speed-ups that follow from those and from the paper's own acceptance lengths, and three rates of other sources.

    Over the full head: Eq. 4 with the published rho_tau. Over plain decoding: tau times plain step over cycle. For
    Qwen3-30B-A3B no acceptance was published: d/8 is taken to keep 0.99 as it does for Llama-3.1-8B.
    """
    hardware = hardware or HARDWARE["h200"]
    cells = []
    llama = _case("llama-3.1-8b", hardware, draft_length)
    reported = {"vocab_trim 64K": 1.09, "spec_vocab d/8": 1.16, "low_rank d/8": 1.19, "low_rank d/16": 1.18}
    for head, value in reported.items():
        cells.append(Cell("llama-3.1-8b", f"over full, {head}", value, llama.gain(head, _RHO_TAU[head])))
    over_plain = {
        1: {"full": 2.48, "vocab_trim 64K": 2.70, "spec_vocab d/8": 2.86, "low_rank d/8": 2.94},
        64: {"full": 1.40, "vocab_trim 64K": 1.41, "spec_vocab d/8": 1.46, "low_rank d/8": 1.52},
    }
    for batch, values in over_plain.items():
        case = _case("llama-3.1-8b", hardware, draft_length, batch)
        for head, value in values.items():
            tau = _FULL_TAU * _RHO_TAU.get(head, 1.0)
            cells.append(Cell("llama-3.1-8b", f"over plain, B={batch}, {head}", value, case.speed_up(head, tau)))
    for batch, value in ((1, 2.05 / 1.91), (64, 1.40 / 1.34)):
        gain = _case("qwen3-30b-a3b", hardware, draft_length, batch).gain("low_rank d/8", 0.99)
        cells.append(Cell("qwen3-30b-a3b", f"over full, B={batch}, low_rank d/8", value, gain))
    # One row in SGLang: EAGLE-3's paper (arXiv 2503.01840), the SpecDrift model card, EAGLE's discussions.
    plain = (("llama-3.1-8b", "h100", 158.0), ("gpt-oss-20b", "h100", 304.9), ("qwen3-30b-a3b", "h200", 147.0))
    for name, machine, value in plain:
        seconds = target_seconds(_shape(name), Setting(), HARDWARE[machine])
        cells.append(Cell(name, f"plain tokens/s on {machine}", value, 1.0 / seconds))
    return cells


def fit_constants(*, draft_length: int = DRAFT_LENGTH, nu: float = 0.21, kappa: float = 0.25) -> tuple[float, float]:
    """The two free constants, from nu of the low-rank head at d/8 and from kappa (Llama-3.1-8B, H200, one row).

    Args:
        draft_length: drafts a cycle.
        nu: the head's published relative cost.
        kappa: the published weight of the full head.

    Returns:
        `kernel_seconds` and `pass_overhead_seconds`.

    Raises:
        ValueError: if no constants in [0, 1 ms] give those values.
    """
    base = dataclasses.replace(HARDWARE["h200"], pass_overhead_seconds=0.0)

    def with_kernel(seconds: float) -> Hardware:
        return dataclasses.replace(base, kernel_seconds=seconds)

    def fitted(machine: Hardware) -> _Case:
        return _case("llama-3.1-8b", machine, draft_length, only=("full", "low_rank d/8"))

    def nu_error(seconds: float) -> float:
        return fitted(with_kernel(seconds)).nu("low_rank d/8") - nu

    kernel_seconds = _root(nu_error, "nu")

    def kappa_error(seconds: float) -> float:
        machine = dataclasses.replace(with_kernel(kernel_seconds), pass_overhead_seconds=seconds)
        return kappa - fitted(machine).kappa

    return kernel_seconds, _root(kappa_error, "kappa")


def _root(increasing: Callable[[float], float], name: str) -> float:
    """Where a function that grows in [0, 1 ms] is zero, by bisection."""
    low, high = 0.0, 1e-3
    if increasing(low) > 0.0 or increasing(high) < 0.0:
        raise ValueError(f"`{name}` cannot be reached by any constant in [0, 1 ms]")
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if increasing(middle) < 0.0 else (low, middle)
    return (low + high) / 2
