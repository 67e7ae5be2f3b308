"""The EAGLE-3 draft layer (Li et al., arXiv 2503.01840): its configuration and its pieces as pure functions.

Entry t of a drafter pairs the target's state at position t with the embedding of token t + 1 and predicts token t + 2.
Its position is t, so positions are contiguous from 0. Decoding (a cache) and training (an unrolled teacher-forced pass)
put the same pieces around their own attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.heads import HeadConfig, get_head
from specjax.heads.base import without_padded
from specjax.models.config import ModelConfig, RopeScaling
from specjax.models.layers import gated_feed_forward, linear, rms_norm, split_heads

Params = dict[str, Any]

NUM_FEATURE_LAYERS = 3


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 drafter: hashable, so it can be a static jit argument.

    Attributes:
        vocab_size: the target's vocabulary V; embedding and head cover all of it.
        hidden_size: width d of the draft layer.
        intermediate_size: width of its feed-forward part.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: width of one head (even).
        target_hidden_size: width of the target's states and of its embedding.
        feature_layers: the three target layers (0-based, their outputs) that the drafter reads, low to high.
        head: the LM head.
        rope_theta: base of the rotary frequencies.
        rope_scaling: context stretch, or None.
        rms_norm_eps: epsilon of the RMS norms.
        max_position_embeddings: longest context, in tokens.
        num_valid_tokens: ids at or above it are padded rows that are never drafted; None means all are tokens.
        norm_before_residual: the residual is the normed state instead of the raw one.
        norm_before_fc: one norm over the concatenated features before `fc`.
        fc_norm: one norm for each of the three features before `fc` (EAGLE-3.1).
        norm_output: the state fed back is the normed one (EAGLE-3.1).

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_hidden_size: int
    feature_layers: tuple[int, ...]
    head: HeadConfig
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    num_valid_tokens: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "target_hidden_size",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer; got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"`num_kv_heads` must divide `num_heads`; got {self.num_kv_heads} and {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even (rotary halves); got {self.head_dim}")
        if len(self.feature_layers) != NUM_FEATURE_LAYERS or list(self.feature_layers) != sorted(self.feature_layers):
            raise ValueError(f"`feature_layers` must be three layers, low to high; got {self.feature_layers}")
        if self.feature_layers[0] < 0:
            raise ValueError(f"`feature_layers` must be at least 0; got {self.feature_layers}")
        for name in ("hidden_size", "vocab_size"):
            if getattr(self.head, name) != getattr(self, name):
                raise ValueError(f"`head.{name}` must be {getattr(self, name)}; got {getattr(self.head, name)}")
        if self.num_valid_tokens is not None and not 0 < self.num_valid_tokens <= self.vocab_size:
            raise ValueError(
                f"`num_valid_tokens` must be in [1, vocab_size = {self.vocab_size}]; got {self.num_valid_tokens}"
            )
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("`norm_before_fc` and `fc_norm` must not both be true; got both")
        is_padded = self.num_valid_tokens is not None and self.num_valid_tokens < self.vocab_size
        valid = self.num_valid_tokens if is_padded else None
        object.__setattr__(self, "head", dataclasses.replace(self.head, num_valid_tokens=valid))

    @classmethod
    def for_target(
        cls,
        target: ModelConfig,
        *,
        head_kind: str = "low_rank",
        rank: int | None = None,
        head_options: Mapping[str, Any] | None = None,
        feature_layers: tuple[int, ...] | None = None,
        **overrides: Any,
    ) -> Eagle3Config:
        """A drafter with the shape of one of the target's own layers, its rotary settings and its longest context.

        Args:
            target: the target's configuration.
            head_kind: kind of the LM head.
            rank: inner width of a head with factors; None is the kind's default.
            head_options: settings of the kind of head.
            feature_layers: None is the usual choice, outputs of layers 1, n/2 - 1 and n - 4 of n, squeezed where the
                target is too shallow for it.
            **overrides: any other field.

        Returns:
            The configuration.

        Raises:
            ValueError: if a feature layer does not exist in the target or a field is out of range.
        """
        layers = default_feature_layers(target.num_layers) if feature_layers is None else tuple(feature_layers)
        if layers and max(layers) >= target.num_layers:
            raise ValueError(f"`feature_layers` must be below the target's {target.num_layers} layers; got {layers}")
        fields: dict[str, Any] = {
            "vocab_size": target.vocab_size,
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "target_hidden_size": target.hidden_size,
            "feature_layers": layers,
            "rope_theta": target.rope_theta,
            "rope_scaling": target.rope_scaling,
            "rms_norm_eps": target.rms_norm_eps,
            "max_position_embeddings": target.max_position_embeddings,
            "num_valid_tokens": target.num_valid_tokens,
        } | overrides
        options = tuple((head_options or {}).items())
        fields.setdefault("head", HeadConfig(head_kind, fields["hidden_size"], fields["vocab_size"], rank, options))
        return cls(**fields)


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Outputs of an early, a middle and a late layer of n: 1, n/2 - 1 and n - 4, kept in range and in order."""
    low = min(1, num_layers - 1)
    middle = max(low, num_layers // 2 - 1)
    return low, middle, max(middle, num_layers - 4)


def parameter_shapes(config: Eagle3Config) -> Params:
    """Shapes of the trained parameters, head excluded; matrices are [in, out]."""
    width, inner = config.hidden_size, config.intermediate_size
    target_width = config.target_hidden_size
    query_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: Params = {
        "fc": (NUM_FEATURE_LAYERS * target_width, width),
        "midlayer": {
            "input_norm": (target_width,),
            "hidden_norm": (width,),
            "q_proj": (target_width + width, query_width),
            "k_proj": (target_width + width, kv_width),
            "v_proj": (target_width + width, kv_width),
            "o_proj": (query_width, width),
            "post_attention_norm": (width,),
            "gate_proj": (width, inner),
            "up_proj": (width, inner),
            "down_proj": (inner, width),
        },
        "norm": (width,),
    }
    if config.norm_before_fc or config.fc_norm:
        shapes["fc_norm"] = (NUM_FEATURE_LAYERS * target_width,)
    return shapes


def num_params(config: Eagle3Config) -> int:
    """Number of trained parameters, the LM head's included and the frozen embedding's not."""
    width, inner, target_width = config.hidden_size, config.intermediate_size, config.target_hidden_size
    attention = (target_width + width) * config.head_dim * (config.num_heads + 2 * config.num_kv_heads)
    attention += config.num_heads * config.head_dim * width
    norms = target_width + 3 * width
    if config.norm_before_fc or config.fc_norm:
        norms += NUM_FEATURE_LAYERS * target_width
    layer = NUM_FEATURE_LAYERS * target_width * width + attention + 3 * width * inner + norms
    return layer + get_head(config.head.kind).num_params(config.head)


def fixed_parameters(config: Eagle3Config) -> tuple[str, ...]:
    """Parameters that training leaves as they are: names of the drafter's, or "head.NAME"."""
    head = get_head(config.head.kind)
    backbone = () if head.trains_backbone else tuple(parameter_shapes(config))
    return (*backbone, *(f"head.{name}" for name in head.fixed_parameters(config.head)))


def combine_features(
    params: Params, config: Eagle3Config, features: Float[Array, "batch time features"]
) -> Float[Array, "batch time width"]:
    """The three target states of each position, side by side [B, T, 3 * target width], to one of width d."""
    if config.norm_before_fc:
        features = rms_norm(features, params["fc_norm"], config.rms_norm_eps)
    elif config.fc_norm:
        parts = jnp.split(features, NUM_FEATURE_LAYERS, axis=-1)
        scales = jnp.split(params["fc_norm"], NUM_FEATURE_LAYERS)
        normed = [rms_norm(part, scale, config.rms_norm_eps) for part, scale in zip(parts, scales, strict=True)]
        features = jnp.concatenate(normed, axis=-1)
    return linear(features, params["fc"])


def embed(params: Params, tokens: Int[Array, "*batch"]) -> Float[Array, "*batch width"]:
    """The target's embeddings, which the drafter shares and never trains."""
    return jnp.take(params["embed_tokens"], tokens, axis=0, mode="clip")


def layer_input(
    params: Params,
    config: Eagle3Config,
    embedded: Float[Array, "batch time target"],
    hidden: Float[Array, "batch time width"],
) -> tuple[Float[Array, "batch time both"], Float[Array, "batch time width"]]:
    """What q, k and v read (normed embedding first, then normed state), and the residual of the attention."""
    layer = params["midlayer"]
    normed = rms_norm(hidden, layer["hidden_norm"], config.rms_norm_eps)
    normed_embedding = rms_norm(embedded, layer["input_norm"], config.rms_norm_eps).astype(normed.dtype)
    return jnp.concatenate((normed_embedding, normed), axis=-1), normed if config.norm_before_residual else hidden


def queries_of(
    params: Params, config: Eagle3Config, inputs: Float[Array, "batch time both"]
) -> Float[Array, "batch heads time head_dim"]:
    """Queries before rotation."""
    return split_heads(linear(inputs, params["midlayer"]["q_proj"]), config.num_heads)


def keys_values_of(
    params: Params, config: Eagle3Config, inputs: Float[Array, "batch time both"]
) -> tuple[Float[Array, "batch kv time head_dim"], Float[Array, "batch kv time head_dim"]]:
    """Keys before rotation, and values."""
    layer = params["midlayer"]
    keys = split_heads(linear(inputs, layer["k_proj"]), config.num_kv_heads)
    return keys, split_heads(linear(inputs, layer["v_proj"]), config.num_kv_heads)


def finish_layer(
    params: Params,
    config: Eagle3Config,
    residual: Float[Array, "batch time width"],
    mixed: Float[Array, "batch time heads"],
) -> Float[Array, "batch time width"]:
    """Output projection and feed-forward part, each with its residual: the layer's raw output state."""
    layer = params["midlayer"]
    hidden = residual + linear(mixed, layer["o_proj"])
    normed = rms_norm(hidden, layer["post_attention_norm"], config.rms_norm_eps)
    return hidden + gated_feed_forward(normed, layer["gate_proj"], layer["up_proj"], layer["down_proj"])


def head_input(
    params: Params, config: Eagle3Config, hidden: Float[Array, "*batch width"]
) -> Float[Array, "*batch width"]:
    """The normed state that the LM head reads."""
    return rms_norm(hidden, params["norm"], config.rms_norm_eps)


def fed_back(
    params: Params, config: Eagle3Config, hidden: Float[Array, "*batch width"]
) -> Float[Array, "*batch width"]:
    """The state that stands in for the target's at the next draft step: the raw output, or the normed one."""
    return head_input(params, config, hidden) if config.norm_output else hidden


def compute_logits(
    params: Params, config: Eagle3Config, hidden: Float[Array, "*batch width"], position: int = 0
) -> Float[Array, "*batch vocab"]:
    """Float32 logits of draft step `position` (from 0) of raw output states; ids that cannot be drafted are -inf."""
    head = get_head(config.head.kind)
    logits = head.logits(params["head"], head_input(params, config, hidden), config.head, position)
    return without_padded(logits, config.head)
