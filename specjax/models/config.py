"""Shape and settings of a target model, read from and written to Hugging Face's `config.json` form."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

ARCHITECTURES = ("llama",)
ROPE_KINDS = ("llama3", "linear")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for a longer context.

    Attributes:
        kind: "linear" (every frequency divided by `factor`) or "llama3" (long wavelengths divided by
            `factor`, short ones kept, a linear blend between).
        factor: the stretch.
        low_freq_factor: "llama3" only: wavelengths above original length / this are stretched fully.
        high_freq_factor: "llama3" only: wavelengths below original length / this are kept.
        original_max_position_embeddings: "llama3" only: context length before the stretch, tokens.

    Raises:
        ValueError: if a field is missing or out of range.
    """

    kind: str
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ValueError(f"`rope_scaling.kind` must be one of {ROPE_KINDS}; got {self.kind!r}")
        if not 0 < self.factor < math.inf:
            raise ValueError(f"`rope_scaling.factor` must be positive and finite; got {self.factor}")
        if self.kind != "llama3":
            return
        low, high, original = self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings
        for name, value in (
            ("low_freq_factor", low),
            ("high_freq_factor", high),
            ("original_max_position_embeddings", original),
        ):
            if value is None or not 0 < value < math.inf:
                raise ValueError(f"`rope_scaling.{name}` must be positive and finite for llama3 scaling; got {value}")
        if low is not None and high is not None and not high > low:
            raise ValueError(f"`rope_scaling.high_freq_factor` must be above `low_freq_factor` ({low}); got {high}")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a target model that is static: hashable, so it can be a static jit argument.

    Attributes:
        vocab_size: rows of the embedding and columns of the head, padding included.
        hidden_size: width d of the residual stream.
        intermediate_size: width of the feed-forward layers.
        num_layers: number of decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: width of one head (even).
        architecture: model family, "llama".
        rope_theta: base of the rotary frequencies.
        rope_scaling: context stretch, or None.
        rms_norm_eps: epsilon of the RMS norms.
        max_position_embeddings: longest context, in tokens.
        tie_word_embeddings: whether checkpoints store one matrix for embedding and head.
        attention_bias: whether q, k, v and o projections have biases.
        bos_token_id: first token of a text, or None.
        eos_token_ids: tokens that end a text.
        num_valid_tokens: ids at or above it are padded rows without a token and never get probability;
            None means that all `vocab_size` ids are tokens.

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    architecture: str = "llama"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    num_valid_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise ValueError(f"`architecture` must be one of {ARCHITECTURES}; got {self.architecture!r}")
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer; got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"`num_kv_heads` must divide `num_heads`; got {self.num_kv_heads} and {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"`head_dim` must be even (rotary halves); got {self.head_dim}")
        for name, value in (("rope_theta", self.rope_theta), ("rms_norm_eps", self.rms_norm_eps)):
            if not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be positive and finite; got {value}")
        if self.num_valid_tokens is not None and not 0 < self.num_valid_tokens <= self.vocab_size:
            raise ValueError(
                f"`num_valid_tokens` must be in [1, vocab_size = {self.vocab_size}]; got {self.num_valid_tokens}"
            )
        for name, ids in (("bos_token_id", (self.bos_token_id,)), ("eos_token_ids", self.eos_token_ids)):
            for token_id in ids:
                if token_id is None:
                    continue
                if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                    raise ValueError(f"`{name}` must be in [0, vocab_size = {self.vocab_size}); got {token_id}")

    @classmethod
    def from_huggingface(cls, fields: Mapping[str, Any], *, num_valid_tokens: int | None = None) -> ModelConfig:
        """Reads the fields of a `config.json`.

        Args:
            fields: the parsed JSON object.
            num_valid_tokens: the tokenizer's size, where it is smaller than the padded `vocab_size`.

        Returns:
            The configuration.

        Raises:
            ValueError: if a field is missing, or asks for something that this family does not have.
        """
        _refuse_unsupported(fields)
        missing = [
            name
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
            if fields.get(name) is None
        ]
        if missing:
            raise ValueError(f"the model configuration lacks {', '.join(f'`{name}`' for name in missing)}")
        for name in ("hidden_size", "num_attention_heads"):
            if type(fields[name]) is not int or fields[name] < 1:
                raise ValueError(f"`{name}` must be a positive integer; got {fields[name]!r}")
        num_heads = fields["num_attention_heads"]
        num_kv_heads = fields.get("num_key_value_heads")
        head_dim = fields.get("head_dim")
        if head_dim is None:
            if fields["hidden_size"] % num_heads:
                raise ValueError(
                    "`hidden_size` must be a multiple of `num_attention_heads` where `head_dim` is not given; "
                    f"got {fields['hidden_size']} and {num_heads}"
                )
            head_dim = fields["hidden_size"] // num_heads
        rope_theta, rope_scaling = _read_rope(fields)
        eos = fields.get("eos_token_id")
        eos_token_ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
        return cls(
            vocab_size=fields["vocab_size"],
            hidden_size=fields["hidden_size"],
            intermediate_size=fields["intermediate_size"],
            num_layers=fields["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=num_heads if num_kv_heads is None else num_kv_heads,
            head_dim=head_dim,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rms_norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=fields.get("max_position_embeddings", 2048),
            tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
            attention_bias=bool(fields.get("attention_bias", False)),
            bos_token_id=fields.get("bos_token_id"),
            eos_token_ids=eos_token_ids,
            num_valid_tokens=num_valid_tokens,
        )

    def to_huggingface(self) -> dict[str, Any]:
        """The fields of a `config.json` that `from_huggingface` and transformers read back."""
        scaling = None
        if self.rope_scaling is not None:
            scaling = {"rope_type": self.rope_scaling.kind, "factor": self.rope_scaling.factor}
            if self.rope_scaling.kind == "llama3":
                scaling["low_freq_factor"] = self.rope_scaling.low_freq_factor
                scaling["high_freq_factor"] = self.rope_scaling.high_freq_factor
                scaling["original_max_position_embeddings"] = self.rope_scaling.original_max_position_embeddings
        eos: int | list[int] | None = list(self.eos_token_ids)
        if len(self.eos_token_ids) < 2:
            eos = self.eos_token_ids[0] if self.eos_token_ids else None
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": self.architecture,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "tie_word_embeddings": self.tie_word_embeddings,
            "attention_bias": self.attention_bias,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
        }


