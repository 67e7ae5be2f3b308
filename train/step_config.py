"""What one training step computes."""

from __future__ import annotations

import dataclasses

from train.objectives import LOSSES


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """What one step computes.

    Attributes:
        num_steps: draft steps that are unrolled, S.
        step_decay: the loss of draft step i has the weight `step_decay**i`.
        window: consecutive entries that are trained on together.
        loss_rows: entries of each row that the loss reads, chosen anew in every step as random windows; rounded up to
            whole windows. 0 is all entries.
        chunk_rows: entries whose logits exist at the same time, about; at least one window of each row.
        measured_chunks: chunks of a training step, chosen at random, in which acceptance and top-1 agreement are
            measured; 0 is all. The loss always covers everything.
        accumulation_steps: parts that a batch is computed in, one after the other.
        compute_dtype: dtype of products; parameters and their updates stay in their own dtype.
        rematerialise: compute the layer's activations again in the backward pass instead of keeping them.
        loss: one of `objectives.LOSSES`; the hybrid one needs a forward pass more, for the mean acceptance.
        blend_decay: eta of the hybrid loss, whose share of KL is exp(-eta * mean acceptance).

    Raises:
        ValueError: naming the field, the rule and the value.
    """

    num_steps: int = 7
    step_decay: float = 0.8
    window: int = 16
    loss_rows: int = 0
    chunk_rows: int = 128
    measured_chunks: int = 1
    accumulation_steps: int = 1
    compute_dtype: str = "float32"
    rematerialise: bool = False
    loss: str = "kl"
    blend_decay: float = 3.0

    def __post_init__(self) -> None:
        for field in ("num_steps", "window", "chunk_rows", "accumulation_steps"):
            if getattr(self, field) < 1:
                raise ValueError(f"`{field}` must be at least 1; got {getattr(self, field)}")
        for field in ("loss_rows", "measured_chunks"):
            if getattr(self, field) < 0:
                raise ValueError(f"`{field}` must be at least 0; got {getattr(self, field)}")
        if not 0 < self.step_decay <= 1:
            raise ValueError(f"`step_decay` must be in (0, 1]; got {self.step_decay}")
        if self.loss not in LOSSES:
            raise ValueError(f"`loss` must be one of {LOSSES}; got {self.loss!r}")
        if not self.blend_decay >= 0:
            raise ValueError(f"`blend_decay` must be at least 0; got {self.blend_decay}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"`compute_dtype` must be float32 or bfloat16; got {self.compute_dtype!r}")
