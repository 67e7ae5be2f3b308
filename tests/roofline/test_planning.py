"""Plans: rows for every head, expected acceptance, the recommended rank, machines out of files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
from typing import Any

import pytest

from pallas_kernels.aot.chips import CHIPS
from specjax import cost
from specjax.roofline import (
    HARDWARE,
    HEAD_KINDS,
    HeadPlan,
    HeadShape,
    Setting,
    Work,
    expected_rho_tau,
    get_hardware,
    load_target_shape,
    plan_heads,
    read_hardware,
    recommend_rank,
)

LLAMA = load_target_shape("llama-3.1-8b")


def test_rows_follow_the_cost_law() -> None:
    plan = plan_heads(LLAMA, HARDWARE["h200"])
    assert {row.head.kind for row in plan.heads} == set(HEAD_KINDS)
    full = plan.heads[0]
    assert (full.nu, full.byte_ratio, full.break_even_rho_tau, full.rho_tps) == (1.0, 1.0, 1.0, 1.0)
    assert plan.full_tau == 4.42
    assert full.speed_up == pytest.approx(4.42 * plan.plain_seconds / plan.full_step.total)
    for row in plan.heads:
        assert row.break_even_rho_tau == cost.break_even_rho_tau(nu=row.nu, kappa=plan.kappa)
        if row.rho_tps is not None and row.speed_up is not None and full.speed_up is not None:
            # Two ways to the same number: Eq. 4, and the whole step's time.
            assert row.speed_up / full.speed_up == pytest.approx(row.rho_tps, rel=1e-9)


@pytest.mark.parametrize(
    ("target", "hardware", "fraction"),
    [("llama-3.1-8b", "h200", 8), ("gpt-oss-20b", "h200", 7.5), ("qwen3-30b-a3b", "h200", 4)],
)
def test_recommended_ranks(target: str, hardware: str, fraction: float) -> None:
    shape = load_target_shape(target)
    assert plan_heads(shape, HARDWARE[hardware]).recommended_rank == shape.hidden_size / fraction


def test_smaller_acceptance_moves_the_recommendation() -> None:
    known = {"low_rank r=512": 0.85, "low_rank r=256": 0.80, "low_rank r=128": 0.7}
    plan = plan_heads(LLAMA, HARDWARE["h200"], rho_tau=known)
    assert plan.recommended_rank == 1024
    plan = plan_heads(LLAMA, HARDWARE["h200"], rho_tau={"low_rank": 0.5})
    assert plan.recommended_rank is None
    assert "of the full head's rate" in plan.reason


def row(rank: int, rho_tps: float | None) -> HeadPlan:
    return HeadPlan(HeadShape("low_rank", 64, 1000, rank=rank), 1, 0.1, 1e-6, 0.2, 0.9, 0.9, "", rho_tps, None)


def test_the_largest_rank_among_equals_is_recommended() -> None:
    assert recommend_rank([row(32, 1.10), row(16, 1.19), row(8, 1.20), row(4, None)])[0] == 16
    assert recommend_rank([row(32, 1.10), row(16, 1.15), row(8, 1.20)])[0] == 8
    assert recommend_rank([row(4, None)]) == (None, "no low-rank head was planned")


@pytest.mark.parametrize(
    ("kind", "sizes", "value"),
    [
        ("low_rank", {"rank": 512}, 0.99),
        ("low_rank", {"rank": 256}, 0.98),
        ("vocab_trim", {"num_rows": 32768}, 0.96),
        ("vocab_trim", {"num_rows": 23170}, 0.93),
        ("vocab_trim", {"num_rows": 8192}, None),
        ("fr_spec", {"num_rows": 32768}, 0.873),
        ("spec_vocab", {"rank": 512, "num_candidates": 2048}, 1.01),
        ("low_rank_preview", {"rank": 128, "num_candidates": 128}, None),
    ],
)
def test_expected_acceptance_is_the_published_one(kind: str, sizes: dict[str, int], value: float | None) -> None:
    rho, _ = expected_rho_tau(HeadShape(kind, 4096, 128256, **sizes))
    assert rho == (None if value is None else pytest.approx(value, abs=5e-4))


def test_user_values_are_checked() -> None:
    for known, message in (({"lowrank": 0.9}, "must name a head"), ({"low_rank": 0.0}, "must be positive")):
        with pytest.raises(ValueError, match=re.escape(message)):
            plan_heads(LLAMA, HARDWARE["h200"], rho_tau=known)
    with pytest.raises(ValueError, match="`full_tau` must be at least 1"):
        plan_heads(LLAMA, HARDWARE["h200"], full_tau=0.5)
    with pytest.raises(ValueError, match="`dtype` must be one of float32, bfloat16 on cpu; got 'float8'"):
        plan_heads(LLAMA, HARDWARE["cpu"], Setting(dtype="float8"))
    for fields in ({"batch": 0}, {"draft_length": 0}, {"context": -1}, {"dtype": "int3"}):
        with pytest.raises(ValueError, match=f"`{next(iter(fields))}` must be"):
            Setting(**fields)


def test_every_built_in_machine_plans_every_built_in_target() -> None:
    for machine in HARDWARE.values():
        for name in ("llama-3.1-8b", "gpt-oss-20b", "qwen3-30b-a3b"):
            plan = plan_heads(load_target_shape(name), machine)
            assert 0.0 < plan.kappa < 2.0
            assert all(0.0 < head.nu <= 1.2 for head in plan.heads)


def test_work_adds_up() -> None:
    machine = dataclasses.replace(HARDWARE["h200"], memory_efficiency=1.0, compute_efficiency=1.0, kernel_seconds=1e-6)
    one = Work(weight_bytes=4.8e6, flops=1.0, kernels=2)
    assert one.seconds(machine, "bfloat16") == pytest.approx(3e-6)
    two = one + Work(cache_bytes=4.8e6, activation_bytes=4.8e6)
    assert two.num_bytes == 14.4e6
    assert two.seconds(machine, "bfloat16") == pytest.approx(5e-6)
    assert Work(weight_bytes=1, flops=989e12).seconds(machine, "bfloat16") == pytest.approx(1.0)


def write(path: pathlib.Path, fields: Any) -> pathlib.Path:
    path.write_text(json.dumps(fields))
    return path


def test_hardware_files(tmp_path: pathlib.Path) -> None:
    based = read_hardware(write(tmp_path / "graphs.json", {"base": "h200", "pass_overhead_seconds": 0}))
    assert based == dataclasses.replace(HARDWARE["h200"], name="graphs", pass_overhead_seconds=0)
    own = read_hardware(write(tmp_path / "own.json", {"bytes_per_second": 1e12, "flops_per_second": {"float32": 1e13}}))
    assert (own.name, own.dtype) == ("own", "float32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bytes_per_second": 1e12}, "lacks `flops_per_second`"),
        ({"base": "h200", "bandwidth": 1}, "unknown field `bandwidth`"),
        ({"base": "h300"}, "`hardware` must be one of h200, h100, a100, b200, cpu; got 'h300'"),
        ({"base": "h200", "bytes_per_second": -1}, "`bytes_per_second` must be a finite number above 0; got -1"),
        ({"base": "h200", "memory_efficiency": 1.5}, "above 0 and at most 1; got 1.5"),
        ({"base": "h200", "kernel_seconds": "fast"}, "`kernel_seconds` must be a finite number; got 'fast'"),
        ({"base": "h200", "flops_per_second": {"bfloat16": 0}}, "`flops_per_second.bfloat16` must be"),
        ({"base": "h200", "flops_per_second": 5}, "`flops_per_second` must be an object; got 5"),
        ({"base": "h200", "dtype": "int3"}, "`dtype` must be one of"),
        ([1], "must hold a JSON object; got list"),
    ],
)
def test_bad_hardware_files(fields: Any, message: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        read_hardware(write(tmp_path / "mine.json", fields))
    assert "mine.json: " in str(error.value)


def test_missing_machines(tmp_path: pathlib.Path) -> None:
    with pytest.raises(FileNotFoundError, match="no hardware file at"):
        read_hardware(tmp_path / "none.json")
    with pytest.raises(ValueError, match="`hardware` must be one of"):
        get_hardware("tpu")


@pytest.mark.parametrize("name", sorted(set(CHIPS) & set(HARDWARE)))
def test_the_plan_and_the_compiler_are_told_the_same_of_a_chip(name: str) -> None:
    """The kernels' package knows chips of its own, since it imports nothing of the library."""
    assert HARDWARE[name].bytes_per_second == CHIPS[name].memory_bandwidth
    assert HARDWARE[name].flops_per_second["bfloat16"] == CHIPS[name].bf16_flops
