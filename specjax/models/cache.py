"""Key and value cache: slot index equals position for committed tokens."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from specjax.models.attention import update_cache
from specjax.models.config import ModelConfig
from specjax.types import DraftTree


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer.

    The axis order keeps the slots of one head together, which the attention products read in one sweep.

    Attributes:
        keys: one array a layer, each [B, KV, S, head_dim], rotated to their positions.
        values: one array a layer, each [B, KV, S, head_dim].
    """

    # Any: transformations rebuild pytrees with leaves that are no arrays (shapes, axes, None).
    keys: tuple[Any, ...]
    values: tuple[Any, ...]

    @classmethod
    def zeros(
        cls,
        dims: ModelConfig | tuple[int, int, int],
        batch: int,
        max_length: int,
        dtype: DTypeLike = jnp.float32,
    ) -> KVCache:
        """An empty cache.

        Args:
            dims: a configuration, or (number of layers, key-value heads, head_dim).
            batch: rows B.
            max_length: slots S, in tokens; a packed block must fit too.
            dtype: dtype of keys and values.

        Returns:
            The cache, all zeros.

        Raises:
            ValueError: if a size is below 1.
        """
        if isinstance(dims, ModelConfig):
            dims = (dims.num_layers, dims.num_kv_heads, dims.head_dim)
        num_layers, num_kv_heads, head_dim = dims
        for name, value in (("batch", batch), ("max_length", max_length), ("num_layers", num_layers)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1; got {value}")
        shape = (batch, num_kv_heads, max_length, head_dim)
        return cls(
            keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
            values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        )

    @property
    def batch(self) -> int:
        """Number of rows."""
        return self.keys[0].shape[0]

    @property
    def max_length(self) -> int:
        """Number of slots of a row."""
        return self.keys[0].shape[2]


def commit_path(
    cache: KVCache, start: Int[Array, "batch"], path: Int[Array, "batch depth"], *, tree: DraftTree | None = None
) -> KVCache:
    """Moves the accepted path of a packed tree to the slots after the committed prefix.

    Row `start + path[:, i]` goes to slot `start + i`. Negative entries of `path` (unused places) leave
    their slot as it is. Rotations stay right, since a node of depth i already has position `start + i`.

    Args:
        cache: cache after the packed forward.
        start: slot of the root of each row's tree, [B].
        path: node indices of the accepted path, root first, [B, D].
        tree: the packed tree; if it is one chain there is nothing to move and no work is done.

    Returns:
        The cache with the path in place.
    """
    if tree is not None and tree.parent == tuple(range(-1, tree.num_nodes - 1)):
        return cache
    steps = jnp.arange(path.shape[1], dtype=path.dtype)
    slots = start[:, None] + jnp.where(path < 0, steps, path).astype(start.dtype)

    def move(array: Float[Array, "batch kv slots head_dim"]) -> Float[Array, "batch kv slots head_dim"]:
        rows = jnp.take_along_axis(array, slots[:, None, :, None], axis=2, mode="clip")
        return update_cache(array, rows, start)

    return jax.tree.map(move, cache)
