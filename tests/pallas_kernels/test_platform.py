"""The choice of an implementation: by name, by platform, and never a Hopper kernel for another chip."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from pallas_kernels import _platform
from pallas_kernels._platform import choose, gpu_compute_capability, unavailable

CANDIDATES = {
    "xla": lambda x: x + jnp.float32(1),
    "mosaic_gpu": lambda x: x * jnp.float32(2),
    "pallas": lambda x: x - jnp.float32(3),
}


class _Chip(AbstractDevice):
    """A device that is only described."""

    @property
    def compute_capability(self) -> str:
        return self.device_kind


def declared(capability: str):
    """A context in which programs are lowered for a chip of that compute capability."""
    chip = _Chip(device_kind=capability, num_cores=1, platform="gpu")
    return use_abstract_mesh(AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=chip))


def lowered_text(capability: str | None, platform: str) -> str:
    def lower() -> str:
        function = jax.jit(lambda x: choose(None, CANDIDATES)(x))
        return function.trace(jax.ShapeDtypeStruct((4,), jnp.float32)).lower(lowering_platforms=(platform,)).as_text()

    if capability is None:
        return lower()
    with declared(capability):
        return lower()


@pytest.mark.parametrize(
    ("capability", "platform", "operation"),
    [
        ("9.0", "cuda", "multiply"),
        ("8.0", "cuda", "add"),
        ("10.0", "cuda", "add"),
        ("gfx942", "cuda", "add"),
        (None, "cuda", "add"),
        (None, "tpu", "subtract"),
        (None, "cpu", "add"),
    ],
)
def test_the_platform_decides_when_no_name_is_given(capability, platform, operation):
    text = lowered_text(capability, platform)
    assert [name for name in ("add", "multiply", "subtract") if f"stablehlo.{name}" in text] == [operation]


def test_without_a_gpu_there_is_no_compute_capability():
    if jax.default_backend() != "cpu":
        pytest.skip("this process has an accelerator")
    assert gpu_compute_capability() is None


def test_the_first_cuda_device_tells_its_compute_capability(monkeypatch):
    device = types.SimpleNamespace(compute_capability="9.0")
    monkeypatch.setattr(_platform.jax, "devices", lambda platform: [device])
    assert gpu_compute_capability() == (9, 0)


def test_a_name_picks_its_candidate():
    x = jnp.ones(3, jnp.float32)
    assert float(choose("pallas", CANDIDATES)(x)[0]) == -2.0
    assert float(choose("xla", CANDIDATES)(x)[0]) == 2.0


def test_unknown_names_and_missing_candidates_say_what_there_is():
    with pytest.raises(ValueError, match=r"`implementation` must be None or one of .*'mosaic_gpu'.*got 'triton'"):
        choose("triton", CANDIDATES)
    with pytest.raises(NotImplementedError, match=r"head: implementation 'interpret' is not available: .*mosaic_gpu"):
        choose("interpret", CANDIDATES, op="head")
    with (
        declared("8.0"),
        pytest.raises(NotImplementedError, match=r"compiled for compute capability 9.0; the chip has 8.0"),
    ):
        choose("mosaic_gpu", CANDIDATES, op="head")
    assert "because" in str(unavailable("head", "pallas", "because"))
