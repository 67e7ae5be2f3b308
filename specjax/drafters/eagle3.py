"""EAGLE-3 at decoding time: the draft layer on its own key and value cache.

The committed part of the cache holds entries computed from the target's own states only (never from the drafter's
guesses), so after any acceptance it equals what a fresh run over the committed tokens gives.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.base import ToLaws
from specjax.drafters.eagle3_layer import (
    Eagle3Config,
    Params,
    combine_features,
    compute_logits,
    embed,
    fed_back,
    finish_layer,
    keys_values_of,
    layer_input,
    queries_of,
)
from specjax.heads import get_head
from specjax.heads.fused import prepare_for_platform
from specjax.models.attention import attend, update_cache, visibility_mask
from specjax.models.rope import rope_frequencies, rope_tables, rotate
from specjax.sampling import lowest_argmax, sample_law
from specjax.types import DRAW_IID, DraftTree, Proposal

__all__ = ["Eagle3Config", "Eagle3Drafter", "Eagle3State"]


@flax.struct.dataclass
class Eagle3State:
    """The drafter's memory.

    Attributes:
        keys: rotated keys, [B, KV, S, head_dim]; slot index is the entry's position.
        values: values, [B, KV, S, head_dim].
        length: number of committed entries, [B]; slots past it are scratch.
        hidden: raw output state of the last committed entry, [B, d].
    """

    keys: Float[Array, "batch kv slots head_dim"]
    values: Float[Array, "batch kv slots head_dim"]
    length: Int[Array, "batch"]
    hidden: Float[Array, "batch width"]


@dataclasses.dataclass(frozen=True)
class Eagle3Drafter:
    """EAGLE-3 as a `Drafter`; parameters are those of `eagle3_init`, with the target's `embed_tokens` beside them.

    Attributes:
        config: shape of the drafter.
        cache_dtype: dtype of its keys and values.
        name: for reports.
    """

    config: Eagle3Config
    cache_dtype: str = "float32"
    name: str = "eagle3"

    deterministic = False

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Target layers whose outputs `extend` reads."""
        return self.config.feature_layers

    def prepare(self, params: Params) -> Params:
        """Parameters laid out for decoding on this process's platform; on CPU they stay as they are."""
        config = self.config
        head = prepare_for_platform(get_head(config.head.kind), params["head"], config.head, config.num_valid_tokens)
        return {**params, "head": head}

    def init_state(self, batch: int, max_length: int, tree: DraftTree) -> Eagle3State:
        """An empty state of `max_length` slots a row.

        Raises:
            ValueError: if the text may grow past the drafter's longest context, or the tree is not of i.i.d. draws.
        """
        longest_text = max_length - tree.num_nodes
        if longest_text > self.config.max_position_embeddings:
            raise ValueError(
                f"`max_position_embeddings` of the drafter must cover the longest text ({longest_text} tokens); "
                f"got {self.config.max_position_embeddings}: shorten the engine's cache or use another drafter"
            )
        if any(tree.draws[node] != DRAW_IID for node in tree.internal):
            raise ValueError(f"`draws` of the tree must be {DRAW_IID!r} for this drafter; got {set(tree.draws)}")
        shape = (batch, self.config.num_kv_heads, max_length, self.config.head_dim)
        return Eagle3State(
            keys=jnp.zeros(shape, self.cache_dtype),
            values=jnp.zeros(shape, self.cache_dtype),
            length=jnp.zeros(batch, jnp.int32),
            hidden=jnp.zeros((batch, self.config.hidden_size), self.cache_dtype),
        )

    def extend(
        self,
        params: Params,
        state: Eagle3State,
        *,
        tokens: Int[Array, "batch steps"],
        features: Float[Array, "batch steps features"],
        count: Int[Array, "batch"],
    ) -> Eagle3State:
        """Feeds committed tokens, each with the target's features of the position before it; see `Drafter`."""
        num_steps = tokens.shape[1]
        mask = visibility_mask(state.length, num_steps, state.keys.shape[2])
        positions = state.length[:, None] + jnp.arange(num_steps, dtype=jnp.int32)
        combined = combine_features(params, self.config, features)
        outputs, keys, values = self._run_layer(params, state, tokens, combined, positions, state.length, mask)
        last = jnp.take_along_axis(outputs, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]
        hidden = jnp.where((count > 0)[:, None], last.astype(state.hidden.dtype), state.hidden)
        return Eagle3State(keys=keys, values=values, length=state.length + count.astype(jnp.int32), hidden=hidden)

    def propose(
        self,
        rng_keys: Key[Array, "batch"],
        params: Params,
        state: Eagle3State,
        *,
        last_token: Int[Array, "batch"],
        tree: DraftTree,
        max_depth: Int[Array, "batch"],
        to_laws: ToLaws,
    ) -> tuple[Proposal, Eagle3State]:
        """Drafts all nodes of the tree, one layer call a depth; see `Drafter`.

        The root's law comes from the last committed entry. A node's own entry is computed only where it has children.
        """
        batch = last_token.shape[0]
        tokens: list[Array] = [last_token.astype(jnp.int32)] * tree.num_nodes
        laws: dict[int, Array] = {}
        hidden = {0: state.hidden}
        slots = _draft_slots(tree)
        for depth in range(tree.max_depth):
            nodes = [node for node in tree.internal if tree.depth[node] == depth]
            if depth > 0:
                parents = [hidden[tree.parent[node]] for node in nodes]
                first_slot = slots[nodes[0]]
                outputs, keys, values = self._run_layer(
                    params,
                    state,
                    jnp.stack([tokens[node] for node in nodes], axis=1),
                    fed_back(params, self.config, jnp.stack(parents, axis=1)),
                    jnp.broadcast_to((state.length + (depth - 1))[:, None], (batch, len(nodes))),
                    state.length + first_slot,
                    _ancestor_visibility(tree, nodes, slots, state),
                )
                state = dataclasses.replace(state, keys=keys, values=values)
                hidden |= {node: outputs[:, index] for index, node in enumerate(nodes)}
            stacked = jnp.stack([hidden[node] for node in nodes], axis=1)
            node_laws = to_laws(compute_logits(params, self.config, stacked, depth))
            drawn = _draw_children(rng_keys, node_laws, tree, nodes)
            for index, node in enumerate(nodes):
                laws[node] = node_laws[:, index]
                for child in tree.children[node]:
                    tokens[child] = drawn[child]
        proposal = Proposal(
            tokens=jnp.stack(tokens, axis=1),
            draft_log_laws=(
                jnp.stack([laws[node] for node in tree.internal], axis=1)
                if tree.internal
                else jnp.zeros((batch, 0, self.config.vocab_size), jnp.float32)
            ),
            # Before the first committed entry there is no state to draft from.
            max_depth=jnp.where(state.length > 0, jnp.minimum(max_depth, tree.max_depth), 0).astype(jnp.int32),
            tree=tree,
        )
        return proposal, state

    def _run_layer(
        self,
        params: Params,
        state: Eagle3State,
        tokens: Int[Array, "batch time"],
        hidden: Float[Array, "batch time width"],
        positions: Int[Array, "batch time"],
        first_slot: Int[Array, "batch"],
        mask: Bool[Array, "batch time slots"],
    ) -> tuple[Float[Array, "batch time width"], Any, Any]:
        """One layer call: writes the block's keys and values at `first_slot`, returns raw outputs and the cache."""
        inputs, residual = layer_input(params, self.config, embed(params, tokens), hidden)
        queries = queries_of(params, self.config, inputs)
        new_keys, new_values = keys_values_of(params, self.config, inputs)
        cos, sin = rope_tables(positions, rope_frequencies(self.config))
        keys = update_cache(state.keys, rotate(new_keys, cos, sin), first_slot)
        values = update_cache(state.values, new_values, first_slot)
        mixed = attend(rotate(queries, cos, sin), keys, values, mask)
        return finish_layer(params, self.config, residual, mixed), keys, values


