"""Every registered head: parameters, logits, support, loss parts, counters, what is fixed."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.heads import HeadConfig, HeadSource, get_head, head_kinds
from specjax.heads.vocabulary import select_ids

WIDTH, VOCAB = 8, 40
# Ties, tokens that never occur and a padded tail.
COUNTS = np.concatenate((np.arange(30)[::-1] // 3, np.zeros(10))).astype(np.int64)
OPTIONS = {
    "low_rank": {"ranks": (4, 3, 2)},
    "fr_spec": {"rows": 9},
    "vocab_trim": {"rows": 9},
    "bcl": {"smallest": 4, "largest": 20},
    "spec_vocab": {"candidates": 6},
    "low_rank_preview": {"candidates": 6},
    "coral": {"groups": 6, "active": 2},
    "dyna_spec": {"groups": 6, "active": 4, "least": 1, "width": 5, "decay": 0.5},
}
KINDS = [kind for kind in head_kinds() if "timing only" not in kind]


@functools.cache
def source(method="activation_aware"):
    generator = np.random.default_rng(5)
    states = generator.standard_normal((50, WIDTH))
    return HeadSource(
        weight=generator.standard_normal((WIDTH, VOCAB)).astype(np.float32),
        method=method,
        covariance=(states.T @ states / 50).astype(np.float32),
        answer_counts=COUNTS,
        corpus_counts=COUNTS[::-1].copy(),
        num_valid_tokens=38,
        special_ids=(0, 37),
        byte_ids=(35,),
        backbone_flops=400,
    )


@functools.cache
def make(kind, method="activation_aware"):
    head = get_head(kind)
    config = head.fit(HeadConfig(kind, WIDTH, VOCAB, options=tuple(OPTIONS.get(kind, {}).items())), source())
    return head, config, head.start(jax.random.key(1), config, source(method))


@functools.cache
def hidden(rows=5):
    return jax.random.normal(jax.random.key(2), (3, rows, WIDTH), jnp.float32)


def test_all_heads_of_the_family_are_registered():
    assert set(OPTIONS) | {"full"} == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_have_the_shapes_that_are_told(kind):
    head, config, params = make(kind)
    assert {name: leaf.shape for name, leaf in params.items()} == head.shapes(config)
    assert {name for name, leaf in params.items() if not jnp.issubdtype(leaf.dtype, jnp.floating)} == set(
        head.integers()
    )
    random = head.init(jax.random.key(3), config, jnp.bfloat16)
    for name, leaf in random.items():
        assert leaf.shape == params[name].shape
        assert leaf.dtype == (jnp.int32 if name in head.integers() else jnp.bfloat16)
    counted = sum(leaf.size for name, leaf in params.items() if name not in head.integers())
    assert head.num_params(config) == counted
    assert 0 < head.bytes_per_call(config, jnp.bfloat16) <= 2 * counted
    assert head.flops(config, 2) == 2 * head.flops(config, 1) > 0
    assert head.describe(config)
    assert set(head.fixed_parameters(config)) <= set(params)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_merged_rows_or_minus_infinity(kind):
    """Heads that choose tokens give the exact logits of what they choose; a dense head gives all."""
    head, config, params = make(kind)
    logits = np.asarray(head.logits(params, hidden(), config))
    assert logits.shape == (3, 5, VOCAB)
    assert logits.dtype == np.float32
    merged = np.asarray(head.merged_weight(params, config), np.float64)
    ids = head.support(params)
    ids = np.arange(VOCAB) if ids is None else np.asarray(ids)
    assert merged.shape == (len(ids), WIDTH)
    exact = np.full((3, 5, VOCAB), -np.inf)
    exact[..., ids] = np.asarray(hidden(), np.float64) @ merged.T
    chosen = np.isfinite(logits)
    np.testing.assert_allclose(logits[chosen], exact[chosen], atol=1e-5)
    assert np.all(chosen.any(-1))


@pytest.mark.parametrize(("kind", "sizes"), [("spec_vocab", {6}), ("low_rank_preview", {6}), ("coral", {12, 13, 14})])
def test_dynamic_supports_have_their_size_and_hold_the_best_scores(kind, sizes):
    head, config, params = make(kind)
    chosen = np.isfinite(np.asarray(head.logits(params, hidden(), config)))
    assert set(chosen.sum(-1).ravel()) <= sizes
    if kind == "coral":
        best = np.asarray(head.group_scores(params, hidden())).argmax(-1)
        members = np.asarray(params["ids"])[best]
    else:
        members = np.argsort(-np.asarray(head.scores(params, hidden())), axis=-1)[..., :6]
    padded = np.concatenate((chosen, np.ones((3, 5, 1), bool)), axis=-1)
    assert np.take_along_axis(padded, members, axis=-1).all()


@pytest.mark.parametrize("kind", ["spec_vocab", "coral", "dyna_spec"])
def test_one_row_and_many_rows_take_other_ways_to_the_same_logits(kind):
    head, config, params = make(kind)
    many = head.logits(params, hidden(), config)
    one = head.logits(params, hidden()[1, 2], config)
    np.testing.assert_allclose(one, many[1, 2], atol=1e-5)


def test_the_budget_of_dyna_spec_shrinks_with_the_draft_step():
    head, config, params = make("dyna_spec")
    sizes = [int(np.isfinite(head.logits(params, hidden()[0, 0], config, step)).sum()) for step in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert [head.num_active(config, step) for step in range(5)] == [4, 2, 1, 1, 1]


@pytest.mark.parametrize("floor", [1e-6, 0.1, 0.999])
def test_a_floor_of_dyna_spec_mixes_a_uniform_law_in(floor):
    head, config, params = make("dyna_spec")
    with_floor = config.with_options(floor=floor)
    for states in (hidden(), hidden()[1, 2]):
        shortlist = np.asarray(head.logits(params, states, config, 1), np.float64)
        mixed = np.asarray(head.logits(params, states, with_floor, 1), np.float64)
        share = np.exp(shortlist - shortlist.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        law = np.exp(mixed - mixed.max(-1, keepdims=True))
        np.testing.assert_allclose(
            law / law.sum(-1, keepdims=True), (1 - floor) * share + floor / VOCAB, rtol=2e-5, atol=1e-12
        )
        np.testing.assert_array_equal(mixed.argmax(-1), shortlist.argmax(-1))


def test_nested_ranks_use_the_first_columns():
    head, config, params = make("low_rank")
    assert config.rank == 4
    for step, rank in enumerate((4, 3, 2, 2)):
        expected = np.asarray(hidden(), np.float64) @ params["down"][:, :rank] @ params["up"][:rank]
        np.testing.assert_allclose(head.logits(params, hidden(), config, step), expected, atol=1e-5)
    (part,) = head.loss_parts(params, hidden(), config)
    for step in range(3):
        np.testing.assert_allclose(
            part.states[step] @ part.matrix, head.logits(params, hidden()[step], config, step), atol=1e-5
        )
    assert head.bytes_per_call(config, jnp.float32) == 4 * 3 * (WIDTH + VOCAB)


@pytest.mark.parametrize("kind", KINDS)
def test_loss_parts_are_products_with_a_target_each(kind):
    head, config, params = make(kind)
    parts = head.loss_parts(params, hidden(), config)
    for part in parts:
        assert part.states.shape[:2] == (3, 5)
        assert part.states.shape[-1] == part.matrix.shape[0]
        columns = VOCAB if part.columns is None and part.classes is None else part.matrix.shape[1]
        assert part.matrix.shape[1] == columns
    if head.law_is_first_part:
        ids = head.support(params)
        logits = head.logits(params, hidden()[0], config)
        np.testing.assert_allclose(
            parts[0].states[0] @ parts[0].matrix, logits if ids is None else logits[..., ids], atol=1e-5
        )


def test_every_token_is_in_exactly_one_group():
    for kind in ("coral", "dyna_spec"):
        _, _, params = make(kind)
        ids = np.asarray(params["ids"]).ravel()
        assert sorted(ids[ids < VOCAB]) == list(range(VOCAB))
        assert np.all(ids <= VOCAB)


@pytest.mark.parametrize("kind", ["fr_spec", "vocab_trim", "bcl"])
def test_static_heads_are_rows_of_the_dense_head(kind):
    """Case H2: logits of the reduced head are the target head's own at its ids, and nothing else."""
    _, _, params = make(kind)
    ids = np.asarray(params["ids"])
    np.testing.assert_array_equal(params["kernel"], source().weight[:, ids])
    assert {0, 35, 37} <= set(ids.tolist())
    assert ids.max() < 38
    assert np.all(np.diff(ids) > 0)


