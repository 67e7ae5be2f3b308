"""Checkpoints of all heads: round trips, EAGLE-3's vocabulary maps in and out, reduced heads left alone."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.eagle import export_drafter, load_drafter
from specjax.checkpoints.safetensors_io import read_header, read_tensors, write_tensors
from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import Eagle3Config, compute_logits
from specjax.heads import HeadSource
from specjax.heads.vocabulary_maps import ids_of_maps, maps_of_ids
from specjax.models import ModelConfig, init_params

VOCAB = 12
TARGET = ModelConfig(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=16,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    tie_word_embeddings=True,
)
COUNTS = np.zeros(VOCAB, np.int64)
COUNTS[[2, 5, 9]] = [4, 9, 1]
OPTIONS = {
    "fr_spec": {"rows": 3},
    "vocab_trim": {"rows": 3, "trained": True},
    "bcl": {"rows": 4},
    "low_rank": {"ranks": (4, 2)},
    "spec_vocab": {"candidates": 4},
    "low_rank_preview": {"candidates": 4},
    "coral": {"groups": 5, "active": 2},
    "dyna_spec": {"groups": 5, "active": 3, "width": 3},
}


@functools.cache
def target_params():
    return init_params(jax.random.key(1), TARGET, scale=0.4)


@functools.cache
def make_drafter(kind, dtype="float32"):
    rank = 4 if kind in ("low_rank", "spec_vocab", "low_rank_preview") else None
    config = Eagle3Config.for_target(TARGET, head_kind=kind, rank=rank, head_options=OPTIONS[kind])
    source = HeadSource(answer_counts=COUNTS, corpus_counts=COUNTS)
    params = init_drafter(
        jax.random.key(2),
        config,
        target_params(),
        TARGET,
        head_init="svd",
        warm_start=False,
        source=source,
        dtype=dtype,
    )
    return config, params


def export(folder, kind, dtype="float32"):
    config, params = make_drafter(kind, dtype)
    export_drafter(folder, config, params, {"name": "tiny"}, {})
    return folder


def edit(folder, *, change=None, **fields):
    if change is not None:
        tensors = {name: np.array(tensor) for name, tensor in read_tensors(folder / "model.safetensors").items()}
        write_tensors(folder / "model.safetensors", change(tensors))
    path = folder / "config.json"
    values = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


@pytest.mark.parametrize("kind", OPTIONS)
def test_every_head_is_read_back_equal(tmp_path, kind):
    dtype = "bfloat16" if kind in ("bcl", "coral") else "float32"
    config, params = make_drafter(kind, dtype)
    read_config, read_params = load_drafter(export(tmp_path, kind, dtype))
    assert read_config == config
    assert jax.tree.structure(read_params) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(read_params), jax.tree.leaves(params), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


@pytest.mark.parametrize("kind", ["fr_spec", "vocab_trim"])
def test_static_heads_are_written_as_engines_read_them(tmp_path, kind):
    folder = export(tmp_path, kind)
    assert not (folder / "specjax").exists()
    header = read_header(folder / "model.safetensors")
    assert header["lm_head.weight"]["shape"] == [3, 8]
    assert (header["d2t"]["dtype"], header["t2d"]["dtype"]) == ("I64", "BOOL")
    tensors = read_tensors(folder / "model.safetensors")
    np.testing.assert_array_equal(tensors["d2t"], [2, 4, 7])
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), [2, 5, 9])
    fields = json.loads((folder / "config.json").read_text())
    assert (fields["vocab_size"], fields["draft_vocab_size"]) == (12, 3)


def test_merged_rows_of_dynamic_heads_cover_the_vocabulary(tmp_path):
    config, params = make_drafter("coral")
    tensors = read_tensors(export(tmp_path, "coral") / "model.safetensors")
    np.testing.assert_array_equal(tensors["lm_head.weight"], np.asarray(target_params()["lm_head"]).T)
    assert config.head.option("groups") == params["head"]["rows"].shape[0]


def test_case_h1_offsets_and_target_ids_are_told_apart(tmp_path):
    """Target V = 12, the draft keeps [2, 5, 9]: offsets [2, 4, 7]; both forms are valid ascending ids by themselves."""
    folder = export(tmp_path, "vocab_trim")
    assert load_drafter(folder)[1]["head"]["ids"].tolist() == [2, 5, 9]

    def absolute(tensors):
        return tensors | {"d2t": np.array([2, 5, 9])}

    edit(folder, change=absolute)
    # t2d says that these are the ids themselves.
    assert load_drafter(folder)[1]["head"]["ids"].tolist() == [2, 5, 9]
    assert load_drafter(folder, d2t_form="absolute")[1]["head"]["ids"].tolist() == [2, 5, 9]
    with pytest.raises(ValueError, match="`d2t` read as offset must give the ids that `t2d` marks"):
        load_drafter(folder, d2t_form="offset")
    edit(folder, change=lambda tensors: {name: t for name, t in tensors.items() if name != "t2d"})
    # Without it, the published form, which is offsets, unless the caller knows better.
    assert load_drafter(folder)[1]["head"]["ids"].tolist() == [2, 6, 11]
    assert load_drafter(folder, d2t_form="absolute")[1]["head"]["ids"].tolist() == [2, 5, 9]


def test_case_h1_a_missing_map_is_an_error_and_never_the_first_ids(tmp_path):
    folder = export(tmp_path, "vocab_trim")
    edit(folder, change=lambda tensors: {name: t for name, t in tensors.items() if name not in ("d2t", "t2d")})
    with pytest.raises(ValueError, match=r"model\.safetensors: `d2t` must be among the tensors of a head over 3 of 12"):
        load_drafter(folder)
    edit(folder, specjax=None, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 3]})
    with pytest.raises(ValueError, match="`d2t` must be among the tensors"):
        load_drafter(folder)


@pytest.mark.parametrize(
    ("d2t", "message"),
    [
        ([2, 4, 10], "must be increasing ids below 12"),
        ([2, 0, 0], "must be increasing ids below 12"),
        ([-1, 4, 7], "must be increasing ids below 12"),
        ([2, 4], r"`d2t` must have shape \[3\]; got \[2\]"),
    ],
)
def test_case_h1_maps_that_are_no_maps_are_named(d2t, message):
    with pytest.raises(ValueError, match=message):
        ids_of_maps(np.array(d2t), VOCAB, 3)


def test_maps_and_ids_are_inverses():
    ids = np.array([0, 3, 4, 11], np.int32)
    d2t, t2d = maps_of_ids(ids, VOCAB)
    np.testing.assert_array_equal(ids_of_maps(d2t, VOCAB, 4, t2d=t2d), ids)
    np.testing.assert_array_equal(ids_of_maps(d2t, VOCAB, 4), ids)
    with pytest.raises(ValueError, match="must be increasing"):
        maps_of_ids(np.array([3, 1]), VOCAB)


def test_case_h2_a_reduced_head_of_another_trainer_survives_loading(tmp_path):
    """A head of fewer rows than the target's must not be replaced by the target's: its logits are its own rows'."""
    folder = export(tmp_path, "vocab_trim")
    generator = np.random.default_rng(0)
    rows = generator.standard_normal((3, 8)).astype(np.float32)
    edit(
        folder,
        change=lambda tensors: tensors | {"lm_head.weight": rows},
        specjax=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 3, 3]},
    )
    config, params = load_drafter(folder)
    assert config.head.kind == "vocab_trim"
    assert config.head.option("trained")
    hidden = generator.standard_normal((4, 8)).astype(np.float32)
    logits = np.asarray(compute_logits(params, config, jnp.asarray(hidden)))
    normed = hidden / np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    np.testing.assert_allclose(logits[:, [2, 5, 9]], normed @ rows.T, rtol=1e-5, atol=1e-5)
    assert np.all(np.isneginf(np.delete(logits, [2, 5, 9], axis=1)))


def test_case_h6_a_tied_target_leaves_a_reduced_head_alone(tmp_path):
    folder = export(tmp_path, "vocab_trim")
    edit(folder, tie_word_embeddings=True)
    params = load_drafter(folder)[1]["head"]
    assert params["kernel"].shape == (8, 3)
    np.testing.assert_array_equal(params["kernel"], make_drafter("vocab_trim")[1]["head"]["kernel"])


def test_a_number_of_rows_that_the_head_does_not_have_is_named(tmp_path):
    folder = export(tmp_path, "vocab_trim")
    edit(folder, draft_vocab_size=5)
    with pytest.raises(ValueError, match="`draft_vocab_size` must be 3 for the vocab_trim head; got 5"):
        load_drafter(folder)
    edit(folder, draft_vocab_size=13, specjax=None)
    with pytest.raises(ValueError, match=r"`draft_vocab_size` must be in \[1, vocab_size = 12\]; got 13"):
        load_drafter(folder)
