"""Training throughput beside the same step in eager PyTorch, on the same cores, in one run.

    python tests/train/compare_with_torch.py --rounds=8

Needs `pip install -e ".[test,parity]"`. Both sides take the shapes of SmolLM2-135M, random parameters and random
states, the same number of supervised positions and AdamW; rounds alternate, and the ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch_baseline

from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import Eagle3Config
from specjax.models.config import ModelConfig
from train.step import Batch, OptimizerConfig, StepConfig, make_optimizer, make_train_state, make_train_step

WIDTH, VOCAB, RANK, BATCH, LENGTH, STEPS, ROWS, WINDOW = 576, 49152, 72, 4, 256, 3, 64, 16
_TARGET = ModelConfig(
    architecture="llama",
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    rope_theta=1e5,
    rms_norm_eps=1e-5,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_ids=(2,),
)


def jax_step(dtype: str) -> Callable[[], float]:
    """One call is one training step; it returns the loss, so that the step has ended."""
    config = Eagle3Config.for_target(_TARGET, head_kind="low_rank", rank=RANK)
    generator = np.random.default_rng(0)
    lm_head = jnp.asarray(generator.standard_normal((WIDTH, VOCAB)) * WIDTH**-0.5, dtype)
    embed_tokens = jnp.asarray(generator.standard_normal((VOCAB, WIDTH)) * 0.1, jnp.float32)
    params = init_drafter(
        jax.random.key(0), config, {"lm_head": lm_head}, _TARGET, head_init="random", warm_start=False
    )
    optimizer = make_optimizer(OptimizerConfig(name="adamw", learning_rate=1e-3, total_steps=1000, warmup_steps=10))
    step_config = StepConfig(
        num_steps=STEPS, window=WINDOW, loss_rows=ROWS, chunk_rows=128, compute_dtype=dtype, measured_chunks=1
    )
    step = make_train_step(config, step_config, optimizer)
    state = make_train_state(params, optimizer, jax.random.key(1))
    batch = Batch(
        tokens=jnp.asarray(generator.integers(0, VOCAB, (BATCH, LENGTH)), jnp.int32),
        loss_mask=jnp.ones((BATCH, LENGTH), bool),
        features=jnp.asarray(generator.standard_normal((BATCH, LENGTH, 3 * WIDTH)), dtype),
        final_hidden=jnp.asarray(generator.standard_normal((BATCH, LENGTH, WIDTH)), dtype),
    )
    frozen = {"embed_tokens": embed_tokens, "lm_head": lm_head}

    def run() -> float:
        nonlocal state
        state, metrics = step(state, frozen, batch)
        return float(metrics["loss"])

    return run


def torch_step(dtype: str) -> Callable[[], float]:
    """The same for PyTorch: float32 parameters, products under autocast where the dtype is bfloat16."""
    generator = torch.Generator().manual_seed(0)
    drafter = torch_baseline.Drafter(WIDTH, 1536, 9, 3, 64, VOCAB, RANK)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    lm_head = torch.randn(VOCAB, WIDTH, generator=generator) * WIDTH**-0.5
    embed_tokens = torch.randn(VOCAB, WIDTH, generator=generator) * 0.1
    tokens = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=generator)
    features = torch.randn(BATCH, LENGTH, 3 * WIDTH, generator=generator)
    final_hidden = torch.randn(BATCH, LENGTH, WIDTH, generator=generator)
    lower = dtype == "bfloat16"
    if lower:
        lm_head, features, final_hidden = (x.bfloat16() for x in (lm_head, features, final_hidden))

    def run() -> float:
        starts = torch.rand(BATCH, LENGTH // WINDOW - 1, generator=generator).topk(ROWS // WINDOW, dim=1).indices
        rows = (starts[:, :, None] * WINDOW + torch.arange(WINDOW)).flatten(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=lower):
            loss = torch_baseline.loss_of(
                drafter, lm_head, features, embed_tokens[tokens], final_hidden, rows, num_steps=STEPS
            )
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 0.5)
        optimizer.step()
        return loss.item()

    return run


def compare(dtype: str, rounds: int) -> tuple[float, float]:
    """Median seconds of one step: (specjax, PyTorch)."""
    steps = {"specjax": jax_step(dtype), "torch": torch_step(dtype)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - start)
    return statistics.median(seconds["specjax"]), statistics.median(seconds["torch"])


def main() -> None:
    """Prints one line a dtype."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=8, help="Timed steps of each side.")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    print(f"batch {BATCH} x {LENGTH}, S = {STEPS}, {ROWS} positions a row, V = {VOCAB}, rank {RANK}, AdamW")
    for dtype in ("float32", "bfloat16"):
        ours, theirs = compare(dtype, rounds)
        print(f"{dtype}: specjax {ours:.3f} s, PyTorch {theirs:.3f} s, throughput ratio {theirs / ours:.2f}")


if __name__ == "__main__":
    main()
