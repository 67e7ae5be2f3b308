"""Drafters in EAGLE form: published names and layout, equal logits after a round trip, every key accounted for."""

from __future__ import annotations

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.eagle import export_drafter, load_drafter
from specjax.checkpoints.safetensors_io import read_header, read_tensors, write_tensors
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import compute_logits
from specjax.models import ModelConfig, RopeScaling, init_params
from specjax.testing.eagle3_numpy import Eagle3Reference
from specjax.types import DraftTree

TARGET = ModelConfig(
    vocab_size=12,
    hidden_size=8,
    intermediate_size=16,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    tie_word_embeddings=True,
)
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@functools.cache
def target_params():
    return init_params(jax.random.key(1), TARGET, scale=0.4)


@functools.cache
def make_drafter(head_kind="low_rank", dtype="float32", **overrides):
    config = Eagle3Config.for_target(
        TARGET, head_kind=head_kind, rank=3 if head_kind == "low_rank" else None, **overrides
    )
    params = init_drafter(
        jax.random.key(2), config, target_params(), TARGET, head_init="random", warm_start=False, dtype=dtype
    )
    # Norms of one would hide one that is dropped or taken for another.
    leaves, treedef = jax.tree.flatten(params)
    noise = [
        leaf * (1 + 0.3 * jax.random.normal(jax.random.fold_in(jax.random.key(3), i), leaf.shape)).astype(leaf.dtype)
        for i, leaf in enumerate(leaves)
    ]
    return config, jax.tree.unflatten(treedef, noise)


def export(folder, config, params, target_config=None):
    target = {"name": "tiny"} if target_config is None else {"name": "tiny", "config": target_config}
    export_drafter(folder, config, params, target, {"steps": 7})
    return folder


def edit_config(folder, **changes):
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            fields.pop(name)
        else:
            fields[name] = value
    path.write_text(json.dumps(fields))


def edit_tensors(folder, change):
    tensors = {name: np.array(tensor) for name, tensor in read_tensors(folder / "model.safetensors").items()}
    write_tensors(folder / "model.safetensors", change(tensors) or tensors)


