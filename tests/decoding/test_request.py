"""Sampling parameters refuse what has no meaning, with the field, the rule and the value."""

from __future__ import annotations

import re

import pytest

from specjax.decoding.request import Completion, SamplingParams


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -0.1}, "`temperature` must be at least 0; got -0.1"),
        ({"temperature": float("nan")}, "`temperature` must be a finite number; got nan"),
        ({"temperature": float("inf")}, "`temperature` must be a finite number; got inf"),
        ({"top_k": -1}, "`top_k` must be at least 0 (0 switches it off); got -1"),
        ({"top_k": True}, "`top_k` must be an integer (0 switches it off); got True"),
        ({"top_p": 0.0}, "`top_p` must be in (0, 1]; got 0.0"),
        ({"top_p": 1.1}, "`top_p` must be in (0, 1]; got 1.1"),
        ({"min_p": -0.1}, "`min_p` must be in [0, 1]; got -0.1"),
        ({"min_p": 1.5}, "`min_p` must be in [0, 1]; got 1.5"),
        ({"seed": -1}, "`seed` must be in [0, 4294967295]; got -1"),
        ({"seed": 2**32}, "`seed` must be in [0, 4294967295]; got 4294967296"),
        ({"max_new_tokens": -1}, "`max_new_tokens` must be at least 0; got -1"),
        ({"num_speculative_tokens": -2}, "`num_speculative_tokens` must be at least 0 (0 switches drafting off)"),
        ({"stop_token_ids": (-1,)}, "`stop_token_ids` must be at least 0; got -1"),
        ({"stop_strings": ("ab", "")}, "`stop_strings` must hold non-empty strings; got ''"),
    ],
)
def test_bad_parameters_are_refused(settings, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        SamplingParams(**settings)


@pytest.mark.parametrize("top_k", [0, 1, 7, 10**6, 2**40])
def test_case_s8_any_top_k_from_zero_is_allowed(top_k):
    assert SamplingParams(top_k=top_k).top_k == top_k


def test_failed_completions_say_so():
    assert Completion("a", (), finish_reason="error: no").failed
    assert not Completion("a", (), finish_reason="length").failed
