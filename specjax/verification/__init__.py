"""Exact verification rules: which drafted tokens are kept, and what is drawn after them."""

from specjax.verification.base import ChoiceRule, Verifier, get_verifier, register, verifier_names
from specjax.verification.block import BLOCK
from specjax.verification.greedy_block import GREEDY_BLOCK
from specjax.verification.multi_draft_block import (
    MULTI_DRAFT_BLOCK,
    MULTI_DRAFT_BLOCK_LATE,
    MULTI_DRAFT_BLOCK_UNCAPPED,
)
from specjax.verification.recursive_rejection import RECURSIVE_REJECTION
from specjax.verification.spectr import SPECTR
from specjax.verification.spectr_gbv import SPECTR_GBV
from specjax.verification.token import TOKEN
from specjax.verification.traversal import TRAVERSAL

__all__ = [
    "BLOCK",
    "GREEDY_BLOCK",
    "MULTI_DRAFT_BLOCK",
    "MULTI_DRAFT_BLOCK_LATE",
    "MULTI_DRAFT_BLOCK_UNCAPPED",
    "RECURSIVE_REJECTION",
    "SPECTR",
    "SPECTR_GBV",
    "TOKEN",
    "TRAVERSAL",
    "ChoiceRule",
    "Verifier",
    "get_verifier",
    "register",
    "verifier_names",
]