@pytest.mark.parametrize("head_kind", ["low_rank", "full"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_round_trip_gives_equal_parameters_and_logits(tmp_path, head_kind, dtype):
    config, params = make_drafter(head_kind, dtype)
    read_config, read_params = load_drafter(export(tmp_path, config, {**params, "embed_tokens": jnp.ones((12, 8))}))
    assert read_config == config
    assert jax.tree.structure(read_params) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(read_params), jax.tree.leaves(params), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    hidden = jax.random.normal(jax.random.key(9), (5, 8), jnp.float32)
    logits = [compute_logits(p, config, hidden) for p in (read_params, params)]
    np.testing.assert_array_equal(*logits)


def test_names_shapes_and_layout_are_the_published_ones(tmp_path):
    config, params = make_drafter()
    export(tmp_path, config, params)
    shapes = {name: entry["shape"] for name, entry in read_header(tmp_path / "model.safetensors").items()}
    assert shapes == {
        "fc.weight": [8, 24],
        "midlayer.hidden_norm.weight": [8],
        "midlayer.input_layernorm.weight": [8],
        "midlayer.mlp.down_proj.weight": [8, 16],
        "midlayer.mlp.gate_proj.weight": [16, 8],
        "midlayer.mlp.up_proj.weight": [16, 8],
        "midlayer.post_attention_layernorm.weight": [8],
        "midlayer.self_attn.k_proj.weight": [8, 16],
        "midlayer.self_attn.o_proj.weight": [8, 16],
        "midlayer.self_attn.q_proj.weight": [16, 16],
        "midlayer.self_attn.v_proj.weight": [8, 16],
        "norm.weight": [8],
        "lm_head.weight": [12, 8],
    }
    tensors = read_tensors(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(tensors["fc.weight"], np.asarray(params["fc"]).T)
    merged = np.asarray(params["head"]["down"], np.float64) @ np.asarray(params["head"]["up"], np.float64)
    np.testing.assert_allclose(tensors["lm_head.weight"], merged.T, rtol=1e-5, atol=1e-6)


def test_config_says_what_engines_and_we_need(tmp_path):
    config, params = make_drafter()
    fields = json.loads((export(tmp_path, config, params) / "config.json").read_text())
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["draft_vocab_size"] == fields["vocab_size"] == 12
    assert fields["num_hidden_layers"] == 1
    assert fields["tie_word_embeddings"] is False
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 3]
    own = fields["specjax"]
    assert own["head"] == {"kind": "low_rank", "rank": 3}
    assert own["target"] == {"name": "tiny"}
    assert own["training"] == {"steps": 7}


def test_the_usual_feature_layers_are_left_to_the_engine(tmp_path):
    config, params = make_drafter()
    folder = export(tmp_path, config, params, {"num_layers": 6})
    assert json.loads((folder / "config.json").read_text())["eagle_config"] == {"use_aux_hidden_state": True}
    assert load_drafter(folder)[0].feature_layers == (1, 2, 2)


@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling("linear", 4.0),
        RopeScaling("llama3", 8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ],
)
def test_case_k9_the_drafter_states_its_own_rotary_settings(tmp_path, scaling):
    config, params = make_drafter(
        rope_scaling=scaling, rope_theta=5e5, max_position_embeddings=777, num_valid_tokens=11
    )
    read_config, _ = load_drafter(export(tmp_path, config, params))
    assert read_config == config


@pytest.mark.parametrize("head_kind", ["low_rank", "full"])
def test_case_h6_a_tied_target_leaves_the_drafters_head_alone(tmp_path, head_kind):
    """`tie_word_embeddings` copied over from the target must not replace the head by the embedding."""
    config, params = make_drafter(head_kind)
    folder = export(tmp_path, config, params)
    edit_config(folder, tie_word_embeddings=True)
    _, read_params = load_drafter(folder)
    for name, leaf in params["head"].items():
        np.testing.assert_array_equal(read_params["head"][name], leaf)
    edit_tensors(folder, lambda tensors: {name: t for name, t in tensors.items() if name != "lm_head.weight"})
    with pytest.raises(ValueError, match=r"missing: lm_head\.weight"):
        load_drafter(folder)


SWITCH_SETS = [dict(zip(SWITCHES, bits, strict=True)) for bits in np.ndindex(2, 2, 2, 2) if not (bits[1] and bits[2])]


@pytest.mark.parametrize("switches", SWITCH_SETS, ids=lambda s: "+".join(k for k, v in s.items() if v) or "plain")
def test_case_h10_steps_equal_a_numpy_reference_of_the_file(tmp_path, switches):
    """Two entries and one draft step, computed by NumPy from the file's tensors and by the drafter that was loaded."""
    config, params = make_drafter(**{name: bool(value) for name, value in switches.items()})
    folder = export(tmp_path, config, params)
    raw = {name: np.asarray(t, np.float64) for name, t in read_tensors(folder / "model.safetensors").items()}
    layer = "midlayer.{}.weight".format
    reference = Eagle3Reference(
        config,
        {
            "fc": raw["fc.weight"].T,
            "norm": raw["norm.weight"],
            "head": {"kernel": raw["lm_head.weight"].T},
            "embed_tokens": target_params()["embed_tokens"],
            **({"fc_norm": raw["fc_norm.weight"]} if "fc_norm.weight" in raw else {}),
            "midlayer": {
                "input_norm": raw[layer("input_layernorm")],
                "hidden_norm": raw[layer("hidden_norm")],
                "post_attention_norm": raw[layer("post_attention_layernorm")],
                **{f"{name}_proj": raw[layer(f"self_attn.{name}_proj")].T for name in "qkvo"},
                **{f"{name}_proj": raw[layer(f"mlp.{name}_proj")].T for name in ("gate", "up", "down")},
            },
        },
    )
    generator = np.random.default_rng(0)
    features = generator.standard_normal((2, 24)).astype(np.float32)
    tokens, drafted = [3, 7], 5
    for entry in range(2):
        output = reference.add(reference.combine(features[entry]), tokens[entry], entry, range(entry))
    expected = [reference.logits(output)]
    expected.append(reference.logits(reference.add(reference.fed_back(output), drafted, 2, [0, 1])))

    read_config, read_params = load_drafter(folder)
    drafter, tree = Eagle3Drafter(read_config), DraftTree.chains(1, 2)

    def run(read_params):
        logits = []

        def force(draft_logits):
            logits.append(draft_logits[0, 0])
            return jnp.where(jnp.arange(12) == drafted, jnp.float32(0), -jnp.inf) + 0 * draft_logits

        full = {**read_params, "embed_tokens": target_params()["embed_tokens"]}
        state = drafter.extend(
            full,
            drafter.init_state(1, 8, tree),
            tokens=jnp.asarray([tokens], jnp.int32),
            features=jnp.asarray(features[None]),
            count=jnp.asarray([2], jnp.int32),
        )
        drafter.propose(
            jax.random.split(jax.random.key(0), 1),
            full,
            state,
            last_token=jnp.asarray(tokens[-1:], jnp.int32),
            tree=tree,
            max_depth=jnp.asarray([2], jnp.int32),
            to_laws=force,
        )
        return logits

    np.testing.assert_allclose(jnp.stack(jax.jit(run)(read_params)), np.stack(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: name.replace("midlayer.", "layers.0."),
        lambda name: name if name == "lm_head.weight" else f"model.{name.replace('midlayer.', 'layers.0.')}",
    ],
)
def test_names_of_other_trainers_are_understood(tmp_path, rename):
    config, params = make_drafter("full")
    folder = export(tmp_path, config, params)
    edit_tensors(folder, lambda tensors: {rename(name): tensor for name, tensor in tensors.items()})
    edit_config(folder, specjax=None)
    read_config, read_params = load_drafter(folder)
    assert read_config == config
    for ours, theirs in zip(jax.tree.leaves(read_params), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_missing_and_unexpected_tensors_are_one_error(tmp_path):
    config, params = make_drafter()
    folder = export(tmp_path, config, params)

    def change(tensors):
        tensors["midlayer.self_attn.q_proj.bias"] = np.zeros(16, np.float32)
        return {name: t for name, t in tensors.items() if name not in ("fc.weight", "norm.weight")}

    edit_tensors(folder, change)
    message = r"missing: fc.weight, norm.weight; unexpected: midlayer.self_attn.q_proj.bias"
    with pytest.raises(ValueError, match=message):
        load_drafter(folder)


def test_wrong_shapes_are_named(tmp_path):
    config, params = make_drafter()
    folder = export(tmp_path, config, params)
    edit_tensors(folder, lambda tensors: tensors.update({"fc.weight": np.zeros((8, 16), np.float32)}))
    with pytest.raises(ValueError, match=r"wrong shapes: fc.weight must be \[8, 24\], got \[8, 16\]"):
        load_drafter(folder)


def test_vocabulary_maps_that_do_not_fit_are_named(tmp_path):
    config, params = make_drafter("full")
    folder = export(tmp_path, config, params)
    edit_tensors(folder, lambda tensors: tensors.update({"d2t": np.ones(12, np.int64)}))
    with pytest.raises(ValueError, match=r"`d2t` read as offset must be increasing ids below 12; got \[1, 2, 3, 4\]"):
        load_drafter(folder)
    edit_config(folder, draft_vocab_size=5)
    with pytest.raises(ValueError, match="`draft_vocab_size` must be 12 for the full head; got 5"):
        load_drafter(folder)


def test_a_truncated_file_is_named(tmp_path):
    config, params = make_drafter()
    path = export(tmp_path, config, params) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model.safetensors: truncated"):
        load_drafter(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": None}, "config.json: the configuration lacks `num_attention_heads`"),
        ({"hidden_act": "gelu"}, "`hidden_act` of an EAGLE-3 drafter must be 'silu'; got 'gelu'"),
        ({"attention_bias": True}, "`attention_bias` of an EAGLE-3 drafter must be False; got True"),
        ({"num_hidden_layers": 2}, "`num_hidden_layers` of an EAGLE-3 drafter must be 1; got 2"),
        ({"num_key_value_heads": 3}, "config.json: `num_kv_heads` must divide `num_heads`; got 3 and 4"),
        ({"specjax": {"format_version": 2}}, "`specjax.format_version` must be 1; got 2"),
        (
            {"num_attention_heads": 0, "head_dim": None},
            "config.json: `num_attention_heads` must be a positive integer; got 0",
        ),
        ({"vocab_size": "12"}, "config.json: `vocab_size` must be a positive integer; got '12'"),
        ({"rms_norm_eps": "x"}, "config.json: `rms_norm_eps` must be a positive finite number; got 'x'"),
        ({"rope_theta": float("nan")}, "config.json: `rope_theta` must be a positive finite number; got nan"),
        ({"rope_theta": float("inf")}, "config.json: `rope_theta` must be a positive finite number; got inf"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "4"}},
            "config.json: `rope_scaling.factor` must be a positive finite number; got '4'",
        ),
    ],
)
def test_configurations_that_cannot_be_met_are_named(tmp_path, changes, message):
    config, params = make_drafter()
    edit_config(export(tmp_path, config, params), **changes)
    with pytest.raises(ValueError, match=message):
        load_drafter(tmp_path)


def test_files_that_are_not_there_or_not_json(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        load_drafter(tmp_path)
    config, params = make_drafter()
    export(tmp_path, config, params)
    (tmp_path / "specjax" / "head.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"head\.safetensors: no such weights file"):
        load_drafter(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not JSON"):
        load_drafter(tmp_path)


def test_parameters_of_another_shape_are_not_written(tmp_path):
    config, params = make_drafter()
    with pytest.raises(ValueError, match=r"wrong shapes: norm\.weight"):
        export(tmp_path, config, {**params, "norm": jnp.ones(4)})
    assert not (tmp_path / "model.safetensors").exists()
