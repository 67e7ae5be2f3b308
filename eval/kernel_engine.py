"""The whole jitted engine step at Llama-3.1-8B's shapes, compiled for a chip with weights that are shapes only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import aot
from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.decoding.program import ProgramSpec, get_program, init_state
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.heads import HeadConfig, get_head
from specjax.models import init_params
from specjax.types import DraftTree

TARGET = "meta-llama/Llama-3.1-8B-Instruct"
_FEATURE_LAYERS = (2, 15, 28)
_CACHE_LENGTH = 2048


def engine_step_case(*, verifier: str = "block", draft_length: int = 4, batch: int = 1, rank: int = 512) -> aot.Case:
    """The step as a program to compile.

    Args:
        verifier: name of the rule.
        draft_length: L, one chain.
        batch: slots.
        rank: of the drafter's low-rank head.
    """
    arguments = {"verifier": verifier, "draft_length": draft_length, "batch": batch, "rank": rank}
    name = f"engine step, {TARGET}, {verifier}, L = {draft_length}, {batch} slots, rank {rank}"
    return aot.Case(name, "eval.kernel_engine:build", arguments)


def build(verifier: str, draft_length: int, batch: int, rank: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step, and the shapes of parameters and state: bfloat16 weights and caches, nothing of it in memory."""
    config = PUBLISHED_CONFIGS[TARGET]
    drafter: Any = Eagle3Drafter(
        Eagle3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            target_hidden_size=config.hidden_size,
            feature_layers=_FEATURE_LAYERS,
            head=HeadConfig("low_rank", config.hidden_size, config.vocab_size, rank),
            rope_theta=config.rope_theta,
            max_position_embeddings=_CACHE_LENGTH,
        ),
        cache_dtype="bfloat16",
    )
    spec = ProgramSpec(config, DraftTree.chains(1, draft_length), drafter, (verifier,), _CACHE_LENGTH - 64, 8)

    def make() -> tuple[Any, Any, Any]:
        key = jax.random.key(0)
        params = init_params(key, config, jnp.bfloat16)
        trained = init_drafter(
            key, drafter.config, params, config, head_init="random", warm_start=False, dtype=jnp.bfloat16
        )
        # What `Eagle3Drafter.prepare` does on the chip itself; here it would ask this process's platform.
        low_rank: Any = get_head(drafter.config.head.kind)
        head = low_rank.prepare(trained["head"], drafter.config.head)
        drafter_params = {**trained, "head": head, "embed_tokens": params["embed_tokens"]}
        return params, drafter_params, init_state(spec, batch, jnp.bfloat16)

    step = get_program(spec).step
    return lambda params, drafter_params, state: step(params, drafter_params, state), jax.eval_shape(make)


def print_engine_step(result: dict[str, Any]) -> None:
    """Kernels, bytes and temporaries of the step, and how often each kind of kernel starts."""
    print(f"{result['name']}, compiled for {result['chip']} with {result['jax']}; nothing was run.")
    if "error" in result:
        print(f"not compiled: {result['error']}")
        return
    kinds: dict[str, int] = {}
    for kernel in result["kernels"]:
        kind = kernel.split(" (")[-1].rstrip(")") if " (" in kernel else kernel.split(".")[0]
        kinds[kind] = kinds.get(kind, 0) + 1
    print(
        f"{len(result['kernels'])} kernels, operands and results {result['bytes_moved'] / 1e9:.2f} GB (look-ups "
        f"whole), temporaries {result['temporary_bytes'] / 1e6:.1f} MB, compiled in {result['seconds']} s"
    )
    for kernel in result["mosaic_kernels"]:
        print(
            f"Mosaic kernel: {kernel['registers']} registers, {kernel['spill_bytes']} bytes spilled, "
            f"{kernel['smem_bytes']} bytes of shared memory"
        )
    for kind, count in sorted(kinds.items(), key=lambda item: -item[1]):
        print(f"{count:>6}  {kind}")
