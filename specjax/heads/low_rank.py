"""SlimSpec's low-rank head (Plaksin et al., arXiv 2605.10453): two dense products, the whole vocabulary, no selection.

`z = W_up (W_down h)` with `W_down` of r x d and `W_up` of V x r, no bias and nothing between the two. Since every token
keeps a logit, the training loss needs no renormalised target and the checkpoint no vocabulary maps.

With the option `ranks` the pair is nested (a matryoshka): draft step i uses the first ranks[i] inner columns only, the
last rank serves all later steps. Early drafts decide more than late ones, so ranks should not grow.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from specjax.heads.base import (
    DEFAULT_RANK_DIVISOR,
    BaseHead,
    HeadConfig,
    HeadParams,
    matmul,
    register_head,
    weight_bytes,
)
from specjax.heads.factorise import start_factors
from specjax.heads.fused import PREPARED, FusedHead, prepared_logits
from specjax.heads.options import HeadOption
from specjax.heads.source import HeadSource, LossPart


class LowRankHead(FusedHead, BaseHead):
    """Parameters: `{"down": [d, r], "up": [r, V]}`. Costs r*(d+V) multiply-adds a row."""

    uses_rank = True
    options = (
        HeadOption("ranks", (), "Rank of each draft step, such as 96:72:48, none above the one before.", at_least=1),
    )

    def resolve_rank(self, config: HeadConfig) -> int | None:
        ranks = config.option("ranks")
        if config.rank is None and ranks:
            return ranks[0]
        return resolve_factor_rank(config, DEFAULT_RANK_DIVISOR)

    def check(self, config: HeadConfig) -> None:
        ranks = config.option("ranks")
        if ranks and (ranks[0] != config.rank or list(ranks) != sorted(ranks, reverse=True)):
            raise ValueError(f"`ranks` must start with the rank {config.rank} and never grow; got {ranks}")
        if ranks and ranks[0] > config.hidden_size:
            raise ValueError(f"`ranks` must be at most hidden_size={config.hidden_size}; got {ranks}")

    def shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        return {"down": (config.hidden_size, config.inner_size), "up": (config.inner_size, config.vocab_size)}

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = jnp.float32) -> HeadParams:
        return random_factors(rng_key, config.hidden_size, config.inner_size, config.vocab_size, dtype)

    def start(self, rng_key: PRNGKeyArray, config: HeadConfig, source: HeadSource) -> HeadParams:
        if source.method == "random":
            return self.init(rng_key, config)
        down, up = start_factors(source, source.dense(config.hidden_size, config.vocab_size), config.inner_size)
        return {"down": jnp.asarray(down), "up": jnp.asarray(up)}

    def project(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... r"]:
        return matmul(hidden, params["down"]).astype(params["up"].dtype)

    def output_matrix(self, params: HeadParams) -> Float[Array, "r V"]:
        return params["up"]

    def logits(
        self, params: HeadParams, hidden: Float[Array, "... d"], config: HeadConfig | None = None, position: int = 0
    ) -> Float[Array, "... V"]:
        if PREPARED in params:
            return prepared_logits(params, hidden)
        if config is None or not config.option("ranks"):
            return matmul(self.project(params, hidden), params["up"])
        rank = _rank_at(config, position)
        return matmul(self.project({**params, "down": params["down"][:, :rank]}, hidden), params["up"][:rank])

    def loss_parts(
        self, params: HeadParams, hidden: Float[Array, "steps ... d"], config: HeadConfig
    ) -> tuple[LossPart, ...]:
        states = self.project(params, hidden)
        if config.option("ranks"):
            # A zero in an inner column takes the column out of the product: one sweep serves all ranks.
            ranks = np.array([_rank_at(config, step) for step in range(hidden.shape[0])])
            used = np.arange(config.inner_size) < ranks[:, None]
            states = states * jnp.asarray(used.reshape(len(ranks), *([1] * (states.ndim - 2)), -1), states.dtype)
        return (LossPart(states, params["up"]),)

    def merged_weight(self, params: HeadParams, config: HeadConfig | None = None) -> Float[Array, "V d"]:
        down, up = params["down"], params["up"]
        return matmul(up.T, down.T).astype(up.dtype)

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        return weight_bytes(_mean_rank(config) * (config.hidden_size + config.vocab_size), dtype)

    def flops(self, config: HeadConfig, tokens: int) -> int:
        return 2 * tokens * _mean_rank(config) * (config.hidden_size + config.vocab_size)


def resolve_factor_rank(config: HeadConfig, divisor: int) -> int:
    """The configured rank, or the width over a divisor.

    Raises:
        ValueError: if the rank is not in [1, d].
    """
    if config.rank is None:
        return max(1, config.hidden_size // divisor)
    if not 1 <= config.rank <= config.hidden_size:
        raise ValueError(f"`rank` must be in [1, hidden_size={config.hidden_size}]; got {config.rank}")
    return config.rank


def random_factors(rng_key: PRNGKeyArray, width: int, rank: int, vocab_size: int, dtype: Any) -> HeadParams:
    """Normal factors that each keep the scale of their input, so that logits start as those of a full head do."""
    down_key, up_key = jax.random.split(rng_key)
    del rng_key
    down = jax.random.normal(down_key, (width, rank), jnp.float32)
    up = jax.random.normal(up_key, (rank, vocab_size), jnp.float32)
    return {
        "down": (down * jnp.float32(width**-0.5)).astype(dtype),
        "up": (up * jnp.float32(rank**-0.5)).astype(dtype),
    }


def _rank_at(config: HeadConfig, position: int) -> int:
    ranks = config.option("ranks")
    return ranks[min(position, len(ranks) - 1)] if ranks else config.inner_size


def _mean_rank(config: HeadConfig) -> int:
    """Mean over the draft steps that have a rank of their own."""
    ranks = config.option("ranks") or (config.inner_size,)
    return round(sum(ranks) / len(ranks))


register_head("low_rank", LowRankHead())