def test_fr_spec_counts_a_corpus_and_vocab_trim_the_answers():
    forced = (0, 37, 35)
    expected = select_ids(COUNTS[::-1], 9, num_valid_tokens=38, forced=forced)
    np.testing.assert_array_equal(make("fr_spec")[2]["ids"], expected)
    expected = select_ids(COUNTS, 9, num_valid_tokens=38, forced=forced)
    np.testing.assert_array_equal(make("vocab_trim")[2]["ids"], expected)


def test_what_is_trained():
    def fixed(kind, **options):
        config = HeadConfig(kind, WIDTH, VOCAB, options=tuple(options.items()))
        return set(get_head(kind).fixed_parameters(config))

    assert fixed("full") == fixed("low_rank") == set()
    assert fixed("fr_spec") == fixed("vocab_trim") == {"kernel", "ids"}
    assert fixed("vocab_trim", trained=True) == fixed("bcl") == {"ids"}
    assert fixed("spec_vocab") == fixed("low_rank_preview") == {"rows"}
    assert fixed("spec_vocab", trained=True) == set()
    assert fixed("coral") == {"ids"}
    assert fixed("dyna_spec") == {"ids", "rows"}
    assert [kind for kind in KINDS if get_head(kind).needs_base] == ["dyna_spec", "low_rank_preview"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"kind": "vocab_trim", "options": {"rows": 41}},
            "`rows` of the vocab_trim head must be at most vocab_size=40",
        ),
        ({"kind": "vocab_trim", "options": {"rows": -1}}, "`rows` of the vocab_trim head must be at least 0; got -1"),
        ({"kind": "vocab_trim", "rank": 3}, "`rank` must be None for the vocab_trim head; got 3"),
        ({"kind": "full", "options": {"rows": 4}}, "an option of the full head must be one of none; got 'rows'"),
        ({"kind": "bcl", "options": {"alpha": 1.5}}, "`alpha` of the bcl head must be at most 1; got 1.5"),
        ({"kind": "bcl", "options": {"alpha": "x"}}, "`alpha` of the bcl head must be of type float; got 'x'"),
        ({"kind": "coral", "options": {"active": 33}}, "`active` of the coral head must be at most groups=32; got 33"),
        ({"kind": "dyna_spec", "options": {"floor": 1}}, "`floor` of the dyna_spec head must be below 1; got 1.0"),
        ({"kind": "low_rank", "options": {"ranks": (3, 4)}}, r"`ranks` must start with the rank 3 and never grow"),
        ({"kind": "low_rank", "rank": 2, "options": {"ranks": (3,)}}, "`ranks` must start with the rank 2"),
    ],
)
def test_impossible_options_are_named(arguments, message):
    options = tuple(arguments.pop("options", {}).items())
    with pytest.raises(ValueError, match=message):
        HeadConfig(**{"hidden_size": WIDTH, "vocab_size": VOCAB, **arguments}, options=options)


