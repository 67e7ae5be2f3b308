"""Before any training: what each head would cost and gain on a target and a machine, and which rank to train."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from specjax import cost
from specjax.cost import StepTime
from specjax.roofline.hardware import Hardware
from specjax.roofline.head_shapes import HeadShape, head_family, head_params
from specjax.roofline.passes import DrafterShape, Setting, step_time, target_seconds
from specjax.roofline.target_shapes import TargetShape
from specjax.roofline.work import Number

# Acceptance relative to the full head, Llama-3.1-8B, temperature 0 (arXiv 2605.10453, Fig. 3 and Table 3): rank d/8
# kept 0.99 and d/16 0.98. A loss in proportion to d/r goes through both.
LOW_RANK_LOSS = 0.01 / 8
TRAINED_STATIC_RHO_TAU = {16384: 0.90, 32768: 0.96, 65536: 0.995}
FR_SPEC_RHO_TAU = {32768: 3.86 / 4.42}
SPEC_VOCAB_RHO_TAU = 1.01
CORAL_RHO_TAU = 4.63 / 4.90
DYNA_SPEC_RHO_TAU = 0.984
# Acceptance lengths of the full or KL-trained head, mean over MT-Bench, HumanEval and GSM8K at temperature 0.
PUBLISHED_TAU = {
    "meta-llama/Llama-3.1-8B-Instruct": (4.42, "arXiv 2605.10453"),
    "openai/gpt-oss-20b": (3.47, "arXiv 2602.23881, chain of 7"),
}
# Ranks whose predicted gain is this close to the best are equal as far as this model can tell: the published relative
# acceptance lengths have two digits (half a percent each way), nu of small ranks is up to 0.011 off.
EQUAL_WITHIN = 0.015


def expected_rho_tau(head: HeadShape) -> tuple[float | None, str]:
    """Acceptance length to expect of a head relative to the full one, from published runs.

    Args:
        head: the head.

    Returns:
        The ratio and where it comes from; None where nothing was published for that size.
    """
    if head.kind == "full":
        return 1.0, "by definition"
    if head.kind == "low_rank":
        return max(0.0, 1.0 - LOW_RANK_LOSS * head.hidden_size / (head.rank or 1)), "1 - 0.00125 d/r"
    if head.kind == "vocab_trim":
        value = _interpolate(TRAINED_STATIC_RHO_TAU, head.num_rows or 0)
        return value, "2605.10453" if value is not None else "not published for this size"
    if head.kind == "fr_spec" and head.num_rows in FR_SPEC_RHO_TAU:
        return FR_SPEC_RHO_TAU[head.num_rows], "2605.10453"
    if head.kind == "spec_vocab":
        return SPEC_VOCAB_RHO_TAU, "2605.10453"
    if head.kind == "coral":
        return CORAL_RHO_TAU, "2502.16880"
    if head.kind == "dyna_spec":
        return DYNA_SPEC_RHO_TAU, "2510.13847"
    if head.kind == "bcl":
        return None, "slower than full in 2605.10453"
    return None, "not published"


def _interpolate(points: Mapping[int, float], size: int) -> float | None:
    """Linear in the logarithm of the size between known points; None outside them."""
    if size in points:
        return points[size]
    below, above = [p for p in points if p < size], [p for p in points if p > size]
    if not below or not above:
        return None
    low, high = max(below), min(above)
    share = math.log(size / low) / math.log(high / low)
    return points[low] + share * (points[high] - points[low])


@dataclasses.dataclass(frozen=True)
class HeadPlan:
    """What is predicted of one head.

    Attributes:
        head: its sizes.
        num_params: weights that a call reads.
        byte_ratio: those over the full head's.
        seconds: one call.
        nu: `seconds` over the full head's.
        break_even_rho_tau: the smallest relative acceptance length at which it is no slower than the full head.
        rho_tau: the relative acceptance length that is expected, or None.
        rho_tau_source: where that comes from.
        rho_tps: token rate over the full head's at that acceptance, or None.
        speed_up: token rate over plain decoding's, or None.
    """

    head: HeadShape
    num_params: Number
    byte_ratio: float
    seconds: float
    nu: float
    break_even_rho_tau: float
    rho_tau: float | None
    rho_tau_source: str
    rho_tps: float | None
    speed_up: float | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is predicted of a target on a machine.

    Attributes:
        target: the target.
        drafter: the draft layer.
        setting: batch, draft length, context, dtype.
        hardware: the machine.
        plain_seconds: one step of plain decoding.
        full_step: one cycle with the full head.
        full_tau: acceptance length of the full head, or None.
        full_tau_source: where that comes from.
        heads: a row for each head, the full one first.
        recommended_rank: of the low-rank head, or None if no rank is expected to gain.
        reason: why that one.
    """

    target: TargetShape
    drafter: DrafterShape
    setting: Setting
    hardware: Hardware
    plain_seconds: float
    full_step: StepTime
    full_tau: float | None
    full_tau_source: str
    heads: tuple[HeadPlan, ...]
    recommended_rank: int | None
    reason: str

    @property
    def kappa(self) -> float:
        """All full-head calls of a cycle over the rest of it."""
        return self.full_step.kappa


