"""Draft LM heads: one protocol, chosen by name."""

from specjax.heads import full as _full
from specjax.heads import low_rank as _low_rank
from specjax.heads.base import Head, HeadConfig, HeadParams, get_head, register_head
from specjax.heads.factorise import activation_aware_factors, svd_factors

del _full, _low_rank

__all__ = [
    "Head",
    "HeadConfig",
    "HeadParams",
    "activation_aware_factors",
    "get_head",
    "register_head",
    "svd_factors",
]