def test_options_are_kept_sorted_and_without_defaults():
    one = HeadConfig("vocab_trim", WIDTH, VOCAB, options=(("trained", False), ("rows", 5)))
    assert one.options == (("rows", 5),)
    assert one == HeadConfig("vocab_trim", WIDTH, VOCAB, options=(("rows", 5),))
    assert one.option("trained") is False
    assert one.with_options(trained=True).options == (("rows", 5), ("trained", True))
    assert hash(one) == hash(HeadConfig("vocab_trim", WIDTH, VOCAB, options=(("rows", 5),)))


def test_a_source_that_lacks_something_is_an_error():
    for kind, method, message in (
        ("fr_spec", "svd", "`corpus_counts` of shape"),
        ("vocab_trim", "svd", "`answer_counts` of shape"),
        ("low_rank", "frequency_svd", "`answer_counts` must be given"),
        ("low_rank", "activation_aware", "`covariance` must be given"),
    ):
        bare = HeadSource(weight=source().weight, method=method)
        config = HeadConfig(kind, WIDTH, VOCAB, options=tuple(OPTIONS[kind].items()))
        with pytest.raises(ValueError, match=message):
            get_head(kind).start(jax.random.key(0), config, bare)
    with pytest.raises(ValueError, match="`weight` must be given"):
        get_head("full").start(jax.random.key(0), HeadConfig("full", WIDTH, VOCAB), HeadSource(method="svd"))
