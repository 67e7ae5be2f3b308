"""Counting kernels and bytes in optimised HLO."""

from __future__ import annotations

import pytest

from pallas_kernels import aot
from pallas_kernels.aot.inspect import entry_kernels, shape_bytes

PROGRAM = """HloModule jit_f

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %neg = f32[4]{0} negate(%p)
}

ENTRY %main (a: bf16[8,512], b: f32[4]) -> (f32[4], f32[8]) {
  %a = bf16[8,512]{1,0} parameter(0)
  %b = f32[4]{0} parameter(1)
  %c = s32[] constant(1)
  %view = bf16[4096]{0} bitcast(%a)
  %fusion = f32[4]{0} fusion(%b), kind=kLoop, calls=%fused
  %call = (f32[8]{0}, s32[8]{0}) custom-call(%view, %fusion), custom_call_target="mosaic_gpu_v2"
  %first = f32[8]{0} get-tuple-element(%call), index=0
  ROOT %tuple = (f32[4]{0}, f32[8]{0}) tuple(%fusion, %first)
}
"""


def test_kernels_and_bytes_of_a_program():
    found = entry_kernels(PROGRAM)
    assert found["kernels"] == ["fusion", "call (mosaic_gpu_v2)"]
    assert found["bytes_moved"] == (16 + 16) + (8192 + 16 + 64)


def test_bytes_of_shapes():
    assert shape_bytes("bf16[8,512]{1,0}") == 8192
    assert shape_bytes("(f32[8]{0}, pred[3], s32[])") == 32 + 3 + 4


def test_unknown_chips_are_refused():
    with pytest.raises(ValueError, match=r"`chip_name` must be one of .*'h200'.*; got 'h300'"):
        aot.compile_cases("h300", [])
