"""Weights, operations and kernels of heads, beside hand arithmetic and beside the heads that exist."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from specjax.heads import HeadConfig, get_head
from specjax.roofline.head_shapes import (
    HEAD_KINDS,
    HeadShape,
    default_ranks,
    expected_union,
    head_family,
    head_kernels,
    head_params,
    head_work,
    round_rank,
)

WIDTH, VOCAB = 64, 1000


def shape(kind: str, **sizes: int) -> HeadShape:
    return HeadShape(kind, WIDTH, VOCAB, **sizes)


@pytest.mark.parametrize(
    ("head", "weights"),
    [
        (shape("full"), 1000 * 64),
        (shape("low_rank", rank=8), 8 * (64 + 1000)),
        (shape("vocab_trim", num_rows=250), 250 * 64),
        (shape("fr_spec", num_rows=100), 100 * 64),
        (shape("bcl", num_rows=100), 100 * 64),
        (shape("coral", num_groups=10, num_active_groups=2), 10 * 64 + 200 * 64),
        (shape("dyna_spec", num_groups=10, num_active_groups=3, router_width=16), 16 * (64 + 10) + 300 * 64),
        (shape("spec_vocab", rank=8, num_candidates=50), 8 * (64 + 1000) + 50 * 64),
        (shape("low_rank_preview", rank=4, num_candidates=10), 4 * (64 + 1000) + 10 * 64),
    ],
)
def test_weights_and_operations_of_one_row(head: HeadShape, weights: int) -> None:
    assert head_params(head) == weights
    work = head_work(head, weight_bytes=2)
    assert work.weight_bytes == 2 * weights
    assert work.flops == 2 * weights
    assert 0 < work.kernels == head_kernels(head)


# What a kind's real configuration is called with; a kind that is not registered yet is skipped.
REAL_HEADS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "full": ({}, {}),
    "low_rank": ({"rank": 8}, {"rank": 8}),
    "fr_spec": ({"options": (("rows", 250),)}, {"num_rows": 250}),
    "vocab_trim": ({"options": (("rows", 250),)}, {"num_rows": 250}),
    "bcl": ({"options": (("rows", 250),)}, {"num_rows": 250}),
}


@pytest.mark.parametrize("kind", sorted(REAL_HEADS))
def test_agrees_with_the_head_that_exists(kind: str) -> None:
    try:
        real = get_head(kind)
    except ValueError:
        pytest.skip(f"no {kind} head is registered")
    settings, sizes = REAL_HEADS[kind]
    config = HeadConfig(kind, WIDTH, VOCAB, **settings)
    work = head_work(shape(kind, **sizes), rows=3, weight_bytes=2)
    # A table of kept ids is 4 bytes a row, beside 2 * 64 of weights.
    slack = 4 * sizes.get("num_rows", 0)
    assert work.weight_bytes <= real.bytes_per_call(config, np.float16) <= work.weight_bytes + slack
    assert work.flops == real.flops(config, 3)


@pytest.mark.parametrize("rank", [1, 8, 63])
def test_low_rank_agrees_at_other_ranks_and_dtypes(rank: int) -> None:
    config = HeadConfig("low_rank", WIDTH, VOCAB, rank)
    work = head_work(shape("low_rank", rank=rank), weight_bytes=4)
    assert work.weight_bytes == get_head("low_rank").bytes_per_call(config, np.float32)


def test_batches_share_dense_weights_and_not_choices() -> None:
    assert head_params(shape("full"), 8) == head_params(shape("full"))
    routed = shape("coral", num_groups=10, num_active_groups=2)
    assert head_params(routed) < head_params(routed, 4) < 4 * head_params(routed)
    assert head_params(routed, 10**6) == pytest.approx(10 * WIDTH + VOCAB * WIDTH)
    preview = shape("spec_vocab", rank=8, num_candidates=50)
    assert head_params(preview, 4) - head_params(preview) == pytest.approx(
        WIDTH * (expected_union(VOCAB, 50, 4) - 50), rel=1e-12
    )


def test_expected_union_is_the_mean_of_random_choices() -> None:
    # Literal seed: the numbers are fixed. 4,000 draws of a union with standard deviation below 1.5: the mean is within
    # 0.15 (six standard errors) unless the formula is wrong.
    draws = np.random.default_rng(7)
    unions = [len({int(e) for _ in range(5) for e in draws.choice(20, 4, replace=False)}) for _ in range(4000)]
    assert np.mean(unions) == pytest.approx(expected_union(20, 4, 5), abs=0.15)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("fast", {}, "`kind` must be one of"),
        ("low_rank", {}, "`rank` of a low_rank head must be in [1, 64]; got None"),
        ("low_rank", {"rank": 65}, "`rank` of a low_rank head must be in [1, 64]; got 65"),
        ("full", {"rank": 8}, "`rank` must be None for a full head; got 8"),
        ("vocab_trim", {"num_rows": 1001}, "`num_rows` of a vocab_trim head must be in [1, 1000]; got 1001"),
        ("coral", {"num_groups": 4, "num_active_groups": 5}, "`num_active_groups` of a coral head must be in [1, 4]"),
        ("spec_vocab", {"rank": 8}, "`num_candidates` of a spec_vocab head must be"),
    ],
)
def test_bad_sizes_are_named(kind: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        shape(kind, **sizes)


def test_ranks_are_whole_tiles() -> None:
    assert default_ranks(4096) == (2048, 1024, 512, 256, 128)
    # d/8 = 360 and d/16 = 180 of GPT-OSS-20B are padded.
    assert round_rank(2880 / 8, 2880) == 384
    assert round_rank(2880 / 16, 2880) == 192
    assert round_rank(576 / 8, 576) == 72
    assert default_ranks(4) == (4,)


@pytest.mark.parametrize(("width", "vocab"), [(4096, 128256), (576, 49152), (64, 259), (8, 40)])
def test_the_family_fits_any_vocabulary(width: int, vocab: int) -> None:
    family = head_family(width, vocab)
    assert family[0].kind == "full"
    assert len({head.label for head in family}) == len(family)
    assert all(head.support <= vocab for head in family)
    if vocab > 100000:
        assert {head.kind for head in family} == set(HEAD_KINDS)
