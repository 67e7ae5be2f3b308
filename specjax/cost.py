"""Cost model of speculative decoding: what a draft head is worth before and after it is measured.

Two views of one step, both from SlimSpec (arXiv 2605.10453, section 3), in pure functions of plain floats:

* *Head against head* (its Eq. 4). With nu = T_head / T_full_head, kappa = T_full_head / T_rest (all head calls of one
  cycle over everything else in it) and rho_tau = tau / tau_full, exchanging the full head for another one multiplies
  the token rate by

      rho_tps = rho_tau * (1 + kappa) / (1 + nu * kappa).

* *Step against plain step.* One speculative step with draft length L costs

      t_step(L) = t_verify(L + 1) + n_backbone * t_backbone + n_head * t_head + t_extend + t_overhead

  and commits tau tokens, so that its speed-up over plain decoding is tau * t_plain / t_step(L).

Times are seconds, sizes are bytes, rates are probabilities; `tau` is the acceptance length, bonus token included.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence


def _require_positive(name: str, value: int | float) -> None:
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"`{name}` must be positive and finite; got {value!r}")


def _require_not_negative(name: str, value: int | float) -> None:
    if not (value >= 0.0 and math.isfinite(value)):
        raise ValueError(f"`{name}` must be at least 0 and finite; got {value!r}")


def nu(head_seconds: float, full_head_seconds: float) -> float:
    """Cost of a head relative to the full head: nu = T_head / T_full_head.

    Args:
        head_seconds: time of one call of the head.
        full_head_seconds: time of one call of the full head, measured the same way.

    Returns:
        The ratio; 1 for the full head itself.

    Raises:
        ValueError: if a time is not positive.
    """
    _require_positive("head_seconds", head_seconds)
    _require_positive("full_head_seconds", full_head_seconds)
    return head_seconds / full_head_seconds


def kappa(full_head_seconds: float, rest_seconds: float) -> float:
    """Weight of the full head in a cycle: kappa = T_full_head / T_rest.

    Args:
        full_head_seconds: time of *all* calls of the full head in one cycle.
        rest_seconds: time of everything else in that cycle.

    Returns:
        The ratio. `kappa / (1 + kappa)` is the full head's share of the cycle.

    Raises:
        ValueError: if a time is not positive.
    """
    _require_positive("full_head_seconds", full_head_seconds)
    _require_positive("rest_seconds", rest_seconds)
    return full_head_seconds / rest_seconds


def rho_tau(tau: float, full_tau: float) -> float:
    """Acceptance length relative to the full head's: rho_tau = tau / tau_full.

    Raises:
        ValueError: if an acceptance length is below 1 (a step commits at least one token).
    """
    for name, value in (("tau", tau), ("full_tau", full_tau)):
        if not (value >= 1.0 and math.isfinite(value)):
            raise ValueError(f"`{name}` must be at least 1; got {value!r}")
    return tau / full_tau


def rho_tps(*, rho_tau: float, nu: float, kappa: float) -> float:
    """Token rate relative to the full head's, Eq. 4 of arXiv 2605.10453.

        rho_tps = rho_tau * (1 + kappa) / (1 + nu * kappa)

    Args:
        rho_tau: ratio of acceptance lengths.
        nu: ratio of head times; 0 is a head that costs nothing.
        kappa: all full-head calls of a cycle over the rest of the cycle.

    Raises:
        ValueError: if an argument is negative or `rho_tau` is 0.
    """
    _require_positive("rho_tau", rho_tau)
    _require_not_negative("nu", nu)
    _require_not_negative("kappa", kappa)
    return rho_tau * (1.0 + kappa) / (1.0 + nu * kappa)


def rho_tau_for(*, rho_tps: float, nu: float, kappa: float) -> float:
    """Ratio of acceptance lengths at which a head reaches a token rate, Eq. 4 solved for rho_tau.

        rho_tau = rho_tps * (1 + nu * kappa) / (1 + kappa)

    For one kappa and one `rho_tps` this is a line over nu: all heads on it are equally fast.

    Args:
        rho_tps: token rate relative to the full head's.
        nu: ratio of head times.
        kappa: all full-head calls of a cycle over the rest of the cycle.

    Raises:
        ValueError: if an argument is negative or `rho_tps` is 0.
    """
    _require_positive("rho_tps", rho_tps)
    _require_not_negative("nu", nu)
    _require_not_negative("kappa", kappa)
    return rho_tps * (1.0 + nu * kappa) / (1.0 + kappa)


def break_even_rho_tau(*, nu: float, kappa: float) -> float:
    """Smallest ratio of acceptance lengths at which a head is no slower than the full one.

    Eq. 4 solved for rho_tps = 1: rho_tau = (1 + nu * kappa) / (1 + kappa).
    """
    return rho_tau_for(rho_tps=1.0, nu=nu, kappa=kappa)


def expected_acceptance_length(conditional_rates: Sequence[float]) -> float:
    """Acceptance length of a chain: tau = 1 + sum_i prod_{j <= i} alpha_j.

    Args:
        conditional_rates: alpha_i, probability that draft i is accepted given that all before it were.

    Returns:
        Expected tokens committed by one step, bonus included; 1 for an empty chain.

    Raises:
        ValueError: if a rate is not a probability.
    """
    total, joint = 1.0, 1.0
    for position, rate in enumerate(conditional_rates):
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"`conditional_rates[{position}]` must be in [0, 1]; got {rate!r}")
        joint *= rate
        total += joint
    return total


@dataclasses.dataclass(frozen=True)
class StepTime:
    """Where the time of one speculative step goes, in seconds.

    Attributes:
        draft_length: L, drafts a step.
        verify: the target's forward over L + 1 tokens, its logits included.
        backbone: one drafter pass without its head.
        head: one call of the draft head.
        extend: feeding the committed tokens to the drafter.
        overhead: everything else: laws, verification, commit, dispatch, host.
        backbone_calls: drafter passes a step; None means L. A drafter whose first draft comes out of `extend` makes
            L - 1 of them.
        head_calls: head calls a step; None means L.

    Raises:
        ValueError: if a time or a count is negative.
    """

    draft_length: int
    verify: float
    backbone: float
    head: float
    extend: float = 0.0
    overhead: float = 0.0
    backbone_calls: int | None = None
    head_calls: int | None = None

    def __post_init__(self) -> None:
        if self.draft_length < 0:
            raise ValueError(f"`draft_length` must be at least 0; got {self.draft_length}")
        for name in ("verify", "backbone", "head", "extend", "overhead"):
            _require_not_negative(name, getattr(self, name))
        for name in ("backbone_calls", "head_calls"):
            value = getattr(self, name)
            if value is None:
                object.__setattr__(self, name, self.draft_length)
            elif value < 0:
                raise ValueError(f"`{name}` must be at least 0; got {value}")

    @property
    def heads(self) -> float:
        """Time of all head calls of the step."""
        return (self.head_calls or 0) * self.head

    @property
    def drafting(self) -> float:
        """Time that exists only because there is a drafter: its passes, its heads and the extension."""
        return (self.backbone_calls or 0) * self.backbone + self.heads + self.extend

    @property
    def total(self) -> float:
        """t_step(L), the whole step."""
        return self.verify + self.drafting + self.overhead

    @property
    def head_share_of_drafting(self) -> float:
        """Share of the drafting time that the head takes; 0 when nothing is drafted."""
        return self.heads / self.drafting if self.drafting > 0.0 else 0.0

    @property
    def kappa(self) -> float:
        """This step's head time over the rest; it is *the* kappa when the head is the full one."""
        return kappa(self.heads, self.total - self.heads)

    def with_head(self, head_seconds: float) -> StepTime:
        """The same step with a head of another cost."""
        return dataclasses.replace(self, head=head_seconds)


