"""A small language model as a drafter, with a key and value cache of its own.

With the target itself as the model every draft is accepted, which makes faults of caches and positions visible.
"""

from __future__ import annotations

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from specjax.drafters.base import ToLaws
from specjax.models import KVCache, ModelConfig, Params, compute_logits, forward
from specjax.sampling import sample_law
from specjax.types import DraftTree, Proposal


@flax.struct.dataclass
class LanguageModelState:
    """The model's memory of the committed text.

    Attributes:
        cache: keys and values of tokens 0 to `length` - 1; slots past them are scratch.
        length: [B].
        pending: token at position `length`, known but not in the cache, [B].
    """

    cache: KVCache
    length: Int[Array, "batch"]
    pending: Int[Array, "batch"]


@dataclasses.dataclass(frozen=True)
class LanguageModelDrafter:
    """Drafts one chain with a model of the target's vocabulary; params are the model's.

    Attributes:
        config: the model's configuration; its context bounds the engine's cache.
    """

    config: ModelConfig
    name: str = "language_model"
    deterministic: bool = False
    feature_layers: tuple[int, ...] = ()

    def init_state(self, batch: int, max_length: int, tree: DraftTree) -> LanguageModelState:
        """An empty text.

        Raises:
            ValueError: if the text may outgrow the model's context, or the tree is not one chain.
        """
        longest_text = max_length - tree.num_nodes
        if longest_text > self.config.max_position_embeddings:
            raise ValueError(
                f"`max_position_embeddings` of the drafter must cover the longest text ({longest_text} tokens); "
                f"got {self.config.max_position_embeddings}"
            )
        if tree.parent != tuple(range(-1, tree.num_nodes - 1)):
            raise ValueError(f"`num_drafts` must be 1 for this drafter; got the tree {tree.parent}")
        return LanguageModelState(
            cache=KVCache.zeros(self.config, batch, max_length),
            length=jnp.zeros(batch, jnp.int32),
            pending=jnp.zeros(batch, jnp.int32),
        )

    def begin(self, params: Params, state: LanguageModelState, first_token: Int[Array, "batch"]) -> LanguageModelState:
        """The text starts with `first_token`."""
        return state.replace(pending=first_token.astype(jnp.int32))  # pyright: ignore[reportAttributeAccessIssue]

    def extend(
        self,
        params: Params,
        state: LanguageModelState,
        *,
        tokens: Int[Array, "batch steps"],
        features: Float[Array, "batch steps width"],
        count: Int[Array, "batch"],
    ) -> LanguageModelState:
        """Puts the pending token and all new ones but the last into the cache."""
        tokens = tokens.astype(jnp.int32)
        inputs = jnp.concatenate((state.pending[:, None], tokens[:, :-1]), axis=1)
        output = forward(params, self.config, inputs, state.cache, state.length)
        last = jnp.take_along_axis(tokens, jnp.maximum(count - 1, 0)[:, None], axis=1)[:, 0]
        return LanguageModelState(
            cache=output.cache,
            length=state.length + count,
            pending=jnp.where(count > 0, last, state.pending),
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
        """Samples a continuation token by token."""

        def draw(carry: tuple[Array, KVCache], depth: Array) -> tuple[tuple[Array, KVCache], tuple[Array, Array]]:
            token, cache = carry
            output = forward(params, self.config, token[:, None], cache, state.length + depth)
            law = to_laws(compute_logits(params, self.config, output.hidden))[:, 0]
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(rng_keys, depth)
            token = jax.vmap(sample_law)(keys, law)
            return (token, output.cache), (token, law)

        root = last_token.astype(jnp.int32)
        depths = jnp.arange(tree.max_depth, dtype=jnp.int32)
        # One compiled round for all depths.
        (_, cache), (drafts, laws) = jax.lax.scan(draw, (root, state.cache), depths)
        proposal = Proposal(
            tokens=jnp.concatenate((root[:, None], drafts.T), axis=1),
            draft_log_laws=jnp.moveaxis(laws, 0, 1),
            max_depth=max_depth,
            tree=tree,
        )
        return proposal, state.replace(cache=cache)  # pyright: ignore[reportAttributeAccessIssue]
