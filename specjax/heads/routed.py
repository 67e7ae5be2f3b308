"""Routed heads: the rows of a dense head lie in groups of equal size, and a small model chooses which ones to multiply.

Neither paper says how it groups, routes or trains in full; what follows is our reconstruction.

* `coral` (arXiv 2502.16880): groups are balanced spherical k-means of the rows. A linear router scores them; it is
  trained, beside the drafter and the rows, by KL from the target's mass in each group. The best `active` groups count.
* `dyna_spec` (arXiv 2510.13847): a second stage over a finished drafter with a full head, which stays as it is. A
  classifier of two layers tells the groups that hold one of the target's `positives` most likely tokens (binary cross
  entropy). The budget shrinks with the draft step t, max(least, active * decay^t) groups: early drafts decide more.
  The paper's third version mixes the shortlist's law with a small floor over the whole vocabulary but does not say
  which; the option `floor` mixes in a uniform one, which is our reading.

As a full head the rows are trained over the whole vocabulary; the choice of groups has no gradient.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from specjax.heads.base import BaseHead, HeadConfig, HeadParams, matmul, register_head, weight_bytes
from specjax.heads.candidates import scattered
from specjax.heads.clustering import balanced_groups
from specjax.heads.options import HeadOption
from specjax.heads.source import HeadSource, LossPart

_ROUTER_WEIGHT = 1.0


class RoutedHead(BaseHead):
    """Parameters: `{"rows": [G, m, d], "ids": [G, m], "router": [d, G]}`; unused places have the id V.

    A row costs d*G + g*m*d multiply-adds, g groups of m = ceil(V / G) tokens.
    """

    law_is_first_part = False
    options = (
        HeadOption("groups", 32, "Groups of tokens, G.", at_least=1),
        HeadOption("active", 8, "Groups whose rows are multiplied.", at_least=1),
    )

    def check(self, config: HeadConfig) -> None:
        if config.option("active") > config.option("groups"):
            raise ValueError(
                f"`active` of the {config.kind} head must be at most groups={config.option('groups')}; "
                f"got {config.option('active')}"
            )
        if config.option("groups") > config.vocab_size:
            raise ValueError(
                f"`groups` of the {config.kind} head must be at most vocab_size={config.vocab_size}; "
                f"got {config.option('groups')}"
            )

    def router_shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        """Matrices of the router, [in, out], in the order of use."""
        return {"router": (config.hidden_size, config.option("groups"))}

    def shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        groups = config.option("groups")
        size = -(-config.vocab_size // groups)
        return {
            "rows": (groups, size, config.hidden_size),
            "ids": (groups, size),
            **self.router_shapes(config),
        }

    def integers(self) -> tuple[str, ...]:
        return ("ids",)

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = jnp.float32) -> HeadParams:
        """Random rows, groups of consecutive ids."""
        rows_key, router_key = jax.random.split(rng_key)
        del rng_key
        shapes = self.shapes(config)
        rows = jax.random.normal(rows_key, shapes["rows"], jnp.float32) * jnp.float32(config.hidden_size**-0.5)
        ids = jnp.minimum(jnp.arange(math.prod(shapes["ids"]), dtype=jnp.int32), config.vocab_size)
        router = self._init_router(router_key, config)
        return {
            "rows": rows.astype(dtype),
            "ids": ids.reshape(shapes["ids"]),
            **{name: matrix.astype(dtype) for name, matrix in router.items()},
        }

    def start(self, rng_key: PRNGKeyArray, config: HeadConfig, source: HeadSource) -> HeadParams:
        weight = source.dense(config.hidden_size, config.vocab_size)
        ids = balanced_groups(np.ascontiguousarray(weight.T), config.option("groups"))
        # Unused places get a row of zeros, which no one reads.
        rows = np.concatenate((weight.T, np.zeros((1, config.hidden_size), np.float32)))[ids]
        router_key, rows_key = jax.random.split(rng_key)
        del rng_key
        router = self._init_router(router_key, config)
        params = {"rows": jnp.asarray(rows), "ids": jnp.asarray(ids), **router}
        if source.method == "random" and "rows" not in self.fixed_parameters(config):
            params["rows"] = self.init(rows_key, config)["rows"]
        return params

    def group_scores(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... G"]:
        """The router's score of each group."""
        return matmul(self.router_states(params, hidden), params["router"])

    def router_states(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... k"]:
        """Input of the router's last product."""
        return hidden.astype(params["router"].dtype)

    def num_active(self, config: HeadConfig, position: int) -> int:
        """Groups that are multiplied at a draft step."""
        return config.option("active")

    def logits(
        self, params: HeadParams, hidden: Float[Array, "... d"], config: HeadConfig | None = None, position: int = 0
    ) -> Float[Array, "... V"]:
        config = _given(config)
        lead = hidden.shape[:-1]
        states = hidden.reshape(-1, hidden.shape[-1])
        scores = self.group_scores(params, states)
        if config.num_valid_tokens is not None:
            # A group of padded rows alone would leave nothing to draft.
            scores = jnp.where(jnp.any(params["ids"] < config.num_valid_tokens, axis=1), scores, -jnp.inf)
        chosen = lax.top_k(scores, self.num_active(config, position))[1]
        if chosen.size > config.option("groups"):
            logits = self._masked_logits(params, states, chosen, config)
            return logits.reshape(*lead, config.vocab_size)

        def one_row(arguments: tuple[Array, Array]) -> tuple[Array, Array]:
            state, groups = arguments

            # Block by block: a block just read is still in the processor's caches when it is multiplied.
            def block(group: Array) -> Array:
                return matmul(state, lax.dynamic_index_in_dim(params["rows"], group, keepdims=False).T)

            return lax.map(block, groups).reshape(-1), params["ids"][groups].reshape(-1)

        # Row by row: each row has groups of its own, and all their copies at once would be larger than the head.
        values, ids = lax.map(one_row, (states, chosen))
        return scattered(values, ids, config.vocab_size).reshape(*lead, config.vocab_size)

    def loss_parts(
        self, params: HeadParams, hidden: Float[Array, "steps ... d"], config: HeadConfig
    ) -> tuple[LossPart, ...]:
        exact = LossPart(hidden.astype(params["rows"].dtype), self._in_order(params, config).T)
        router = LossPart(
            self.router_states(params, lax.stop_gradient(hidden)),
            params["router"],
            classes=self._group_of_token(params, config),
            weight=_ROUTER_WEIGHT,
            objective="kl",
        )
        return exact, router

    def merged_weight(self, params: HeadParams, config: HeadConfig | None = None) -> Float[Array, "V d"]:
        return self._in_order(params, _given(config))

    def num_params(self, config: HeadConfig) -> int:
        router = sum(math.prod(shape) for shape in self.router_shapes(config).values())
        return math.prod(self.shapes(config)["rows"]) + router

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        return weight_bytes(self._numbers_read(config), dtype)

    def flops(self, config: HeadConfig, tokens: int) -> int:
        return 2 * tokens * self._numbers_read(config)

    def describe(self, config: HeadConfig) -> str:
        groups, size, width = self.shapes(config)["rows"]
        return f"{self.num_active(config, 0)} of {groups} groups of [{size}, {width}]"

    def _masked_logits(
        self, params: HeadParams, states: Float[Array, "n d"], chosen: Int[Array, "n g"], config: HeadConfig
    ) -> Float[Array, "n V"]:
        """Many rows need most groups between them: one product over the whole head, then what was not chosen is cut."""
        is_chosen = jnp.any(chosen[:, :, None] == jnp.arange(config.option("groups"), dtype=chosen.dtype), axis=1)
        values = matmul(states, params["rows"].reshape(-1, config.hidden_size).T)
        grouped = values.reshape(states.shape[0], config.option("groups"), -1)
        cut = jnp.where(is_chosen[:, :, None], grouped, -jnp.inf).reshape(values.shape)
        return jnp.take(cut, self._places(params, config), axis=1)

    def _init_router(self, rng_key: PRNGKeyArray, config: HeadConfig) -> HeadParams:
        shapes = self.router_shapes(config)
        keys = jax.random.split(rng_key, len(shapes))
        return {
            name: jax.random.normal(key, shape, jnp.float32) * jnp.float32(shape[0] ** -0.5)
            for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }

    def _numbers_read(self, config: HeadConfig) -> int:
        _, size, width = self.shapes(config)["rows"]
        router = sum(math.prod(shape) for shape in self.router_shapes(config).values())
        return router + self.num_active(config, 0) * size * width

    def _in_order(self, params: HeadParams, config: HeadConfig) -> Float[Array, "V d"]:
        """Rows by token id."""
        return jnp.take(params["rows"].reshape(-1, config.hidden_size), self._places(params, config), axis=0)

    def _places(self, params: HeadParams, config: HeadConfig) -> Int[Array, "V"]:
        """Where each token's row lies; every token is in exactly one group."""
        order = jnp.arange(params["ids"].size, dtype=jnp.int32)
        return jnp.zeros(config.vocab_size, jnp.int32).at[params["ids"].reshape(-1)].set(order, mode="drop")

    def _group_of_token(self, params: HeadParams, config: HeadConfig) -> Int[Array, "V"]:
        groups, size = params["ids"].shape
        owners = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), size)
        return jnp.zeros(config.vocab_size, jnp.int32).at[params["ids"].reshape(-1)].set(owners, mode="drop")