def _refuse_unsupported(fields: Mapping[str, Any]) -> None:
    family = fields.get("model_type", "llama")
    if family not in ARCHITECTURES:
        raise ValueError(f"`model_type` must be one of {ARCHITECTURES}; got {family!r}")
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ValueError(f"`hidden_act` must be 'silu' for the llama family; got {activation!r}")
    if fields.get("mlp_bias"):
        raise ValueError("`mlp_bias` must be false: feed-forward biases are not supported; got true")


def _read_rope(fields: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    # Newer files keep base and scaling together in `rope_parameters`; older ones name the kind `type`.
    scaling = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta", fields.get("rope_theta") or 10000.0))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in ROPE_KINDS:
        raise ValueError(f"rope scaling must be one of {('default', *ROPE_KINDS)}; got {kind!r}")
    if "factor" not in scaling:
        raise ValueError(f"rope scaling of kind {kind!r} must have a `factor`; got {dict(scaling)}")
    if kind == "linear":
        return theta, RopeScaling("linear", float(scaling["factor"]))
    return theta, RopeScaling(
        "llama3",
        float(scaling["factor"]),
        low_freq_factor=scaling.get("low_freq_factor"),
        high_freq_factor=scaling.get("high_freq_factor"),
        original_max_position_embeddings=scaling.get("original_max_position_embeddings"),
    )
