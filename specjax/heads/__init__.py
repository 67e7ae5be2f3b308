"""Draft LM heads: one protocol, chosen by name."""

from specjax.heads import full as _full
from specjax.heads import low_rank as _low_rank
from specjax.heads import preview as _preview
from specjax.heads import routed as _routed
from specjax.heads import static_vocabulary as _static_vocabulary
from specjax.heads.base import BaseHead, Head, HeadConfig, HeadParams, get_head, head_kinds, register_head
from specjax.heads.factorise import activation_aware_factors, svd_factors
from specjax.heads.options import HeadOption, format_options, parse_options
from specjax.heads.source import HEAD_INITS, HeadSource, LossPart

del _full, _low_rank, _preview, _routed, _static_vocabulary

__all__ = [
    "HEAD_INITS",
    "BaseHead",
    "Head",
    "HeadConfig",
    "HeadOption",
    "HeadParams",
    "HeadSource",
    "LossPart",
    "activation_aware_factors",
    "format_options",
    "get_head",
    "head_kinds",
    "parse_options",
    "register_head",
    "svd_factors",
]
