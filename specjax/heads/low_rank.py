"""SlimSpec's low-rank head (Plaksin et al., arXiv 2605.10453): two dense products, the whole vocabulary, no selection.

`z = W_up (W_down h)` with `W_down` of r x d and `W_up` of V x r, no bias and nothing between the two. Since every token
keeps a logit, the training loss needs no renormalised target and the checkpoint no vocabulary maps.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from specjax.heads.base import DEFAULT_RANK_DIVISOR, HeadConfig, HeadParams, matmul, register_head, weight_bytes


class LowRankHead:
    """Parameters: `{"down": [d, r], "up": [r, V]}`. Costs r*(d+V) multiply-adds a row."""

    def resolve_rank(self, config: HeadConfig) -> int | None:
        if config.rank is None:
            return max(1, config.hidden_size // DEFAULT_RANK_DIVISOR)
        if not 1 <= config.rank <= config.hidden_size:
            raise ValueError(f"`rank` must be in [1, hidden_size={config.hidden_size}]; got {config.rank}")
        return config.rank

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = jnp.float32) -> HeadParams:
        down_key, up_key = jax.random.split(rng_key)
        del rng_key
        # Each factor keeps the scale of its input, so that logits start as those of the full head do.
        down = jax.random.normal(down_key, (config.hidden_size, config.inner_size), jnp.float32)
        up = jax.random.normal(up_key, (config.inner_size, config.vocab_size), jnp.float32)
        return {
            "down": (down * jnp.float32(config.hidden_size**-0.5)).astype(dtype),
            "up": (up * jnp.float32(config.inner_size**-0.5)).astype(dtype),
        }

    def project(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... r"]:
        return matmul(hidden, params["down"]).astype(params["up"].dtype)

    def output_matrix(self, params: HeadParams) -> Float[Array, "r V"]:
        return params["up"]

    def logits(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... V"]:
        return matmul(self.project(params, hidden), params["up"])

    def merged_weight(self, params: HeadParams) -> Float[Array, "V d"]:
        down, up = params["down"], params["up"]
        return matmul(up.T, down.T).astype(up.dtype)

    def num_params(self, config: HeadConfig) -> int:
        return config.inner_size * (config.hidden_size + config.vocab_size)

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        return weight_bytes(self.num_params(config), dtype)

    def flops(self, config: HeadConfig, tokens: int) -> int:
        return 2 * tokens * self.num_params(config)


register_head("low_rank", LowRankHead())
