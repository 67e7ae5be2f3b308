"""The cost model against published figures (arXiv 2605.10453) and its own identities."""

from __future__ import annotations

import math

import pytest

from specjax import cost

# head, nu, rho_tau, speed-up over the full head predicted at kappa = 0.25 (Llama-3.1-8B, T = 0, batch 1).
PUBLISHED_HEADS = [
    ("full", 1.00, 1.00, 1.000),
    ("64K rows", 0.58, 1.00, 1.092),
    ("32K rows", 0.33, 0.96, 1.109),
    ("16K rows", 0.20, 0.90, 1.071),
    ("preview d/8", 0.46, 1.01, 1.132),
    ("low rank d/8", 0.21, 0.99, 1.176),
    ("low rank d/16", 0.14, 0.98, 1.184),
]


@pytest.mark.parametrize(("name", "nu", "rho_tau", "expected"), PUBLISHED_HEADS)
def test_equation_4_gives_the_published_predictions(name: str, nu: float, rho_tau: float, expected: float) -> None:
    assert cost.rho_tps(rho_tau=rho_tau, nu=nu, kappa=0.25) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(
    ("nu", "expected"), [(0.58, 0.916), (0.33, 0.866), (0.20, 0.840), (0.46, 0.892), (0.21, 0.842), (0.14, 0.828)]
)
def test_break_even_gives_the_published_values(nu: float, expected: float) -> None:
    assert cost.break_even_rho_tau(nu=nu, kappa=0.25) == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize("nu", [0.0, 0.14, 0.6, 1.0, 2.0])
@pytest.mark.parametrize("kappa", [0.05, 0.25, 3.0])
def test_at_break_even_nothing_is_gained(nu: float, kappa: float) -> None:
    rho = cost.break_even_rho_tau(nu=nu, kappa=kappa)
    assert cost.rho_tps(rho_tau=rho, nu=nu, kappa=kappa) == pytest.approx(1.0, rel=1e-12)


def test_a_head_without_cost_gains_at_most_one_plus_kappa() -> None:
    assert cost.rho_tps(rho_tau=1.0, nu=0.0, kappa=0.25) == pytest.approx(1.25)


# (V, d), (rank, byte ratio), ...: figures of heads of three public targets.
@pytest.mark.parametrize(
    ("vocab", "hidden", "full_millions", "ratios"),
    [
        (128256, 4096, 525.3, {1024: 0.258, 512: 0.129, 256: 0.064}),
        (201088, 2880, 579.1, {720: 0.254, 360: 0.127, 180: 0.063}),
        (151936, 2048, 311.2, {512: 0.253, 256: 0.127, 128: 0.063}),
    ],
)
def test_head_sizes_of_public_targets(vocab: int, hidden: int, full_millions: float, ratios: dict[int, float]) -> None:
    assert cost.full_head_params(hidden, vocab) / 1e6 == pytest.approx(full_millions, abs=0.06)
    for rank, ratio in ratios.items():
        assert cost.low_rank_byte_ratio(hidden, vocab, rank) == pytest.approx(ratio, abs=6e-4)


def test_preview_heads_add_the_rows_that_they_rescore() -> None:
    full = cost.full_head_params(4096, 128256)
    assert cost.preview_head_params(4096, 128256, 512, 2048) / full == pytest.approx(0.145, abs=6e-4)
    assert cost.preview_head_params(4096, 128256, 128, 128) / full == pytest.approx(0.033, abs=6e-4)


@pytest.mark.parametrize(
    ("vocab", "hidden", "rank", "microseconds"),
    [(128256, 4096, None, 219), (201088, 2880, None, 241), (151936, 2048, None, 130), (128256, 4096, 512, 28)],
)
def test_bandwidth_floor_of_a_head(vocab: int, hidden: int, rank: int | None, microseconds: int) -> None:
    params = cost.full_head_params(hidden, vocab) if rank is None else cost.low_rank_head_params(hidden, vocab, rank)
    seconds = cost.roofline_seconds(num_bytes=2 * params, bytes_per_second=4.8e12)
    assert seconds * 1e6 == pytest.approx(microseconds, abs=0.6)