def speed_up(*, tau: float, plain_seconds: float, step_seconds: float) -> float:
    """Speed-up over plain decoding: tau * t_plain / t_step.

    Args:
        tau: tokens committed by one speculative step.
        plain_seconds: time of one plain step, which commits one token.
        step_seconds: time of one speculative step.

    Raises:
        ValueError: if `tau` is below 1 or a time is not positive.
    """
    if not (tau >= 1.0 and math.isfinite(tau)):
        raise ValueError(f"`tau` must be at least 1; got {tau!r}")
    _require_positive("plain_seconds", plain_seconds)
    _require_positive("step_seconds", step_seconds)
    return tau * plain_seconds / step_seconds


def break_even_acceptance_length(*, plain_seconds: float, step_seconds: float) -> float:
    """Acceptance length above which speculation pays: tau = t_step / t_plain."""
    _require_positive("plain_seconds", plain_seconds)
    _require_positive("step_seconds", step_seconds)
    return step_seconds / plain_seconds


def best_draft_length(
    conditional_rates: Sequence[float], step_seconds: Mapping[int, float], plain_seconds: float
) -> tuple[int, float]:
    """Draft length with the largest predicted speed-up; 0 when no length beats plain decoding.

    Args:
        conditional_rates: alpha_i for each draft position; lengths beyond the last one are not considered.
        step_seconds: t_step(L) for the lengths that may be chosen.
        plain_seconds: time of one plain step.

    Returns:
        The length and its predicted speed-up (1.0 for length 0).
    """
    best = (0, 1.0)
    for length in sorted(step_seconds):
        if not 1 <= length <= len(conditional_rates):
            continue
        tau = expected_acceptance_length(conditional_rates[:length])
        gain = speed_up(tau=tau, plain_seconds=plain_seconds, step_seconds=step_seconds[length])
        if gain > best[1]:
            best = (length, gain)
    return best


