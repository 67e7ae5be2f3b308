"""Reductions over the vocabulary that verification rules need; see `api`."""

from pallas_kernels.block_verifier.api import Statistics, residual_sums, row_statistics
from pallas_kernels.block_verifier.draws import Draws, draw_residuals, residual_log_ratio
from pallas_kernels.block_verifier.laws import Laws, Pairs

__all__ = [
    "Draws",
    "Laws",
    "Pairs",
    "Statistics",
    "draw_residuals",
    "residual_log_ratio",
    "residual_sums",
    "row_statistics",
]
