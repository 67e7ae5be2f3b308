"""Heads over a fixed part of the vocabulary: some rows of a dense head, chosen by frequency before decoding.

* `fr_spec` (Zhao et al., arXiv 2502.14856): the tokens most frequent in a corpus; rows of the dense head as they are.
* `vocab_trim` (Goel et al., arXiv 2506.22694): the tokens most frequent in the target's own answers; rows as they are,
  or with the option `trained` rows that training goes on with (called VocabTrim-T by Plaksin et al.; that "T" stands
  for trained is our reading). EAGLE-3's own `d2t` head is of this form too.
* `bcl` (Ben Shoham, arXiv 2603.05210): as `vocab_trim` with trained rows; the number of tokens maximises a utility of
  coverage and saved operations, see `vocabulary.choose_size`.

Tokens without a row have probability zero under the draft's law, which costs acceptance and never exactness. A KL loss
compares the draft's law with the target's law *renormalised* over the kept tokens. Its optimum has the best possible
acceptance, the target's mass over the kept tokens (the ceiling), but so has every law that is nowhere below the
target's real one, and away from the optimum the two disagree: a context whose mass lies mostly outside counts as much
as any other although hardly anything can be gained there. The losses "lk" and "tv" see the real mass.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from specjax.heads.base import BaseHead, HeadConfig, HeadParams, matmul, register_head
from specjax.heads.options import HeadOption
from specjax.heads.source import HeadSource, LossPart
from specjax.heads.vocabulary import choose_size, select_ids

# 32K of 128K tokens, the size that the comparisons in the literature share.
_DEFAULT_DIVISOR = 4

_COMMON = (
    HeadOption("rows", 0, "Tokens that are kept; 0 is a quarter of the vocabulary (bcl: chosen by it).", at_least=0),
    HeadOption("force_special", True, "Keep all control tokens."),
    HeadOption("force_bytes", True, "Keep the tokens of one raw byte each."),
)


class StaticVocabularyHead(BaseHead):
    """Parameters: `{"kernel": [d, k], "ids": [k]}`, ids ascending. Costs d*k multiply-adds a row."""

    options = (*_COMMON, HeadOption("trained", False, "Train the kept rows; otherwise they stay as they are."))
    counts = "answer_counts"

    def check(self, config: HeadConfig) -> None:
        if config.option("rows") > config.vocab_size:
            raise ValueError(
                f"`rows` of the {config.kind} head must be at most vocab_size={config.vocab_size}; "
                f"got {config.option('rows')}"
            )

    def shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        rows = self.num_rows(config)
        return {"kernel": (config.hidden_size, rows), "ids": (rows,)}

    def num_rows(self, config: HeadConfig) -> int:
        """Tokens that are kept, k."""
        return config.option("rows") or max(1, config.vocab_size // _DEFAULT_DIVISOR)

    def integers(self) -> tuple[str, ...]:
        return ("ids",)

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = jnp.float32) -> HeadParams:
        """Random rows for the lowest ids."""
        shape = self.shapes(config)["kernel"]
        kernel = jax.random.normal(rng_key, shape, jnp.float32) * jnp.float32(config.hidden_size**-0.5)
        return {"kernel": kernel.astype(dtype), "ids": jnp.arange(shape[1], dtype=jnp.int32)}

    def start(self, rng_key: PRNGKeyArray, config: HeadConfig, source: HeadSource) -> HeadParams:
        ids = select_ids(
            self._counts(config, source),
            self.num_rows(config),
            num_valid_tokens=source.num_valid_tokens,
            forced=self._forced(config, source),
        )
        if source.method == "random" and self._trains_rows(config):
            params = self.init(rng_key, config)
        else:
            weight = source.dense(config.hidden_size, config.vocab_size)
            params = {"kernel": jnp.asarray(np.ascontiguousarray(weight[:, ids]))}
        return {**params, "ids": jnp.asarray(ids)}

    def fixed_parameters(self, config: HeadConfig) -> tuple[str, ...]:
        return ("ids",) if self._trains_rows(config) else ("ids", "kernel")

    def is_trained(self, config: HeadConfig) -> bool:
        return self._trains_rows(config)

    def project(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... d"]:
        return hidden.astype(params["kernel"].dtype)

    def output_matrix(self, params: HeadParams) -> Float[Array, "d k"]:
        return params["kernel"]

    def logits(
        self, params: HeadParams, hidden: Float[Array, "... d"], config: HeadConfig | None = None, position: int = 0
    ) -> Float[Array, "... V"]:
        if config is None:
            raise ValueError("`config` must be given for a head over a part of the vocabulary; got None")
        kept = matmul(hidden, params["kernel"])
        everywhere = jnp.full((*kept.shape[:-1], config.vocab_size), -jnp.inf, jnp.float32)
        return everywhere.at[..., params["ids"]].set(kept, indices_are_sorted=True, unique_indices=True)

    def loss_parts(
        self, params: HeadParams, hidden: Float[Array, "steps ... d"], config: HeadConfig
    ) -> tuple[LossPart, ...]:
        return (LossPart(self.project(params, hidden), params["kernel"], columns=params["ids"]),)

    def support(self, params: HeadParams) -> Int[Array, "k"] | None:
        return params["ids"]

    def merged_weight(self, params: HeadParams, config: HeadConfig | None = None) -> Float[Array, "k d"]:
        return params["kernel"].T

    def from_merged(self, config: HeadConfig, weight: Any, ids: Any) -> HeadParams | None:
        return None if ids is None else {"kernel": weight.T, "ids": ids}

    def describe(self, config: HeadConfig) -> str:
        return f"[{config.hidden_size}, {self.num_rows(config)}] of {config.vocab_size} tokens"

    def _trains_rows(self, config: HeadConfig) -> bool:
        return config.option("trained")

    def _counts(self, config: HeadConfig, source: HeadSource) -> np.ndarray:
        counts = getattr(source, self.counts)
        if counts is None or counts.shape != (config.vocab_size,):
            found = None if counts is None else list(counts.shape)
            raise ValueError(
                f"`{self.counts}` of shape [{config.vocab_size}] must be given for {config.kind}; got {found}"
            )
        return counts

    def _forced(self, config: HeadConfig, source: HeadSource) -> tuple[int, ...]:
        special = source.special_ids if config.option("force_special") else ()
        return (*special, *(source.byte_ids if config.option("force_bytes") else ()))


class CorpusVocabularyHead(StaticVocabularyHead):
    """FR-Spec: the ids come from a corpus, the rows are never trained."""

    options = _COMMON
    counts = "corpus_counts"

    def _trains_rows(self, config: HeadConfig) -> bool:
        return False


class BalancedVocabularyHead(StaticVocabularyHead):
    """BCL: `fit` chooses the number of ids."""

    options = (
        *_COMMON,
        HeadOption("alpha", 0.5, "Importance of coverage against saved operations.", at_least=0, at_most=1),
        HeadOption("least_coverage", 0.0, "Coverage that must be reached.", at_least=0, at_most=1),
        HeadOption("smallest", 50, "Smallest number of tokens that is considered.", at_least=1),
        HeadOption("largest", 50000, "Largest number of tokens that is considered.", at_least=1),
    )

    def fit(self, config: HeadConfig, source: HeadSource) -> HeadConfig:
        if config.option("rows"):
            return config
        counts = self._counts(config, source)
        valid = source.num_valid_tokens or config.vocab_size
        chosen = choose_size(
            counts,
            backbone_flops=source.backbone_flops,
            flops_per_id=2 * config.hidden_size,
            alpha=config.option("alpha"),
            least_coverage=config.option("least_coverage"),
            smallest=min(config.option("smallest"), valid),
            largest=config.option("largest"),
            num_valid_tokens=source.num_valid_tokens,
        )
        forced = {token for token in self._forced(config, source) if token < valid}
        return config.with_options(rows=max(chosen.size, len(forced)))

    def _trains_rows(self, config: HeadConfig) -> bool:
        return True


register_head("fr_spec", CorpusVocabularyHead())
register_head("vocab_trim", StaticVocabularyHead())
register_head("bcl", BalancedVocabularyHead())