def full_head_params(hidden_size: int, vocab_size: int) -> int:
    """Weights of the full head, V * d."""
    return hidden_size * vocab_size


def low_rank_head_params(hidden_size: int, vocab_size: int, rank: int) -> int:
    """Weights of a low-rank head (SlimSpec), r * (d + V)."""
    return rank * (hidden_size + vocab_size)


def preview_head_params(hidden_size: int, vocab_size: int, rank: int, num_candidates: int) -> int:
    """Weights read by a head that scores at low rank and rescores exactly, r * (d + V) + C * d."""
    return low_rank_head_params(hidden_size, vocab_size, rank) + num_candidates * hidden_size


def low_rank_byte_ratio(hidden_size: int, vocab_size: int, rank: int) -> float:
    """Floor of nu when reading weights is all that counts: r * (d + V) / (V * d)."""
    return low_rank_head_params(hidden_size, vocab_size, rank) / full_head_params(hidden_size, vocab_size)


def roofline_seconds(
    *,
    num_bytes: int | float,
    bytes_per_second: float,
    flops: int | float = 0,
    flops_per_second: float = math.inf,
) -> float:
    """Shortest time for moving `num_bytes` and computing `flops`, whichever takes longer.

    Args:
        num_bytes: bytes read and written, weights and cache.
        bytes_per_second: memory bandwidth.
        flops: floating-point operations, 2 a multiply-add.
        flops_per_second: peak rate at the dtype used.

    Raises:
        ValueError: if a rate is not positive or an amount is negative.
    """
    _require_not_negative("num_bytes", num_bytes)
    _require_not_negative("flops", flops)
    for name, rate in (("bytes_per_second", bytes_per_second), ("flops_per_second", flops_per_second)):
        if not rate > 0.0:
            raise ValueError(f"`{name}` must be positive; got {rate!r}")
    return max(num_bytes / bytes_per_second, flops / flops_per_second)
