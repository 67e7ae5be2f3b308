"""What a draft LM head is: a protocol, its configuration, defaults for its methods and the registry of kinds.

Decoding and cost measurement call `logits` and the counters only. Training asks a head for its `loss_parts`, each a
product with a last matrix and a law to imitate, and for the parameters that stay as they are. So neither ever looks
at a head's kind, and a new head is one file that subclasses `BaseHead` and registers an instance.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from specjax.heads.options import HeadOption, check_option
from specjax.heads.source import HeadSource, LossPart

HeadParams = dict[str, Any]

# SlimSpec's recommended rank is an eighth of the drafter's width (Plaksin et al., arXiv 2605.10453).
DEFAULT_RANK_DIVISOR = 8


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """Shape of a draft LM head: hashable, so it can be a static jit argument.

    Attributes:
        kind: a registered kind, for example "full" or "low_rank".
        hidden_size: width of the drafter's final hidden state, d.
        vocab_size: number of logits, V: the target's whole vocabulary.
        rank: inner width of a head with factors, r; None is the kind's default. Must be None for other heads.
        options: settings of the kind alone, as a mapping or as pairs; kept sorted, without those that have their
            default value.
        num_valid_tokens: ids at or above it are padded rows, which a head that chooses tokens must not choose; None
            means that all are tokens.

    Raises:
        ValueError: if the kind or an option is unknown, or a size is out of range.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    rank: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    num_valid_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("hidden_size", "vocab_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1; got {getattr(self, field)}")
        head = get_head(self.kind)
        known = {option.name: option for option in head.options}
        given = dict(self.options.items() if isinstance(self.options, Mapping) else self.options)
        checked = {name: check_option(self.kind, known, name, value) for name, value in given.items()}
        kept = {name: value for name, value in checked.items() if value != known[name].default}
        object.__setattr__(self, "options", tuple(sorted(kept.items())))
        object.__setattr__(self, "rank", head.resolve_rank(self))
        head.check(self)

    @property
    def inner_size(self) -> int:
        """Width of the input of the last product: r for a head with factors, d otherwise."""
        return self.hidden_size if self.rank is None else self.rank

    def option(self, name: str) -> Any:
        """Value of one of the kind's options, its default if none was given."""
        defaults = {option.name: option.default for option in get_head(self.kind).options}
        return (defaults | dict(self.options))[name]

    def with_options(self, **changes: Any) -> HeadConfig:
        """The same head with some options changed."""
        return dataclasses.replace(self, options=tuple((dict(self.options) | changes).items()))


def without_padded(values: Float[Array, "*batch V"], config: HeadConfig) -> Float[Array, "*batch V"]:
    """Logits or scores [..., V] with -inf for padded ids."""
    if config.num_valid_tokens is None:
        return values
    return jnp.where(jnp.arange(config.vocab_size) < config.num_valid_tokens, values, -jnp.inf)


