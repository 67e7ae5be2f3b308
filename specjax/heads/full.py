"""The full head: one matrix from the drafter's width to the vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from specjax.heads.base import HeadConfig, HeadParams, matmul, register_head, weight_bytes


class FullHead:
    """Parameters: `{"kernel": [d, V]}`. Costs d*V multiply-adds a row."""

    def resolve_rank(self, config: HeadConfig) -> int | None:
        if config.rank is not None:
            raise ValueError(f"`rank` must be None for the full head; got {config.rank}")
        return None

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = jnp.float32) -> HeadParams:
        shape = (config.hidden_size, config.vocab_size)
        kernel = jax.random.normal(rng_key, shape, jnp.float32) * jnp.float32(config.hidden_size**-0.5)
        return {"kernel": kernel.astype(dtype)}

    def project(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return hidden.astype(params["kernel"].dtype)

    def output_matrix(self, params: HeadParams) -> Float[Array, "d V"]:
        return params["kernel"]

    def logits(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... V"]:
        return matmul(hidden, params["kernel"])

    def merged_weight(self, params: HeadParams) -> Float[Array, "V d"]:
        return params["kernel"].T

    def num_params(self, config: HeadConfig) -> int:
        return config.hidden_size * config.vocab_size

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        return weight_bytes(self.num_params(config), dtype)

    def flops(self, config: HeadConfig, tokens: int) -> int:
        return 2 * tokens * self.num_params(config)


register_head("full", FullHead())