def test_roofline_takes_the_slower_of_memory_and_arithmetic() -> None:
    limits = {"bytes_per_second": 10.0, "flops_per_second": 100.0}
    assert cost.roofline_seconds(num_bytes=20, flops=50, **limits) == 2.0
    assert cost.roofline_seconds(num_bytes=20, flops=500, **limits) == 5.0


def test_expected_acceptance_length_of_a_chain() -> None:
    assert cost.expected_acceptance_length([]) == 1.0
    assert cost.expected_acceptance_length([0.5, 0.5]) == 1.75
    assert cost.expected_acceptance_length([1.0] * 7) == 8.0
    assert cost.expected_acceptance_length([0.0, 1.0]) == 1.0


def test_step_time_adds_its_parts() -> None:
    step = cost.StepTime(draft_length=4, verify=10.0, backbone=0.5, head=1.0, extend=0.25, overhead=0.75)
    assert step.heads == 4.0
    assert step.drafting == pytest.approx(4 * 1.5 + 0.25)
    assert step.total == pytest.approx(10.0 + 6.25 + 0.75)
    assert step.head_share_of_drafting == pytest.approx(4.0 / 6.25)
    assert step.kappa == pytest.approx(4.0 / 13.0)


def test_first_draft_may_come_out_of_the_extension() -> None:
    step = cost.StepTime(draft_length=4, verify=10.0, backbone=0.5, head=1.0, backbone_calls=3)
    assert step.total == pytest.approx(10.0 + 3 * 0.5 + 4.0)


def test_step_view_and_equation_4_agree() -> None:
    full = cost.StepTime(draft_length=3, verify=8.0, backbone=0.5, head=0.9, extend=0.3, overhead=0.2)
    slim = full.with_head(0.2)
    plain, tau_full, tau_slim = 7.0, 2.0, 1.9
    by_steps = cost.speed_up(tau=tau_slim, plain_seconds=plain, step_seconds=slim.total) / cost.speed_up(
        tau=tau_full, plain_seconds=plain, step_seconds=full.total
    )
    by_equation = cost.rho_tps(
        rho_tau=cost.rho_tau(tau_slim, tau_full), nu=cost.nu(slim.head, full.head), kappa=full.kappa
    )
    assert by_steps == pytest.approx(by_equation, rel=1e-12)


def test_break_even_acceptance_length_gives_speed_up_one() -> None:
    tau = cost.break_even_acceptance_length(plain_seconds=30.0, step_seconds=51.0)
    assert tau == pytest.approx(1.7)
    assert cost.speed_up(tau=tau, plain_seconds=30.0, step_seconds=51.0) == pytest.approx(1.0)


def test_best_draft_length_weighs_gain_against_cost() -> None:
    rates = [0.8, 0.7, 0.3, 0.1]
    steps = {1: 1.2, 2: 1.4, 4: 1.9}
    length, gain = cost.best_draft_length(rates, steps, 1.0)
    assert (length, gain) == (2, pytest.approx((1 + 0.8 + 0.56) / 1.4))
    assert cost.best_draft_length([0.1], {1: 1.5}, 1.0) == (0, 1.0)
    assert cost.best_draft_length([0.9], {1: 1.1, 8: 1.2}, 1.0)[0] == 1


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda: cost.nu(0.0, 1.0), "head_seconds"),
        (lambda: cost.kappa(1.0, -1.0), "rest_seconds"),
        (lambda: cost.rho_tau(0.9, 2.0), "tau"),
        (lambda: cost.rho_tps(rho_tau=1.0, nu=-0.1, kappa=0.2), "nu"),
        (lambda: cost.expected_acceptance_length([0.5, 1.5]), "conditional_rates[1]"),
        (lambda: cost.StepTime(draft_length=-1, verify=1.0, backbone=1.0, head=1.0), "draft_length"),
        (lambda: cost.StepTime(draft_length=1, verify=math.nan, backbone=1.0, head=1.0), "verify"),
        (lambda: cost.speed_up(tau=0.5, plain_seconds=1.0, step_seconds=1.0), "tau"),
        (lambda: cost.roofline_seconds(num_bytes=1.0, bytes_per_second=0.0), "bytes_per_second"),
    ],
)
def test_faulty_arguments_are_named(call, field: str) -> None:
    with pytest.raises(ValueError, match="`" + field.replace("[", r"\[").replace("]", r"\]") + "` must"):
        call()