def plan_heads(
    target: TargetShape,
    hardware: Hardware,
    setting: Setting | None = None,
    *,
    ranks: Sequence[int] | None = None,
    drafter_intermediate_size: int | None = None,
    full_tau: float | None = None,
    rho_tau: Mapping[str, float] | None = None,
) -> Plan:
    """Predicts kappa, nu, break-even and speed-up of every head.

    Args:
        target: the target.
        hardware: the machine.
        setting: batch, draft length, context, dtype; None is one row, six drafts, the machine's dtype.
        ranks: of the low-rank heads; None is d/2 down to d/32.
        drafter_intermediate_size: width of the draft layer's feed-forward part; None follows the target.
        full_tau: acceptance length of the full head; None takes a published one if there is one.
        rho_tau: relative acceptance lengths that the user knows better, by label (`HeadShape.label`) or kind.

    Returns:
        The plan.

    Raises:
        ValueError: if a size is out of range, the machine has no rate for the dtype, or `rho_tau` names no head.
    """
    setting = Setting(dtype=hardware.dtype) if setting is None else setting
    drafter = DrafterShape.for_target(target, intermediate_size=drafter_intermediate_size)
    family = head_family(drafter.hidden_size, drafter.vocab_size, ranks)
    known = dict(rho_tau or {})
    for name, value in known.items():
        if not any(name in (head.label, head.kind) for head in family):
            raise ValueError(f"`rho_tau` must name a head ({', '.join(h.label for h in family)}); got {name!r}")
        if not (value > 0.0 and math.isfinite(value)):
            raise ValueError(f"`rho_tau` of {name} must be positive and finite; got {value!r}")
    tau_source = "given"
    if full_tau is None:
        full_tau, tau_source = PUBLISHED_TAU.get(target.name, (None, "unknown for this target"))
    elif not (full_tau >= 1.0 and math.isfinite(full_tau)):
        raise ValueError(f"`full_tau` must be at least 1; got {full_tau!r}")
    full_step = step_time(target, drafter, family[0], setting, hardware)
    plain = target_seconds(target, setting, hardware)
    rows = []
    for head in family:
        step = step_time(target, drafter, head, setting, hardware)
        nu = cost.nu(step.head, full_step.head)
        rho, source = expected_rho_tau(head)
        for name in (head.kind, head.label):
            if name in known:
                rho, source = known[name], "given"
        speed_up = None
        if rho is not None and full_tau is not None:
            tau = max(1.0, rho * full_tau)
            speed_up = cost.speed_up(tau=tau, plain_seconds=plain, step_seconds=step.total)
        params = head_params(head, setting.batch)
        rows.append(
            HeadPlan(
                head=head,
                num_params=params,
                byte_ratio=params / head_params(family[0]),
                seconds=step.head,
                nu=nu,
                break_even_rho_tau=cost.break_even_rho_tau(nu=nu, kappa=full_step.kappa),
                rho_tau=rho,
                rho_tau_source=source,
                rho_tps=cost.rho_tps(rho_tau=rho, nu=nu, kappa=full_step.kappa) if rho else None,
                speed_up=speed_up,
            )
        )
    rank, reason = recommend_rank(rows)
    return Plan(
        target=target,
        drafter=drafter,
        setting=setting,
        hardware=hardware,
        plain_seconds=plain,
        full_step=full_step,
        full_tau=full_tau,
        full_tau_source=tau_source,
        heads=tuple(rows),
        recommended_rank=rank,
        reason=reason,
    )


def recommend_rank(rows: Sequence[HeadPlan]) -> tuple[int | None, str]:
    """The rank to train: the largest whose expected gain is within 1.5 % of the best rank's.

    A larger rank is the safer one: its cost is known, its acceptance only expected.

    Args:
        rows: planned heads; those that are not low-rank are ignored.

    Returns:
        The rank and the reason; None when even the best rank is not expected to beat the full head.
    """
    ranked = [
        (row.rho_tps, row.head.rank, row)
        for row in rows
        if row.head.kind == "low_rank" and row.head.rank is not None and row.rho_tps is not None
    ]
    if not ranked:
        return None, "no low-rank head was planned"
    best, best_rank, _ = max(ranked, key=lambda entry: entry[0])
    if best <= 1.0:
        return None, f"the best rank, {best_rank}, is expected to reach {best:.3f} of the full head's rate"
    _, rank, row = max(
        (entry for entry in ranked if entry[0] >= (1.0 - EQUAL_WITHIN) * best), key=lambda entry: entry[1]
    )
    reason = (
        f"expected {row.rho_tps:.3f} of the full head's rate (best: {best:.3f} at rank {best_rank}); it pays while it "
        f"keeps more than {row.break_even_rho_tau:.3f} of the acceptance length"
    )
    return rank, reason
