"""Reads registers, spills, shared memory and instructions of Mosaic kernels, and the kernels of a compiled program."""

from __future__ import annotations

import math
import pathlib
import re
from typing import Any

# Tensor core products, bulk copies in and out, local memory (spills, arrays in registers), transcendental functions.
OPCODES = ("HGMMA", "UTMALDG", "UTMASTG", "UBLKCP", "LDL", "STL", "MUFU.EX2", "MUFU.LG2", "SYNCS")

_ITEM_BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f16": 2,
    "bf16": 2,
    "s16": 2,
    "u16": 2,
    "f32": 4,
    "s32": 4,
    "u32": 4,
    "f64": 8,
    "s64": 8,
    "u64": 8,
}
# Instructions that only name memory.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


def mosaic_kernels(dumps: pathlib.Path) -> list[dict[str, Any]]:
    """What the compiler's dumps of one compilation say, a dictionary a kernel; see `run.compile_cases`."""
    return [_mosaic_kernel(path, dumps) for path in sorted(dumps.glob("*.ptxas"))]


def _mosaic_kernel(ptxas: pathlib.Path, dumps: pathlib.Path) -> dict[str, Any]:
    text = ptxas.read_text(errors="replace")
    spills = [
        int(number)
        for pair in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
        for number in pair
    ]
    registers = re.findall(r"Used (\d+) registers", text)
    if not spills or not registers:
        raise RuntimeError(f"{ptxas.name} holds no numbers of registers and spills: the compiler's text has changed")
    ptx = (dumps / f"{ptxas.stem}.ptx").read_text(errors="replace")
    passes = (dumps / f"{ptxas.stem}.mlir-passes.log").read_text(errors="replace")
    sass = "".join(path.read_text(errors="replace") for path in dumps.glob(f"{ptxas.stem}.sass*"))
    if not sass:
        raise RuntimeError(f"no machine code of {ptxas.stem} was dumped: nvdisasm did not run")
    # The size of dynamic shared memory stands in the text only: ptxas reports static shared memory.
    smem = [int(size) for size in re.findall(r"dynamic_shared_memory_size\s+%?c(\d+)", passes)]
    return {
        "target": re.findall(r"\.target (\S+)", ptx)[0].rstrip(","),
        "registers": max(map(int, registers)),
        "spill_bytes": sum(spills),
        "smem_bytes": max(smem, default=0),
        "instructions": {opcode: len(re.findall(rf"\b{re.escape(opcode)}\b", sass)) for opcode in OPCODES},
    }


def program(compiled: Any) -> dict[str, Any]:
    """Kernels, bytes and scratch memory of a compiled program; see `run.compile_cases`."""
    memory = compiled.memory_analysis()
    return {"temporary_bytes": int(memory.temp_size_in_bytes), **entry_kernels(compiled.as_text())}


def entry_kernels(hlo: str) -> dict[str, Any]:
    """Instructions of an optimised program that start kernels, and the bytes of their operands and results.

    Loops and conditionals count as one kernel each; their bodies are not looked into.
    """
    body = hlo[hlo.index("\nENTRY ") :] if "\nENTRY " in hlo else hlo
    sizes: dict[str, int] = {}
    kernels, moved = [], 0
    for line in body.splitlines():
        match = _INSTRUCTION.match(line)
        if not match:
            continue
        name, shape, opcode, rest = match.groups()
        sizes[name] = shape_bytes(shape)
        if opcode in _FREE or opcode.endswith("-done"):
            continue
        target = re.search(r'custom_call_target="([^"]+)"', rest)
        kernels.append(f"{name} ({target.group(1)})" if target else name)
        operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
        moved += sizes[name] + sum(sizes.get(operand, 0) for operand in operands)
    return {"kernels": kernels, "bytes_moved": moved}


def shape_bytes(shape: str) -> int:
    """Bytes of an array or tuple in the notation of HLO."""
    return sum(
        math.prod(int(size) for size in sizes.split(",") if size) * _ITEM_BYTES.get(item, 0)
        for item, sizes in _SHAPE.findall(shape)
    )
