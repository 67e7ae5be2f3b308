"""Optimisers of drafter training: AdamW, or Muon for the matrices; warm-up, cosine, clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Hashable
from typing import Any

import jax
import optax

from train.muon import scale_by_muon

OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("cosine", "constant")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How parameters are updated.

    Attributes:
        name: "adamw" or "muon".
        learning_rate: highest learning rate. For Muon it scales orthogonal updates of spectral norm
            sqrt(max(1, outputs / inputs)), so useful values are far above AdamW's.
        total_steps: updates of the whole run.
        schedule: "cosine" or "constant", after the warm-up.
        warmup_steps: updates of linear warm-up.
        final_learning_rate: end of the cosine, as a share of the highest.
        weight_decay: decoupled weight decay of matrices.
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment, also for what Muon leaves to AdamW.
        momentum: decay of Muon's momentum.
        adam_share: learning rate of what Muon leaves to AdamW, as a share of Muon's.
        clip_norm: largest global gradient norm.
        frozen: names of parameters that stay as they are, for example ("head",) or ("head.ids", "fc").

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    name: str = "adamw"
    learning_rate: float = 4e-4
    total_steps: int = 1000
    schedule: str = "cosine"
    warmup_steps: int = 100
    final_learning_rate: float = 0.0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    momentum: float = 0.95
    adam_share: float = 0.1
    clip_norm: float = 0.5
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise ValueError(f"`name` of the optimiser must be one of {OPTIMIZERS}; got {self.name!r}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"`schedule` must be one of {SCHEDULES}; got {self.schedule!r}")
        for field in ("learning_rate", "clip_norm", "adam_share"):
            if not getattr(self, field) > 0:
                raise ValueError(f"`{field}` must be positive; got {getattr(self, field)}")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(f"`warmup_steps` must be in [0, total_steps={self.total_steps}); got {self.warmup_steps}")
        for field in ("weight_decay", "final_learning_rate"):
            if getattr(self, field) < 0:
                raise ValueError(f"`{field}` must not be negative; got {getattr(self, field)}")
        for field in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be in [0, 1); got {getattr(self, field)}")


def learning_rate_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate of an update, by its number from 0."""
    # The first update already moves, and the last one of the warm-up has the full rate.
    warmup = optax.linear_schedule(
        config.learning_rate / (config.warmup_steps + 1), config.learning_rate, config.warmup_steps
    )
    rest = (
        optax.cosine_decay_schedule(
            config.learning_rate, config.total_steps - config.warmup_steps, config.final_learning_rate
        )
        if config.schedule == "cosine"
        else optax.constant_schedule(config.learning_rate)
    )
    return optax.join_schedules([warmup, rest], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimiser of a drafter's parameters.

    Muon orthogonalises the momentum of each matrix; the norms, which are vectors, are left to AdamW.

    Args:
        config: what to use.

    Returns:
        The transformation, for parameters of `init_drafter`.
    """
    schedule = learning_rate_schedule(config)
    if config.name == "adamw":
        update = optax.adamw(schedule, config.beta1, config.beta2, weight_decay=config.weight_decay, mask=_is_matrix)
    else:
        matrices = optax.chain(
            scale_by_muon(config.momentum),
            optax.add_decayed_weights(config.weight_decay),
            optax.scale_by_learning_rate(schedule),
        )
        vectors = optax.adamw(
            lambda count: config.adam_share * schedule(count), config.beta1, config.beta2, weight_decay=0.0
        )
        transforms: dict[Hashable, optax.GradientTransformation] = {"matrix": matrices, "vector": vectors}
        update = optax.partition(
            transforms, lambda params: jax.tree.map(lambda leaf: "matrix" if leaf.ndim == 2 else "vector", params)
        )
    trained = optax.chain(optax.clip_by_global_norm(config.clip_norm), update)
    if not config.frozen:
        return _with_standard_promotion(trained)
    parts: dict[Hashable, optax.GradientTransformation] = {"trained": trained, "frozen": optax.set_to_zero()}
    return _with_standard_promotion(optax.partition(parts, lambda params: _label_frozen(params, config.frozen)))


def _with_standard_promotion(transformation: optax.GradientTransformation) -> optax.GradientTransformation:
    """The same transformation where the caller has made dtype promotion strict: optax mixes integers and floats."""

    def init(params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.init(params)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            return transformation.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim == 2, params)


def fixed_mask(params: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Whether each leaf is named, itself or by what it lies in.

    Raises:
        ValueError: if a name is not that of a parameter.
    """
    paths = {jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(params)}
    unknown = [name for name in names if not any(f"{path}.".startswith(f"{name}.") for path in paths)]
    if unknown:
        raise ValueError(f"`frozen` must name parameters among {sorted(paths)}; got {unknown}")

    def is_named(path: Any, _: Any) -> bool:
        own = f"{jax.tree_util.keystr(path, simple=True, separator='.')}."
        return any(own.startswith(f"{name}.") for name in names)

    return jax.tree.map_with_path(is_named, params)


def _label_frozen(params: dict[str, Any], frozen: tuple[str, ...]) -> dict[str, Any]:
    return jax.tree.map(lambda is_frozen: "frozen" if is_frozen else "trained", fixed_mask(params, frozen))
