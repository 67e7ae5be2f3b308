"""Random targets of two narrow layers, and a drafter of fixed tables: small enough to enumerate their laws."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from specjax.decoding.laws import LawParams, to_log_laws
from specjax.drafters.base import ToLaws
from specjax.models import KVCache, ModelConfig, Params, compute_logits, forward, init_params
from specjax.sampling import lowest_argmax, sample_law
from specjax.types import DraftTree, Proposal


@dataclasses.dataclass(frozen=True, eq=False)
class TinyTarget:
    """What the engine needs of a target, and the other fields of a loaded one."""

    config: ModelConfig
    params: Params
    tokenizer: Any = None
    chat_template: Any = None
    source: str = "tiny"
    digest: str = "tiny"
    name: str = "tiny"


def tiny_config(*, vocab_size: int = 13, hidden_size: int = 16, num_layers: int = 2, **fields: Any) -> ModelConfig:
    """A Llama of a few thousand parameters: grouped queries, a context of 64 tokens, no end-of-text token.

    Args:
        vocab_size: V.
        hidden_size: d, a multiple of 8.
        num_layers: decoder layers.
        **fields: any other field of `ModelConfig`.

    Returns:
        The configuration.
    """
    defaults: dict[str, Any] = {
        "intermediate_size": 2 * hidden_size,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": hidden_size // 4,
        "max_position_embeddings": 64,
    }
    return ModelConfig(vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers, **(defaults | fields))


def tiny_target(
    rng_key: PRNGKeyArray,
    *,
    tokenizer: Any = None,
    dtype: DTypeLike = jnp.float32,
    sharpness: float = 3.0,
    **fields: Any,
) -> TinyTarget:
    """A random target whose laws depend on the whole context and are neither flat nor one-hot.

    Args:
        rng_key: consumed.
        tokenizer: text side of the target, or None.
        dtype: of the parameters.
        sharpness: standard deviation of the logits, roughly.
        **fields: of `tiny_config`.

    Returns:
        The target.
    """
    config = tiny_config(**fields)
    params = init_params(rng_key, config, dtype, scale=1.0)
    width = config.hidden_size

    def rescale(path: tuple[Any, ...], leaf: Array) -> Array:
        # Matrices [in, out] keep the size of what passes through; the head gives the logits' spread.
        name = path[-1].key
        if leaf.ndim != 2 or name == "embed_tokens":
            return leaf
        factor = (sharpness if name == "lm_head" else 1.5) / leaf.shape[0] ** 0.5
        return leaf * jnp.asarray(factor, leaf.dtype)

    params = jax.tree.map_with_path(rescale, params)
    if config.tie_word_embeddings:
        params["embed_tokens"] = params["lm_head"].T * jnp.asarray(width**0.5 / sharpness, dtype)
    return TinyTarget(config, params, tokenizer)


def exact_joint_law(
    target: TinyTarget, prompt_ids: tuple[int, ...], num_tokens: int, laws: LawParams
) -> Float[np.ndarray, "..."]:
    """Probability of every continuation of a prompt, by running the target on all of them.

    Args:
        target: the target.
        prompt_ids: the prompt.
        num_tokens: n, length of the continuations.
        laws: temperature and truncation, one row.

    Returns:
        Float64 array of n axes of V entries; entry (x1, ..., xn) is the probability of that continuation.
    """
    vocab_size = target.config.vocab_size
    continuations = np.array(list(itertools.product(range(vocab_size), repeat=num_tokens - 1)), np.int32)
    continuations = continuations.reshape(vocab_size ** (num_tokens - 1), num_tokens - 1)
    prompts = np.broadcast_to(np.asarray(prompt_ids, np.int32), (len(continuations), len(prompt_ids)))
    tokens = jnp.asarray(np.concatenate((prompts, continuations), axis=1))
    rows = jax.tree.map(lambda field: jnp.broadcast_to(field, (tokens.shape[0],)), laws)

    def run(params: Params, tokens: Array, rows: LawParams) -> Array:
        cache = KVCache.zeros(target.config, tokens.shape[0], tokens.shape[1])
        output = forward(params, target.config, tokens, cache, jnp.zeros(tokens.shape[0], jnp.int32))
        return to_log_laws(compute_logits(params, target.config, output.hidden)[:, len(prompt_ids) - 1 :], rows)

    conditional = np.exp(np.asarray(jax.jit(run)(target.params, tokens, rows), np.float64))
    joint = np.ones((len(continuations), 1))
    for position in range(num_tokens - 1):
        chosen = np.take_along_axis(conditional[:, position], continuations[:, position : position + 1], axis=1)
        joint = joint * chosen
    joint = joint * conditional[:, -1]
    return joint.reshape((vocab_size,) * num_tokens)


@dataclasses.dataclass(frozen=True)
class TabularDrafter:
    """Drafts from a table of logits by the last token; params {"logits": [V, V]}. Has no memory.

    Attributes:
        vocab_size: V.
        greedy: takes the most probable token and says that its laws are one-hot.
    """

    vocab_size: int
    greedy: bool = False
    name: str = "tabular"
    feature_layers: tuple[int, ...] = ()

    @property
    def deterministic(self) -> bool:
        """Whether drafts are no random draws."""
        return self.greedy

    def init_params(self, rng_key: PRNGKeyArray, *, sharpness: float = 1.5) -> dict[str, Array]:
        """A random table."""
        shape = (self.vocab_size, self.vocab_size)
        return {"logits": sharpness * jax.random.normal(rng_key, shape, jnp.float32)}

    def init_state(self, batch: int, max_length: int, tree: DraftTree) -> tuple[()]:
        """Nothing to remember."""
        return ()

    def extend(
        self,
        params: Any,
        state: tuple[()],
        *,
        tokens: Int[Array, "batch steps"],
        features: Float[Array, "batch steps width"],
        count: Int[Array, "batch"],
    ) -> tuple[()]:
        """Nothing to remember."""
        return ()

    def propose(
        self,
        rng_keys: Key[Array, "batch"],
        params: Any,
        state: tuple[()],
        *,
        last_token: Int[Array, "batch"],
        tree: DraftTree,
        max_depth: Int[Array, "batch"],
        to_laws: ToLaws,
    ) -> tuple[Proposal, tuple[()]]:
        """Draws every node from the row of its parent's token.

        Raises:
            ValueError: unless the tree is a number of chains.
        """
        num_chains = len(tree.children[0]) or 1
        if tree.parent != DraftTree.chains(num_chains, tree.max_depth).parent:
            raise ValueError(f"`tree` must be a number of chains for the tabular drafter; got {tree.parent}")
        batch = last_token.shape[0]

        def draw(parents: Array, depth: Array) -> tuple[Array, tuple[Array, Array]]:
            laws = to_laws(params["logits"][parents])
            if self.greedy:
                best = lowest_argmax(laws)[..., None]
                laws = jnp.where(jnp.arange(self.vocab_size, dtype=jnp.int32) == best, jnp.float32(0), -jnp.inf)
            keys = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, depth), num_chains))(rng_keys)
            children = jax.vmap(jax.vmap(sample_law))(keys, laws)
            return children, (children, laws)

        root = jnp.repeat(last_token.astype(jnp.int32)[:, None], num_chains, axis=1)
        # One compiled round for all depths.
        _, (children, laws) = jax.lax.scan(draw, root, jnp.arange(tree.max_depth, dtype=jnp.int32))
        # [L, B, K] to nodes by depth, then by chain; the chains share the root's law.
        drafts = jnp.moveaxis(children, 0, 1).reshape(batch, tree.num_nodes - 1)
        below = jnp.moveaxis(laws[1:], 0, 1).reshape(batch, -1, self.vocab_size)
        proposal = Proposal(
            tokens=jnp.concatenate((root[:, :1], drafts), axis=1),
            draft_log_laws=jnp.concatenate((laws[0, :, :1], below), axis=1),
            max_depth=max_depth,
            tree=tree,
        )
        return proposal, state
