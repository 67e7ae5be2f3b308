"""Machines as a few numbers: what a data sheet says, and what an engine on it adds.

Bandwidths and dense arithmetic rates are the vendor's (SXM or HGX parts, without sparsity). Two numbers of the NVIDIA
rows are fitted, see `specjax.roofline.published`: `kernel_seconds` and `pass_overhead_seconds`. The two efficiencies
are assumptions: large copies and products reach about 0.85 of the bandwidth and 0.8 of the rate on an H200.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.json_files import read_object

# Fitted on two published cells; `published.fit_constants` computes them again.
KERNEL_SECONDS = 3.58e-6
PASS_OVERHEAD_SECONDS = 1.04e-4


@dataclasses.dataclass(frozen=True)
class Hardware:
    """One device, or one machine with one engine on it.

    Attributes:
        name: for tables.
        bytes_per_second: peak memory bandwidth.
        flops_per_second: dtype name -> peak dense rate.
        dtype: what weights and drafters are kept in unless the user says otherwise.
        kernel_seconds: fixed time of one kernel that waits for the one before: launch, ramp-up and tail.
        pass_overhead_seconds: time the engine spends between two drafter passes without the device working.
        select_seconds: time of an argmax or top-k for each score it goes through, beyond its kernels (see
            `Work.selected_values`).
        memory_efficiency: share of the bandwidth that a large kernel reaches.
        compute_efficiency: share of the rate that a large product reaches.

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    name: str
    bytes_per_second: int | float
    flops_per_second: Mapping[str, int | float]
    dtype: str = "bfloat16"
    kernel_seconds: int | float = KERNEL_SECONDS
    pass_overhead_seconds: int | float = PASS_OVERHEAD_SECONDS
    select_seconds: int | float = 0.0
    memory_efficiency: int | float = 0.85
    compute_efficiency: int | float = 0.8

    def __post_init__(self) -> None:
        _check_number("bytes_per_second", self.bytes_per_second, above=0.0)
        if not self.flops_per_second:
            raise ValueError("`flops_per_second` must give a rate for at least one dtype; got {}")
        for dtype, rate in self.flops_per_second.items():
            _check_number(f"flops_per_second.{dtype}", rate, above=0.0)
        for name in ("kernel_seconds", "pass_overhead_seconds", "select_seconds"):
            _check_number(name, getattr(self, name))
        for name in ("memory_efficiency", "compute_efficiency"):
            _check_number(name, getattr(self, name), above=0.0, most=1.0)
        self.flop_rate(self.dtype)

    def flop_rate(self, dtype: str) -> int | float:
        """Peak rate at a dtype.

        Raises:
            ValueError: if the machine has none.
        """
        if dtype not in self.flops_per_second:
            raise ValueError(f"`dtype` must be one of {', '.join(self.flops_per_second)} on {self.name}; got {dtype!r}")
        return self.flops_per_second[dtype]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_number(name: str, value: Any, *, above: float | None = None, most: float = math.inf) -> None:
    if not _is_number(value) or value > most or (value <= above if above is not None else value < 0.0):
        rule = "at least 0" if above is None else f"above {above:g}"
        rule += f" and at most {most:g}" if math.isfinite(most) else ""
        raise ValueError(f"`{name}` must be a finite number {rule}; got {value!r}")


# An A100 has no float8 units: such weights are converted and computed in bfloat16.
HARDWARE: dict[str, Hardware] = {
    row.name: row
    for row in (
        Hardware("h200", 4.8e12, {"bfloat16": 989e12, "float8": 1979e12, "float32": 67e12}),
        Hardware("h100", 3.35e12, {"bfloat16": 989e12, "float8": 1979e12, "float32": 67e12}),
        Hardware("a100", 2.039e12, {"bfloat16": 312e12, "float8": 312e12, "float32": 19.5e12}),
        Hardware("b200", 8.0e12, {"bfloat16": 2250e12, "float8": 4500e12, "float32": 80e12}),
        # Two cores of a server, this project's engine: one jitted step, so nothing happens between passes. Rates are
        # what a 135M-parameter model reaches there in float32 (30 ms for one token, 65 ms for 16); an argmax over
        # 49,152 scores takes 0.25 ms, a top-2048 1.5 ms.
        Hardware(
            "cpu",
            20e9,
            {"float32": 85e9, "bfloat16": 85e9},
            dtype="float32",
            kernel_seconds=5e-6,
            pass_overhead_seconds=0.0,
            select_seconds=5e-9,
            memory_efficiency=0.9,
        ),
    )
}


def get_hardware(name: str) -> Hardware:
    """A machine of the built-in table.

    Raises:
        ValueError: if there is none of that name; the message lists the known ones.
    """
    if name not in HARDWARE:
        raise ValueError(f"`hardware` must be one of {', '.join(HARDWARE)}; got {name!r}")
    return HARDWARE[name]


def read_hardware(path: str | os.PathLike[str]) -> Hardware:
    """A machine described by a JSON file.

    The file holds an object with the fields of `Hardware`; with `"base": NAME` it holds only what differs from a
    built-in machine, for example `{"name": "h200-graphs", "base": "h200", "pass_overhead_seconds": 0}`.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is no such object, naming the file and the field.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no hardware file at {path}")
    fields = read_object(path)
    known = [field.name for field in dataclasses.fields(Hardware)]
    unknown = sorted(set(fields) - {*known, "base"})
    if unknown:
        raise ValueError(f"{path}: unknown field `{unknown[0]}`; known are base, {', '.join(known)}")
    for name, kind in (("name", str), ("dtype", str), ("base", str), ("flops_per_second", dict)):
        if name in fields and not isinstance(fields[name], kind):
            raise ValueError(
                f"{path}: `{name}` must be {'an object' if kind is dict else 'text'}; got {fields[name]!r}"
            )
    for name, value in fields.items():
        if name not in ("name", "dtype", "base", "flops_per_second") and not _is_number(value):
            raise ValueError(f"{path}: `{name}` must be a finite number; got {value!r}")
    for dtype, rate in fields.get("flops_per_second", {}).items():
        if not _is_number(rate):
            raise ValueError(f"{path}: `flops_per_second.{dtype}` must be a finite number; got {rate!r}")
    base = fields.pop("base", None)
    fields.setdefault("name", path.stem)
    try:
        if base is not None:
            return dataclasses.replace(get_hardware(base), **fields)
        missing = [name for name in ("bytes_per_second", "flops_per_second") if name not in fields]
        if missing:
            raise ValueError(f"lacks `{missing[0]}`")
        fields.setdefault("dtype", next(iter(fields["flops_per_second"]), "bfloat16"))
        return Hardware(**fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
