"""Every operation lowers for CUDA and TPU on this release of jax, with nothing of either installed."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from head_cases import make_head

from pallas_kernels import low_rank_head
from pallas_kernels.aot.chips import declare

CUSTOM_CALLS = {"cuda": "mosaic_gpu", "tpu": "tpu_custom_call"}


def lowered(op: str, platform: str, implementation: str | None, dtype=jnp.bfloat16) -> str:
    head = make_head(dtype=dtype)
    keys = jax.random.split(jax.random.key(0), 3)
    calls = {
        "greedy": lambda hidden: low_rank_head.greedy(hidden, head, implementation=implementation),
        "sample": lambda hidden: low_rank_head.sample(hidden, head, keys, implementation=implementation),
        "logits": lambda hidden: low_rank_head.logits(hidden, head, implementation=implementation),
        "top_candidates": lambda hidden: low_rank_head.top_candidates(hidden, head, 4, implementation=implementation),
    }
    hidden = jax.ShapeDtypeStruct((3, head.hidden_size), jnp.bfloat16)
    return jax.jit(calls[op]).trace(hidden).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("op", ["greedy", "sample", "logits", "top_candidates"])
@pytest.mark.parametrize(("platform", "implementation"), [("cuda", "mosaic_gpu"), ("tpu", "pallas")])
def test_kernels_lower(op, platform, implementation):
    assert CUSTOM_CALLS[platform] in lowered(op, platform, implementation)


def test_float32_weights_lower_for_tpu():
    assert CUSTOM_CALLS["tpu"] in lowered("sample", "tpu", "pallas", jnp.float32)


def test_the_platform_chooses_the_kernel():
    assert CUSTOM_CALLS["tpu"] in lowered("greedy", "tpu", None)
    assert "custom_call" not in lowered("greedy", "cpu", None)
    # No chip is known here: no kernel is chosen for it.
    assert CUSTOM_CALLS["cuda"] not in lowered("greedy", "cuda", None)
    with declare("h200"):
        assert CUSTOM_CALLS["cuda"] in lowered("greedy", "cuda", None)
        assert CUSTOM_CALLS["cuda"] not in lowered("greedy", "cuda", None, jnp.float32)


@pytest.mark.parametrize("chip", ["a100", "b200"])
def test_chips_without_wgmma_take_xla_or_say_why(chip):
    with declare(chip):
        assert CUSTOM_CALLS["cuda"] not in lowered("greedy", "cuda", None)
        with pytest.raises(NotImplementedError, match=r"compiled for compute capability 9\.0; the chip has"):
            lowered("greedy", "cuda", "mosaic_gpu")