def _draft_slots(tree: DraftTree) -> dict[int, int]:
    """Scratch slot of each node that has an entry, relative to the committed length: by depth, then by index."""
    nodes = sorted((node for node in tree.internal if node != 0), key=lambda node: (tree.depth[node], node))
    return {node: slot for slot, node in enumerate(nodes)}


def _ancestor_visibility(
    tree: DraftTree, nodes: list[int], slots: dict[int, int], state: Eagle3State
) -> Bool[Array, "batch time slots"]:
    """Committed slots, and the scratch slots of a node and its ancestors."""
    sees = np.zeros((len(nodes), len(slots)), bool)
    for index, node in enumerate(nodes):
        for other, slot in slots.items():
            sees[index, slot] = tree.ancestor_mask[node, other]
    offset = jnp.arange(state.keys.shape[2], dtype=jnp.int32)[None, :] - state.length[:, None]
    in_scratch = jnp.take(jnp.asarray(sees), offset, axis=1, mode="fill", fill_value=False)
    in_scratch = jnp.swapaxes(in_scratch, 0, 1) & (offset >= 0)[:, None, :]
    return in_scratch | (offset < 0)[:, None, :]


def _draw_children(
    rng_keys: Key[Array, "batch"], laws: Float[Array, "batch nodes vocab"], tree: DraftTree, nodes: list[int]
) -> dict[int, Int[Array, "batch"]]:
    """Independent draws for all children of some nodes; the key of a child is the row's, folded with its index."""
    parents = [index for index, node in enumerate(nodes) for _ in tree.children[node]]
    children = [child for node in nodes for child in tree.children[node]]

    def draw(laws: Array) -> Array:
        by_node = []
        for index, node in enumerate(nodes):
            child_keys = jax.vmap(
                lambda key, node=node: jax.vmap(lambda child: jax.random.fold_in(key, child))(
                    jnp.asarray(tree.children[node], jnp.uint32)
                )
            )(rng_keys)
            draws = jax.vmap(lambda keys, law: jax.vmap(sample_law, in_axes=(0, None))(keys, law))
            by_node.append(draws(child_keys, laws[:, index]))
        return jnp.concatenate(by_node, axis=1)

    def take_certain(laws: Array) -> Array:
        return jnp.take(lowest_argmax(laws), jnp.asarray(parents), axis=1)

    # One-hot laws leave nothing to draw: greedy batches pay for no noise and no further pass of exponentials.
    certain = jnp.all(jnp.sum(laws > -jnp.inf, axis=-1) == 1)
    drawn = jax.lax.cond(certain, take_certain, draw, laws)
    return {child: drawn[:, index] for index, child in enumerate(children)}