def _given(config: HeadConfig | None) -> HeadConfig:
    if config is None:
        raise ValueError("`config` must be given for a head with groups; got None")
    return config


class ClassifierHead(RoutedHead):
    """The second-stage form: rows and backbone stay; a classifier of two layers chooses a budget by draft step.

    Parameters: as `RoutedHead`, with `{"hidden": [d, w], "router": [w, G]}` for the router.

    A `floor` of f > 0 makes the law at temperature 1 (1 - f) * softmax over the shortlist + f / V, so that every token
    can be drafted; other temperatures act on this mixture as on any law. Padded ids, cut later, take their share with
    them. The order of tokens, so greedy drafting, is that of the shortlist's logits.
    """

    needs_base = True
    trains_backbone = False
    uses_loss = False
    options = (
        *RoutedHead.options,
        HeadOption("width", 64, "Width of the classifier's inner layer.", at_least=1),
        HeadOption("positives", 8, "Most likely tokens of the target whose groups are positive.", at_least=1),
        HeadOption("decay", 0.8, "Groups of a draft step over those of the one before.", at_least=0, at_most=1),
        HeadOption("least", 2, "Groups of any draft step, at least.", at_least=1),
        HeadOption("floor", 0.0, "Share of a uniform law over all tokens, below 1.", at_least=0, at_most=1),
    )

    def check(self, config: HeadConfig) -> None:
        super().check(config)
        if config.option("floor") == 1:
            raise ValueError(f"`floor` of the {config.kind} head must be below 1; got {config.option('floor')}")

    def router_shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        width = config.option("width")
        return {"hidden": (config.hidden_size, width), "router": (width, config.option("groups"))}

    def fixed_parameters(self, config: HeadConfig) -> tuple[str, ...]:
        return ("ids", "rows")

    def router_states(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... k"]:
        return jax.nn.silu(matmul(hidden, params["hidden"])).astype(params["router"].dtype)

    def num_active(self, config: HeadConfig, position: int) -> int:
        wanted = round(config.option("active") * config.option("decay") ** position)
        return min(config.option("active"), max(config.option("least"), wanted))

    def logits(
        self, params: HeadParams, hidden: Float[Array, "... d"], config: HeadConfig | None = None, position: int = 0
    ) -> Float[Array, "... V"]:
        config = _given(config)
        logits = super().logits(params, hidden, config, position)
        floor = config.option("floor")
        if not floor:
            return logits
        # On the scale of the shortlist's logits, which stay unnormalised: rounding then hardly ever makes new ties.
        level = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        return jnp.logaddexp(logits, level + jnp.float32(math.log(floor / (1 - floor) / config.vocab_size)))

    def loss_parts(
        self, params: HeadParams, hidden: Float[Array, "steps ... d"], config: HeadConfig
    ) -> tuple[LossPart, ...]:
        states = self.router_states(params, hidden)
        classes = self._group_of_token(params, config)
        positives = min(config.option("positives"), config.vocab_size)
        return (LossPart(states, params["router"], classes=classes, objective="top_classes", num_top=positives),)


register_head("coral", RoutedHead())
register_head("dyna_spec", ClassifierHead())
