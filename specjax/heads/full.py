"""The full head: one matrix from the drafter's width to the vocabulary."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from specjax.heads.base import BaseHead, HeadConfig, HeadParams, matmul, register_head
from specjax.heads.fused import PREPARED, FusedHead, prepared_logits
from specjax.heads.source import HeadSource


class FullHead(FusedHead, BaseHead):
    """Parameters: `{"kernel": [d, V]}`. Costs d*V multiply-adds a row."""

    def shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        return {"kernel": (config.hidden_size, config.vocab_size)}

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = jnp.float32) -> HeadParams:
        shape = (config.hidden_size, config.vocab_size)
        kernel = jax.random.normal(rng_key, shape, jnp.float32) * jnp.float32(config.hidden_size**-0.5)
        return {"kernel": kernel.astype(dtype)}

    def start(self, rng_key: PRNGKeyArray, config: HeadConfig, source: HeadSource) -> HeadParams:
        if source.method == "random":
            return self.init(rng_key, config)
        return {"kernel": jnp.asarray(source.dense(config.hidden_size, config.vocab_size))}

    def project(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return hidden.astype(params["kernel"].dtype)

    def output_matrix(self, params: HeadParams) -> Float[Array, "d V"]:
        return params["kernel"]

    def logits(
        self, params: HeadParams, hidden: Float[Array, "... d"], config: HeadConfig | None = None, position: int = 0
    ) -> Float[Array, "... V"]:
        if PREPARED in params:
            return prepared_logits(params, hidden)
        return matmul(self.project(params, hidden), params["kernel"])

    def merged_weight(self, params: HeadParams, config: HeadConfig | None = None) -> Float[Array, "V d"]:
        return params["kernel"].T

    def from_merged(self, config: HeadConfig, weight: Any, ids: Any) -> HeadParams | None:
        return {"kernel": weight.T}


register_head("full", FullHead())