@runtime_checkable
class Head(Protocol):
    """A kind of draft LM head: pure functions of a `HeadConfig` and a dictionary of arrays.

    In the shape descriptions d is the drafter's width, k the width of the last matrix and V the vocabulary.

    Attributes:
        options: settings of this kind beside the rank.
        uses_rank: whether `rank` means something.
        needs_base: whether training starts from a drafter that was trained with a full head.
        trains_backbone: whether the draft layer is trained together with the head.
        uses_loss: whether the run's choice of a loss means something.
        counts: field of `HeadSource` with the token counts that decide the vocabulary; "" if none do.
        law_is_first_part: whether the first of `loss_parts` is the law that tokens are drafted from; otherwise
            training measures acceptance with `logits`.
    """

    options: tuple[HeadOption, ...]
    uses_rank: bool
    needs_base: bool
    trains_backbone: bool
    uses_loss: bool
    counts: str
    law_is_first_part: bool

    def resolve_rank(self, config: HeadConfig) -> int | None:
        """The rank to use: checks the configured one or fills in the default. Raises ValueError if it is impossible."""
        ...

    def check(self, config: HeadConfig) -> None:
        """Raises ValueError if options do not fit the sizes or one another."""
        ...

    def shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        """Shapes of all parameters."""
        ...

    def integers(self) -> tuple[str, ...]:
        """Names of the parameters that are int32 (token ids) and not of the drafter's dtype."""
        ...

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = ...) -> HeadParams:
        """Random parameters. The key is consumed."""
        ...

    def fit(self, config: HeadConfig, source: HeadSource) -> HeadConfig:
        """The configuration once the data are known, for heads whose size depends on them."""
        ...

    def start(self, rng_key: PRNGKeyArray, config: HeadConfig, source: HeadSource) -> HeadParams:
        """Float32 parameters made from a dense head and what is known of the data. The key is consumed.

        Raises:
            ValueError: if the source lacks what this head is made from.
        """
        ...

    def fixed_parameters(self, config: HeadConfig) -> tuple[str, ...]:
        """Names of the head's parameters that training leaves as they are."""
        ...

    def is_trained(self, config: HeadConfig) -> bool:
        """Whether there is anything to train once a drafter with a full head exists."""
        ...

    def project(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... k"]:
        """Everything before the last product, in the parameters' dtype; dense heads only."""
        ...

    def output_matrix(self, params: HeadParams) -> Float[Array, "k V"]:
        """The last matrix: `logits = project(hidden) @ output_matrix`; dense heads only."""
        ...

    def logits(
        self, params: HeadParams, hidden: Float[Array, "... d"], config: HeadConfig | None = None, position: int = 0
    ) -> Float[Array, "... V"]:
        """Float32 logits over the whole vocabulary, -inf outside the support; products accumulate in float32.

        Args:
            params: the head's parameters.
            hidden: normed states.
            config: the head's configuration; a head without options does not need it.
            position: draft step that the logits are for, from 0.
        """
        ...

    def loss_parts(
        self, params: HeadParams, hidden: Float[Array, "steps ... d"], config: HeadConfig
    ) -> tuple[LossPart, ...]:
        """What training minimises, for states of all draft steps; the loss is the weighted sum of the parts."""
        ...

    def support(self, params: HeadParams) -> Int[Array, "k"] | None:
        """Ascending ids of the only tokens that can be drafted; None if that is all, or depends on the state."""
        ...

    def num_rows(self, config: HeadConfig) -> int:
        """Rows of `merged_weight`: the size of `support`, or of the vocabulary."""
        ...

    def merged_weight(self, params: HeadParams, config: HeadConfig | None = None) -> Float[Array, "rows d"]:
        """The dense matrix for engines without this head, in the [out, in] order of checkpoints.

        One row for each token of the vocabulary, or of `support`.
        """
        ...

    def from_merged(self, config: HeadConfig, weight: Any, ids: Any) -> HeadParams | None:
        """Parameters out of `merged_weight` and `support`; None if they hold more than that."""
        ...

    def num_params(self, config: HeadConfig) -> int:
        """Number of parameters, token ids not counted."""
        ...

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        """Bytes of weights that one call reads for one row (dense heads: for any number of rows)."""
        ...

    def flops(self, config: HeadConfig, tokens: int) -> int:
        """Floating point operations of one call over `tokens` rows; a multiply-add counts as two."""
        ...

    def describe(self, config: HeadConfig) -> str:
        """The shapes in a few words, for plans and tables."""
        ...


class BaseHead:
    """Defaults of `Head`: a dense head over the whole vocabulary, all of it trained.

    A subclass defines at least `shapes`, `start`, `merged_weight` and either `project` and `output_matrix` or
    `logits`, `loss_parts`, `bytes_per_call` and `flops`.
    """

    options: tuple[HeadOption, ...] = ()
    uses_rank = False
    needs_base = False
    trains_backbone = True
    uses_loss = True
    counts = ""
    law_is_first_part = True

    def resolve_rank(self, config: HeadConfig) -> int | None:
        if config.rank is not None:
            raise ValueError(f"`rank` must be None for the {config.kind} head; got {config.rank}")
        return None

    def check(self, config: HeadConfig) -> None:
        return None

    def shapes(self, config: HeadConfig) -> dict[str, tuple[int, ...]]:
        raise NotImplementedError

    def integers(self) -> tuple[str, ...]:
        return ()

    def init(self, rng_key: PRNGKeyArray, config: HeadConfig, dtype: Any = jnp.float32) -> HeadParams:
        raise NotImplementedError

    def fit(self, config: HeadConfig, source: HeadSource) -> HeadConfig:
        return config

    def start(self, rng_key: PRNGKeyArray, config: HeadConfig, source: HeadSource) -> HeadParams:
        raise NotImplementedError

    def fixed_parameters(self, config: HeadConfig) -> tuple[str, ...]:
        return self.integers()

    def is_trained(self, config: HeadConfig) -> bool:
        return True

    def project(self, params: HeadParams, hidden: Float[Array, "... d"]) -> Float[Array, "... k"]:
        raise NotImplementedError(f"{type(self).__name__} is no dense head")

    def output_matrix(self, params: HeadParams) -> Float[Array, "k V"]:
        raise NotImplementedError(f"{type(self).__name__} is no dense head")

    def logits(
        self, params: HeadParams, hidden: Float[Array, "... d"], config: HeadConfig | None = None, position: int = 0
    ) -> Float[Array, "... V"]:
        return matmul(self.project(params, hidden), self.output_matrix(params))

    def loss_parts(
        self, params: HeadParams, hidden: Float[Array, "steps ... d"], config: HeadConfig
    ) -> tuple[LossPart, ...]:
        return (LossPart(self.project(params, hidden), self.output_matrix(params)),)

    def support(self, params: HeadParams) -> Int[Array, "k"] | None:
        return None

    def num_rows(self, config: HeadConfig) -> int:
        return config.vocab_size

    def merged_weight(self, params: HeadParams, config: HeadConfig | None = None) -> Float[Array, "rows d"]:
        raise NotImplementedError

    def from_merged(self, config: HeadConfig, weight: Any, ids: Any) -> HeadParams | None:
        return None

    def num_params(self, config: HeadConfig) -> int:
        return sum(math.prod(shape) for name, shape in self.shapes(config).items() if name not in self.integers())

    def bytes_per_call(self, config: HeadConfig, dtype: Any) -> int:
        return weight_bytes(self.num_params(config), dtype)

    def flops(self, config: HeadConfig, tokens: int) -> int:
        return 2 * tokens * self.num_params(config)

    def describe(self, config: HeadConfig) -> str:
        return " x ".join(str(list(shape)) for name, shape in self.shapes(config).items())


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


def head_kinds() -> tuple[str, ...]:
    """Names of all registered kinds, sorted."""
    return tuple(sorted(_HEADS))


def weight_bytes(num_params: int, dtype: Any) -> int:
    """Bytes of that many parameters."""
    return num_params * np.dtype(dtype).itemsize


def matmul(x: Float[Array, "... inputs"], kernel: Float[Array, "inputs outputs"]) -> Float[Array, "... outputs"]:
    """`x @ kernel` with operands in the kernel's dtype and a float32 result."""
    # Float32 means float32 on every backend, also where the default is a faster, rounder product.
    precision = lax.Precision.HIGHEST if kernel.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.matmul(x.astype(kernel.dtype), kernel, precision=precision, preferred_element_type=jnp.float32)
