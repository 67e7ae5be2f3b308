"""The draft head in one pass over its weights: drawn tokens, laws and candidates."""

from pallas_kernels.low_rank_head.api import greedy, log_law, logits, sample, top_candidates
from pallas_kernels.low_rank_head.statistics import HeadDraw
from pallas_kernels.low_rank_head.weights import PreparedHead, prepare_weights

__all__ = [
    "HeadDraw",
    "PreparedHead",
    "greedy",
    "log_law",
    "logits",
    "prepare_weights",
    "sample",
    "top_candidates",
]
