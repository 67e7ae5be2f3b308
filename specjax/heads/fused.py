"""Draft heads on the fused kernels of `pallas_kernels.low_rank_head`, where the platform has one.

A head's parameters are laid out for the kernels once, when they are loaded. On CPU, and wherever XLA would run anyway,
they stay as they are, and so does the program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from pallas_kernels import low_rank_head
from pallas_kernels._platform import gpu_compute_capability
from pallas_kernels.low_rank_head import HeadDraw
from pallas_kernels.low_rank_head.api import SERVED
from specjax.heads.base import HeadConfig, HeadParams

PREPARED = "prepared"


class FusedHead:
    """What a head gains whose logits are one or two products: draws that never write its logits.

    A base class beside `BaseHead`, for heads whose parameters are `{"kernel"}` or `{"down", "up"}`.
    """

    def prepare(
        self, params: HeadParams, config: HeadConfig, num_valid_tokens: int | None = None
    ) -> dict[str, low_rank_head.PreparedHead]:
        """Parameters for decoding only: `logits`, `greedy` and `sample` take them in place of the trained ones.

        Args:
            params: the trained parameters.
            config: the head's configuration.
            num_valid_tokens: ids at or above it are padding and are never drawn.
        """
        head = low_rank_head.prepare_weights(params, vocab_size=config.vocab_size, num_valid_tokens=num_valid_tokens)
        return {PREPARED: head}

    def greedy(self, params: HeadParams, hidden: Float[Array, "batch d"]) -> HeadDraw:
        """The most likely tokens, from prepared parameters; see `pallas_kernels.low_rank_head.greedy`."""
        return low_rank_head.greedy(hidden, params[PREPARED])

    def sample(
        self,
        params: HeadParams,
        hidden: Float[Array, "batch d"],
        rng_keys: Key[Array, "batch"],
        temperature: Float[Array, "batch"] | float,
    ) -> HeadDraw:
        """Draws at a temperature, from prepared parameters; see `pallas_kernels.low_rank_head.sample`."""
        return low_rank_head.sample(hidden, params[PREPARED], rng_keys, temperature=temperature)


def prepared_logits(params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... V"]:
    """Float32 logits from prepared parameters, for any number of leading axes."""
    rows = low_rank_head.logits(hidden.reshape(-1, hidden.shape[-1]), params[PREPARED])
    return rows.reshape(*hidden.shape[:-1], rows.shape[-1])


def prepare_for_platform(
    head: Any, params: HeadParams, config: HeadConfig, num_valid_tokens: int | None = None
) -> HeadParams:
    """A head's parameters for decoding on this process's platform: prepared where a kernel serves them.

    Args:
        head: the head of the configuration's kind.
        params: its trained parameters.
        config: its configuration.
        num_valid_tokens: as in `FusedHead.prepare`.
    """
    # Nested ranks use a part of the columns that depends on the draft step; the kernels read whole rows.
    if not isinstance(head, FusedHead) or config.options or not _kernel_serves(params):
        return params
    return head.prepare(params, config, num_valid_tokens)


def _kernel_serves(params: HeadParams) -> bool:
    platform = jax.default_backend()
    if platform == "tpu":
        return True
    is_bfloat16 = all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(params))
    return platform == "gpu" and is_bfloat16 and gpu_compute_capability() in SERVED
