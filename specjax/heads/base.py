"""What a draft LM head is: a protocol, its configuration and the registry of kinds.

Every head here computes logits in two parts, `project` (from the drafter's width to the width of the head's last
matrix) and one product with `output_matrix`. The loss is fused with that last product, so it works for any head
without knowing its kind; decoding and cost measurement only call `logits` and the counters.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PRNGKeyArray

HeadParams = dict[str, Any]

# SlimSpec's recommended rank is an eighth of the drafter's width (Plaksin et al., arXiv 2605.10453).
DEFAULT_RANK_DIVISOR = 8


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft LM head.

    Attributes:
        kind: a registered kind, for example "full" or "low_rank".
        hidden_size: width of the drafter's final hidden state, d.
        vocab_size: number of logits, V: the target's whole vocabulary.
        rank: inner width of a low-rank head, r; None means `hidden_size // 8`. Must be None for the full head.

    Raises:
        ValueError: if the kind is unknown or a size is out of range.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    rank: int | None = None

    def __post_init__(self) -> None:
        for field in ("hidden_size", "vocab_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1; got {getattr(self, field)}")
        object.__setattr__(self, "rank", get_head(self.kind).resolve_rank(self))

    @property
    def inner_size(self) -> int:
        """Width of the input of the last product: r for a low-rank head, d for the full head."""
        return self.hidden_size if self.rank is None else self.rank


@runtime_checkable
class Head(Protocol):
    """A kind of draft LM head: pure functions of a `HeadConfig` and a dictionary of arrays.

    In the shape descriptions d is the drafter's width, k the width of the last matrix and V the vocabulary.
    """

    def resolve_rank(self, config: HeadConfig) -> int | None:
        """The rank to use: checks the configured one or fills in the default. Raises ValueError if it is impossible."""
        ...

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = ...) -> HeadParams:
        """Random parameters. The key is consumed."""
        ...

    def project(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... k"]:
        """Everything before the last product, in the parameters' dtype."""
        ...

    def output_matrix(self, params: HeadParams) -> Float[Array, "k V"]:
        """The last matrix: `logits = project(hidden) @ output_matrix`."""
        ...

    def logits(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... V"]:
        """Float32 logits over the whole vocabulary; products accumulate in float32."""
        ...

    def merged_weight(self, params: HeadParams) -> Float[Array, "V d"]:
        """The one dense matrix that gives the same logits, in the [out, in] order of checkpoints."""
        ...

    def num_params(self, config: HeadConfig) -> int:
        """Number of parameters."""
        ...

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        """Bytes of weights that one call reads, whatever the number of rows."""
        ...

    def flops(self, config: HeadConfig, tokens: int) -> int:
        """Floating point operations of one call over `tokens` rows; a multiply-add counts as two."""
        ...


_HEADS: dict[str, Head] = {}


def register_head(kind: str, head: Head) -> None:
    """Makes a kind of head known under a name.

    Raises:
        ValueError: if the name is taken.
    """
    if kind in _HEADS:
        raise ValueError(f"head kind {kind!r} is already registered")
    _HEADS[kind] = head


def get_head(kind: str) -> Head:
    """The head registered under a name.

    Raises:
        ValueError: if there is none; the message lists the known kinds.
    """
    if kind not in _HEADS:
        raise ValueError(f"`kind` of a head must be one of {sorted(_HEADS)}; got {kind!r}")
    return _HEADS[kind]


def weight_bytes(num_params: int, dtype: Any) -> int:
    """Bytes of that many parameters."""
    return num_params * np.dtype(dtype).itemsize


def matmul(x: Float[Array, "... inputs"], kernel: Float[Array, "inputs outputs"]) -> Float[Array, "... outputs"]:
    """`x @ kernel` with operands in the kernel's dtype and a float32 result."""
    # Float32 means float32 on every backend, also where the default is a faster, rounder product.
    precision = lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.matmul(x.astype(kernel.dtype), kernel, precision=precision, preferred_element_type=jnp.float32)
