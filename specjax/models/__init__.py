"""Target models as pure functions of (params, tokens, cache)."""

from specjax.models.cache import KVCache, commit_path
from specjax.models.config import ModelConfig, RopeScaling
from specjax.models.llama import (
    ForwardOutput,
    Params,
    compute_logits,
    forward,
    init_params,
    parameter_shapes,
)

__all__ = [
    "ForwardOutput",
    "KVCache",
    "ModelConfig",
    "Params",
    "RopeScaling",
    "commit_path",
    "compute_logits",
    "forward",
    "init_params",
    "parameter_shapes",
]
