"""Exact verification rules: which drafted tokens are kept, and what is drawn after them."""

from specjax.verification.base import Verifier, get_verifier, register, verifier_names
from specjax.verification.token import TOKEN

__all__ = ["TOKEN", "Verifier", "get_verifier", "register", "verifier_names"]
