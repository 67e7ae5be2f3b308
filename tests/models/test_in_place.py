"""A step with a donated cache writes into it: the compiled program must not copy whole caches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from specjax.models import KVCache, ModelConfig, commit_path, compute_logits, forward, init_params
from specjax.types import DraftTree

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=192,
    intermediate_size=256,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
)
SLOTS = 136


def whole_copies(compiled: jax.stages.Compiled, batch: int) -> list[str]:
    """Instructions that copy as many elements as one layer's keys."""
    sizes = (f"f32[{batch},2,{SLOTS},32]", f"f32[2,{SLOTS},32]", f"f32[{2 * batch},{SLOTS},32]")
    lines = compiled.as_text().splitlines()
    return [line for line in lines if " copy(" in line and any(f"= {size}" in line for size in sizes)]


def num_aliased(compiled: jax.stages.Compiled) -> int:
    header = compiled.as_text().splitlines()[0]
    return header.count("may-alias") + header.count("must-alias")


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("num_queries", [1, 5])
def test_step_copies_no_cache(batch: int, num_queries: int) -> None:
    @functools.partial(jax.jit, donate_argnums=2)
    def step(params, tokens, cache, start):
        output = forward(params, CONFIG, tokens, cache, start)
        return jnp.argmax(compute_logits(params, CONFIG, output.hidden), axis=-1), output.cache

    params = jax.eval_shape(lambda: init_params(jax.random.key(0), CONFIG))
    cache = KVCache.zeros(CONFIG, batch, SLOTS)
    compiled = step.lower(
        params, jnp.zeros((batch, num_queries), jnp.int32), cache, jnp.zeros(batch, jnp.int32)
    ).compile()
    assert num_aliased(compiled) == 2 * CONFIG.num_layers
    assert whole_copies(compiled, batch) == []


@pytest.mark.parametrize("batch", [1, 8])
def test_committing_copies_no_cache(batch: int) -> None:
    tree = DraftTree.chains(2, 3)
    cache = KVCache.zeros(CONFIG, batch, SLOTS)
    commit = jax.jit(functools.partial(commit_path, tree=tree), donate_argnums=0)
    compiled = commit.lower(cache, jnp.zeros(batch, jnp.int32), jnp.zeros((batch, 4), jnp.int32)).compile()
    assert num_aliased(compiled) == 2 * CONFIG.num_layers
    assert whole_copies(compiled, batch) == []
