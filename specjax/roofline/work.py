"""What a pass moves and computes, and how long that takes on a machine."""

from __future__ import annotations

import dataclasses

from specjax.cost import roofline_seconds
from specjax.roofline.hardware import Hardware

Number = int | float


@dataclasses.dataclass(frozen=True)
class Work:
    """Amounts of one pass.

    Attributes:
        weight_bytes: weights read.
        cache_bytes: keys and values read and written.
        activation_bytes: states and logits read and written.
        flops: floating-point operations, a multiply-add as two.
        kernels: kernels that run one after another.
        selected_values: scores that an argmax or top-k goes through; each value that a top-k keeps counts as
            128 more, which is what a heap costs a CPU.
    """

    weight_bytes: Number = 0
    cache_bytes: Number = 0
    activation_bytes: Number = 0
    flops: Number = 0
    kernels: Number = 0
    selected_values: Number = 0

    def __add__(self, other: Work) -> Work:
        fields = (field.name for field in dataclasses.fields(self))
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in fields})

    @property
    def num_bytes(self) -> Number:
        """All bytes moved."""
        return self.weight_bytes + self.cache_bytes + self.activation_bytes

    def seconds(self, hardware: Hardware, dtype: str) -> float:
        """Time of the pass: a roofline and a fixed time for each kernel.

            t = max(bytes / (e_m * bandwidth), flops / (e_c * rate)) + kernels * t_kernel + selected * t_select

        Bytes and FLOPs of a pass overlap (the kernel that computes also loads); the fixed times do not, because every
        kernel here needs the one before it. The roofline is Williams et al., CACM 52(4), 2009.

        Args:
            hardware: the machine.
            dtype: whose arithmetic rate applies.

        Raises:
            ValueError: if the machine has no rate for the dtype.
        """
        return (
            roofline_seconds(
                num_bytes=self.num_bytes,
                bytes_per_second=hardware.memory_efficiency * hardware.bytes_per_second,
                flops=self.flops,
                flops_per_second=hardware.compute_efficiency * hardware.flop_rate(dtype),
            )
            + self.kernels * hardware.kernel_seconds
            + self.selected_values * hardware.select_seconds
        )
