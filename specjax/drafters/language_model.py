"""A standalone language model as a drafter: its laws depend on the text alone, as rules with a carry need.

The model is any of the target's family with the target's vocabulary. One that needs no training is the target itself
without some of its layers (`keep_layers`): self-drafting by layer skipping (Zhang et al., "Draft & Verify: Lossless
Large Language Model Acceleration via Self-Speculative Decoding", ACL 2024; Elhoushi et al., "LayerSkip", ACL 2024).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from specjax.drafters.base import ToLaws
from specjax.drafters.tree_levels import TreeLevels
from specjax.models import KVCache, ModelConfig, Params, compute_logits, forward
from specjax.sampling import sample_law
from specjax.types import DRAW_IID, DraftTree, Proposal

_Drafted = tuple[Array, Array, KVCache]
"""Tokens [B, N + 1], laws [B, 1 + places, V] and cache while a tree is drafted."""


@flax.struct.dataclass
class LanguageModelState:
    """The model's memory of the committed text.

    Attributes:
        cache: keys and values of tokens 0 to `length`; slots past them are scratch.
        length: position of the last committed token, [B].
        pending: that token, [B].
        hidden: the model's final state after it, [B, d].
    """

    cache: KVCache
    length: Int[Array, "batch"]
    pending: Int[Array, "batch"]
    hidden: Float[Array, "batch width"]


@dataclasses.dataclass(frozen=True)
class LanguageModelDrafter:
    """Drafts chains and any other tree of i.i.d. draws; params are the model's, see `specjax.models`.

    Attributes:
        config: the model's configuration; its context bounds the engine's cache.
        cache_dtype: dtype of its keys, values and state.
        name: for reports.
    """

    config: ModelConfig
    cache_dtype: str = "float32"
    name: str = "language_model"

    deterministic = False
    feature_layers = ()

    def init_state(self, batch: int, max_length: int, tree: DraftTree) -> LanguageModelState:
        """An empty text.

        Raises:
            ValueError: if the text may outgrow the model's context, or the tree is not of i.i.d. draws.
        """
        longest_text = max_length - tree.num_nodes
        if longest_text > self.config.max_position_embeddings:
            raise ValueError(
                f"`max_position_embeddings` of the drafter must cover the longest text ({longest_text} tokens); "
                f"got {self.config.max_position_embeddings}: shorten the engine's cache or use another drafter"
            )
        if any(tree.draws[node] != DRAW_IID for node in tree.internal):
            raise ValueError(f"`draws` of the tree must be {DRAW_IID!r} for this drafter; got {set(tree.draws)}")
        # `extend` feeds the last known token again, one more than it is given; drafts may need more slots than nodes.
        num_slots = max_length + 1 + max(TreeLevels(tree).num_slots - tree.num_nodes, 0)
        return LanguageModelState(
            cache=KVCache.zeros(self.config, batch, num_slots, self.cache_dtype),
            length=jnp.zeros(batch, jnp.int32),
            pending=jnp.zeros(batch, jnp.int32),
            hidden=jnp.zeros((batch, self.config.hidden_size), self.cache_dtype),
        )

    def begin(self, params: Params, state: LanguageModelState, first_token: Int[Array, "batch"]) -> LanguageModelState:
        """The text starts with `first_token`, which the first `extend` puts into the cache."""
        return dataclasses.replace(state, pending=first_token.astype(jnp.int32))

    def extend(
        self,
        params: Params,
        state: LanguageModelState,
        *,
        tokens: Int[Array, "batch steps"],
        features: Float[Array, "batch steps width"],
        count: Int[Array, "batch"],
    ) -> LanguageModelState:
        """Feeds the last known token once more and the new ones behind it; see `Drafter`."""
        inputs = jnp.concatenate((state.pending[:, None], tokens.astype(jnp.int32)), axis=1)
        output = forward(params, self.config, inputs, state.cache, state.length)
        return LanguageModelState(
            cache=output.cache,
            length=state.length + count.astype(jnp.int32),
            pending=jnp.take_along_axis(inputs, count[:, None], axis=1)[:, 0],
            hidden=jnp.take_along_axis(output.hidden, count[:, None, None], axis=1)[:, 0].astype(state.hidden.dtype),
        )

    def propose(
        self,
        rng_keys: Key[Array, "batch"],
        params: Params,
        state: LanguageModelState,
        *,
        last_token: Int[Array, "batch"],
        tree: DraftTree,
        max_depth: Int[Array, "batch"],
        to_laws: ToLaws,
    ) -> tuple[Proposal, LanguageModelState]:
        """Drafts all nodes of the tree, one call of the model a depth; see `Drafter`.

        The root's law comes from the state after the last token. A node's own entry is computed only where it has
        children.
        """
        batch, levels = last_token.shape[0], TreeLevels(tree)
        first_slot = state.length + 1
        tokens = jnp.zeros((batch, tree.num_nodes), jnp.int32).at[:, 0].set(last_token)
        laws = to_laws(compute_logits(params, self.config, state.hidden[:, None]))
        tokens = _draw(rng_keys, laws, tokens, levels.root_children, jnp.zeros_like(levels.root_children))
        # In one buffer, so that no depth's laws are copied to be joined.
        laws = jnp.pad(laws, ((0, 0), (0, levels.num_slots), (0, 0)))

        def draft(carry: _Drafted, level: dict[str, Array]) -> tuple[_Drafted, None]:
            tokens, laws, cache = carry
            output = forward(
                params,
                self.config,
                tokens[:, level["nodes"]],
                cache,
                first_slot,
                tree_mask=level["sees"],
                depth=jnp.broadcast_to(level["index"], level["nodes"].shape),
                block_offset=level["index"] * levels.width,
            )
            new_laws = to_laws(compute_logits(params, self.config, output.hidden))
            tokens = _draw(rng_keys, new_laws, tokens, level["children"], level["places"])
            laws = jax.lax.dynamic_update_slice(laws, new_laws, (0, 1 + level["index"] * levels.width, 0))
            return (tokens, laws, output.cache), None

        cache = state.cache
        if levels.num_levels:
            # One compiled round for all depths.
            (tokens, laws, cache), _ = jax.lax.scan(draft, (tokens, laws, cache), levels.tables())
        proposal = Proposal(
            tokens=tokens,
            draft_log_laws=laws if levels.is_regular else jnp.take(laws, np.asarray(levels.law_places), axis=1),
            max_depth=jnp.minimum(max_depth, tree.max_depth).astype(jnp.int32),
            tree=tree,
        )
        return proposal, dataclasses.replace(state, cache=cache)


def _draw(
    rng_keys: Key[Array, "batch"],
    laws: Float[Array, "batch nodes vocab"],
    tokens: Int[Array, "batch all_nodes"],
    children: Int[Array, "children"],
    places: Int[Array, "children"],
) -> Int[Array, "batch all_nodes"]:
    """Draws tokens of some nodes from the laws at their parents; a node's key is the row's, folded with its index.

    Args:
        rng_keys: one a row.
        laws: of the parents.
        tokens: of all nodes; those of `children` are written, an index past the end is dropped.
        children: nodes to draw.
        places: of their parents in `laws`.
    """

    def draw_row(rng_key: Array, row: Array) -> Array:
        return jax.vmap(lambda child, place: sample_law(jax.random.fold_in(rng_key, child), row[place]))(
            children, places
        )

    return tokens.at[:, children].set(jax.vmap(draw_row)(rng_keys, laws), mode="drop")


def keep_layers(config: ModelConfig, params: Params, layers: Sequence[int]) -> tuple[ModelConfig, Params]:
    """A smaller model out of some layers of a larger one, in their order; embedding, head and norms stay.

    Args:
        config: the larger model's configuration.
        params: its parameters. The smaller model's are the same arrays: nothing is copied.
        layers: indices of the layers to keep, ascending, at least one.

    Returns:
        Configuration and parameters of the smaller model.

    Raises:
        ValueError: if there is no layer, one does not exist, or they are not ascending.
    """
    layers = tuple(layers)
    if not layers:
        raise ValueError("`layers` must keep at least one layer; got none")
    if min(layers) < 0 or max(layers) >= config.num_layers:
        raise ValueError(f"`layers` must be in [0, {config.num_layers}), the model's layers; got {list(layers)}")
    if any(after <= before for before, after in itertools.pairwise(layers)):
        raise ValueError(f"`layers` must be ascending, each layer once; got {list(layers)}")
    smaller = dataclasses.replace(config, num_layers=len(layers))
    return smaller, {**params, "layers": [params["layers"][layer] for layer in layers]}
