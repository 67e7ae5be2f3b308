"""Compilation for GPUs that are not there, and what the compiler says of the result."""

from pallas_kernels.aot.chips import CHIPS, Chip
from pallas_kernels.aot.run import Case, compile_cases, why_unavailable

__all__ = ["CHIPS", "Case", "Chip", "compile_cases", "why_unavailable"]
