"""Preview heads: cheap low-rank scores over the whole vocabulary, then exact logits of the best few tokens only.

* `spec_vocab` (arXiv 2602.13836): previews of rank d/8 choose the tokens, trained jointly with the drafter by an
  auxiliary loss of weight 0.1. The paper keeps the target's own rows, frozen; the option `trained` trains them. That
  the auxiliary loss is the KL of the previews to the target's law, as the main one, is our reading.
* `low_rank_preview`: a second stage over a finished drafter with a full head, all of it frozen. Previews of a small
  rank start as a truncated SVD of that head (the source's method decides which) and are trained by KL from the full
  head's law to the previews' at every draft step, so that the full head's best tokens are among the candidates.

The exact rows are trained, if at all, as a full head over the whole vocabulary; the choice of candidates has no
gradient. Acceptance is measured with the law that is really drafted from, over the candidates.
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
    without_padded,
)
from specjax.heads.candidates import rescored
from specjax.heads.factorise import start_factors
from specjax.heads.low_rank import random_factors, resolve_factor_rank
from specjax.heads.options import HeadOption
from specjax.heads.source import HeadSource, LossPart

_AUXILIARY_WEIGHT = 0.1
# Second-stage previews need far less: published ones have d/32 to d/40.
_PREVIEW_DIVISOR = 32


def _candidates_option(default: int) -> HeadOption:
    return HeadOption(
        "candidates", default, "Tokens with exact logits; a smaller vocabulary is taken whole.", at_least=1
    )


class PreviewHead(BaseHead):
    """Parameters: `{"rows": [V, d], "down": [d, r], "up": [r, V]}`. A row costs r*(d+V) + C*d multiply-adds."""

    uses_rank = True
    law_is_first_part = False
    options = (_candidates_option(2048), HeadOption("trained", False, "Train the exact rows; otherwise they stay."))
    rank_divisor = DEFAULT_RANK_DIVISOR

    def resolve_rank(self, config: HeadConfig) -> int | None:
        return resolve_factor_rank(config, self.rank_divisor)

    def shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        width, rank, vocab_size = config.hidden_size, config.inner_size, config.vocab_size
        return {"rows": (vocab_size, width), "down": (width, rank), "up": (rank, vocab_size)}

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = jnp.float32) -> HeadParams:
        rows_key, factors_key = jax.random.split(rng_key)
        del rng_key
        width = config.hidden_size
        rows = jax.random.normal(rows_key, (config.vocab_size, width), jnp.float32) * jnp.float32(width**-0.5)
        factors = random_factors(factors_key, width, config.inner_size, config.vocab_size, dtype)
        return {"rows": rows.astype(dtype), **factors}

    def start(self, rng_key: PRNGKeyArray, config: HeadConfig, source: HeadSource) -> HeadParams:
        if source.method == "random":
            random = self.init(rng_key, config)
            if "rows" not in self.fixed_parameters(config):
                return random
            weight = source.dense(config.hidden_size, config.vocab_size)
            return {**random, "rows": jnp.asarray(np.ascontiguousarray(weight.T))}
        weight = source.dense(config.hidden_size, config.vocab_size)
        down, up = start_factors(source, weight, config.inner_size)
        rows = np.ascontiguousarray(weight.T)
        return {"rows": jnp.asarray(rows), "down": jnp.asarray(down), "up": jnp.asarray(up)}

    def fixed_parameters(self, config: HeadConfig) -> tuple[str, ...]:
        return () if config.option("trained") else ("rows",)

    def scores(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... V"]:
        """The previews."""
        return matmul(self.scored_states(params, hidden), params["up"])

    def scored_states(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... r"]:
        """Input of the previews' last product."""
        return matmul(hidden, params["down"]).astype(params["up"].dtype)

    def logits(
        self, params: HeadParams, hidden: Float[Array, "... d"], config: HeadConfig | None = None, position: int = 0
    ) -> Float[Array, "... V"]:
        if config is None:
            raise ValueError("`config` must be given for a head with candidates; got None")
        scores = without_padded(self.scores(params, hidden), config)
        return rescored(params["rows"], hidden, scores, self.num_candidates(config))

    def loss_parts(
        self, params: HeadParams, hidden: Float[Array, "steps ... d"], config: HeadConfig
    ) -> tuple[LossPart, ...]:
        previews = LossPart(self.scored_states(params, hidden), params["up"], weight=_AUXILIARY_WEIGHT, objective="kl")
        return LossPart(hidden.astype(params["rows"].dtype), params["rows"].T), previews

    def num_candidates(self, config: HeadConfig) -> int:
        """Tokens that get exact logits, C."""
        return min(config.option("candidates"), config.vocab_size)

    def merged_weight(self, params: HeadParams, config: HeadConfig | None = None) -> Float[Array, "V d"]:
        return params["rows"]

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        return weight_bytes(self._numbers_read(config), dtype)

    def flops(self, config: HeadConfig, tokens: int) -> int:
        return 2 * tokens * self._numbers_read(config)

    def describe(self, config: HeadConfig) -> str:
        width, rank, vocab_size = config.hidden_size, config.inner_size, config.vocab_size
        return f"[{width}, {rank}] x [{rank}, {vocab_size}], then {self.num_candidates(config)} rows of {width}"

    def _numbers_read(self, config: HeadConfig) -> int:
        width = config.hidden_size
        return config.inner_size * (width + config.vocab_size) + self.num_candidates(config) * width


class FrozenPreviewHead(PreviewHead):
    """The second-stage form: rows and backbone are those of a finished drafter, only the previews are trained."""

    needs_base = True
    trains_backbone = False
    uses_loss = False
    options = (_candidates_option(128),)
    rank_divisor = _PREVIEW_DIVISOR

    def fixed_parameters(self, config: HeadConfig) -> tuple[str, ...]:
        return ("rows",)

    def loss_parts(
        self, params: HeadParams, hidden: Float[Array, "steps ... d"], config: HeadConfig
    ) -> tuple[LossPart, ...]:
        states = self.scored_states(params, hidden)
        return (LossPart(states, params["up"], teacher_states=hidden, teacher_matrix=params["rows"].T, objective="kl"),)


register_head("spec_vocab", PreviewHead())
register_head("low_rank_preview", FrozenPreviewHead())
