"""EAGLE-3 drafters in the checkpoint form that serving engines load, and back.

`model.safetensors` and `config.json` follow the published EAGLE-3 layout: [out, in] matrices, the layer under
`midlayer.`, one dense `lm_head.weight` [V, d]. A head over a part of the vocabulary has as many rows there as tokens,
and the maps `d2t` (offsets) and `t2d` beside it. Any other head is merged into a dense one, and what it really consists
of lies in `specjax/head.safetensors`, a folder below, because engines read every safetensors file next to config.json.
The embedding is the target's and is not stored.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.safetensors_io import read_header, read_tensors, write_tensors
from specjax.drafters.eagle3_layer import Eagle3Config, Params, default_feature_layers, parameter_shapes
from specjax.heads import HeadConfig, get_head
from specjax.heads.vocabulary_maps import ids_of_maps, maps_of_ids
from specjax.json_files import read_object
from specjax.models.config import RopeScaling

MODEL_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
HEAD_FILE = Path("specjax") / "head.safetensors"
FORMAT_VERSION = 1

# Parameter -> (tensor name, whether it is a matrix to transpose).
_OUTER = {"fc": ("fc.weight", True), "norm": ("norm.weight", False), "fc_norm": ("fc_norm.weight", False)}
_LAYER = {
    "input_norm": ("midlayer.input_layernorm.weight", False),
    "hidden_norm": ("midlayer.hidden_norm.weight", False),
    "q_proj": ("midlayer.self_attn.q_proj.weight", True),
    "k_proj": ("midlayer.self_attn.k_proj.weight", True),
    "v_proj": ("midlayer.self_attn.v_proj.weight", True),
    "o_proj": ("midlayer.self_attn.o_proj.weight", True),
    "post_attention_norm": ("midlayer.post_attention_layernorm.weight", False),
    "gate_proj": ("midlayer.mlp.gate_proj.weight", True),
    "up_proj": ("midlayer.mlp.up_proj.weight", True),
    "down_proj": ("midlayer.mlp.down_proj.weight", True),
}
_HEAD = "lm_head.weight"
# Checkpoints of other trainers may carry these; they say nothing that this drafter does not know.
_OPTIONAL = ("embed_tokens.weight", "d2t", "t2d")
_DRAFT_TO_TARGET, _TARGET_TO_DRAFT = "d2t", "t2d"
_SIZES = (
    "num_attention_heads",
    "hidden_size",
    "vocab_size",
    "intermediate_size",
    "max_position_embeddings",
)
_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def export_drafter(
    folder: str | os.PathLike[str],
    config: Eagle3Config,
    params: Params,
    target: Mapping[str, Any],
    metadata: Mapping[str, Any],
) -> None:
    """Writes a drafter, reads it again and compares.

    Args:
        folder: made if need be.
        config: shape of the drafter.
        params: its parameters; an `embed_tokens` among them is left out.
        target: what it was trained for, as JSON values; `target["config"]["num_layers"]` is read, if it is there.
        metadata: how it was trained, as JSON values.

    Raises:
        ValueError: if a parameter has another shape than the configuration says, or reading it again gives others.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    head = get_head(config.head.kind)
    tensors = {name: np.asarray(_get(params, path)) for name, path, _ in _table(config)}
    tensors = {name: tensors[name].T if flip else tensors[name] for name, _, flip in _table(config)}
    tensors[_HEAD] = np.asarray(head.merged_weight(params["head"], config.head))
    ids = head.support(params["head"])
    if ids is not None:
        tensors[_DRAFT_TO_TARGET], tensors[_TARGET_TO_DRAFT] = maps_of_ids(np.asarray(ids), config.vocab_size)
    _check_shapes(str(folder), config, {name: tensor.shape for name, tensor in tensors.items()})
    write_tensors(folder / MODEL_FILE, tensors, {"format": "pt"})
    if head.from_merged(config.head, tensors[_HEAD], ids) is None:
        # As they are used: no transposition, so that nothing is rounded or reordered on the way.
        write_tensors(folder / HEAD_FILE, {name: np.asarray(leaf) for name, leaf in params["head"].items()})
    fields = {
        **_config_fields(config),
        "eagle_config": _eagle_fields(config, target),
        "specjax": _own_fields(config, target, metadata),
    }
    temporary = folder / f"{CONFIG_FILE}.tmp"
    temporary.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / CONFIG_FILE)
    _check_written(folder, config, params)


def load_drafter(folder: str | os.PathLike[str], *, d2t_form: str | None = None) -> tuple[Eagle3Config, Params]:
    """Reads a drafter; one exported here gives the same logits, bit for bit.

    Args:
        folder: holds config.json and model.safetensors, from here or from another EAGLE-3 trainer. A head over a part
            of the vocabulary that does not say what it is becomes a `vocab_trim` head with trained rows.
        d2t_form: how `d2t` is to be read, see `specjax.heads.vocabulary_maps.ids_of_maps`.

    Returns:
        Configuration and parameters, without the embedding.

    Raises:
        FileNotFoundError: if a file is missing.
        ValueError: if a file is broken, tensors are missing, unexpected or of another shape, or it cannot be known
            which tokens a head over a part of the vocabulary has.
    """
    folder = Path(folder)
    config = _read_config(folder)
    path = folder / MODEL_FILE
    shapes = {_plain_name(name): tuple(entry["shape"]) for name, entry in read_header(path).items()}
    _check_shapes(str(path), config, shapes)
    tensors = {_plain_name(name): tensor for name, tensor in read_tensors(path).items()}

    def take(name: str, flip: bool) -> jax.Array:
        # Always one copy: a view of a mapped file would keep the file open and change with it.
        return jnp.asarray(np.array(tensors[name].T if flip else tensors[name], order="C"))

    params: Params = {}
    for name, keys, flip in _table(config):
        place = params
        for key in keys[:-1]:
            place = place.setdefault(key, {})
        place[keys[-1]] = take(name, flip)
    try:
        ids = _draft_ids(config, tensors, d2t_form)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    head = get_head(config.head.kind)
    whole = head.from_merged(config.head, jnp.asarray(np.array(tensors[_HEAD])), ids)
    params["head"] = _read_head(folder, config) if whole is None else whole
    return config, params


def _draft_ids(config: Eagle3Config, tensors: Mapping[str, np.ndarray], form: str | None) -> jax.Array | None:
    """Tokens of the head's rows; None for the whole vocabulary.

    Raises:
        ValueError: if the maps do not say it.
    """
    rows = get_head(config.head.kind).num_rows(config.head)
    d2t, t2d = (tensors.get(name) for name in (_DRAFT_TO_TARGET, _TARGET_TO_DRAFT))
    if d2t is None and rows == config.vocab_size:
        return None
    ids = ids_of_maps(d2t, config.vocab_size, rows, t2d=t2d, form=form)
    return jnp.asarray(ids)


def _plain_name(name: str) -> str:
    """Other trainers put the layer under `layers.0.`, or everything but the head under `model.`."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def _table(config: Eagle3Config) -> list[tuple[str, tuple[str, ...], bool]]:
    """Tensor name, path of the parameter, whether to transpose; the head is apart."""
    outer = [(name, (key,), flip) for key, (name, flip) in _OUTER.items() if key in parameter_shapes(config)]
    return outer + [(name, ("midlayer", key), flip) for key, (name, flip) in _LAYER.items()]


def _get(params: Params, path: tuple[str, ...]) -> Any:
    value: Any = params
    for key in path:
        value = value[key]
    return value


def _check_shapes(where: str, config: Eagle3Config, found: Mapping[str, tuple[int, ...]]) -> None:
    shapes = parameter_shapes(config)
    expected = {}
    for name, path, flip in _table(config):
        shape = tuple(_get(shapes, path))
        expected[name] = shape[::-1] if flip else shape
    expected[_HEAD] = (get_head(config.head.kind).num_rows(config.head), config.hidden_size)
    missing = sorted(set(expected) - set(found))
    unexpected = sorted(set(found) - set(expected) - set(_OPTIONAL))
    if missing or unexpected:
        raise ValueError(
            f"{where}: the tensors do not fit the configuration; "
            f"missing: {', '.join(missing) or 'none'}; unexpected: {', '.join(unexpected) or 'none'}"
        )
    wrong = [
        f"{name} must be {list(shape)}, got {list(found[name])}"
        for name, shape in expected.items()
        if tuple(found[name]) != shape
    ]
    if wrong:
        raise ValueError(f"{where}: wrong shapes: {'; '.join(wrong)}")


def _read_head(folder: Path, config: Eagle3Config) -> dict[str, jax.Array]:
    tensors = read_tensors(folder / HEAD_FILE)
    expected = get_head(config.head.kind).shapes(config.head)
    found = {name: tensor.shape for name, tensor in tensors.items()}
    if found != expected:
        raise ValueError(f"{folder / HEAD_FILE}: the parameters must be {expected}; got {found}")
    return {name: jnp.asarray(np.array(tensor)) for name, tensor in tensors.items()}


def _config_fields(config: Eagle3Config) -> dict[str, Any]:
    scaling = None
    if config.rope_scaling is not None:
        scaling = {
            ("rope_type" if key == "kind" else key): value
            for key, value in dataclasses.asdict(config.rope_scaling).items()
            if value is not None
        }
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": get_head(config.head.kind).num_rows(config.head),
        "target_hidden_size": config.target_hidden_size,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in _SWITCHES},
    }


def _eagle_fields(config: Eagle3Config, target: Mapping[str, Any]) -> dict[str, Any]:
    """Which target states an engine must collect.

    vLLM counts a configured id as the layer whose input is meant, SGLang as the one whose output is; both collect the
    usual three by themselves. So ids are left out for those, and otherwise written as vLLM reads them.
    """
    fields: dict[str, Any] = {"use_aux_hidden_state": True}
    num_layers = (target.get("config") or {}).get("num_layers")
    if num_layers is None or config.feature_layers != default_feature_layers(num_layers):
        fields["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in config.feature_layers]
    return fields


def _own_fields(config: Eagle3Config, target: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "feature_layers": list(config.feature_layers),
        "head": {
            "kind": config.head.kind,
            "rank": config.head.rank,
            **({"options": dict(config.head.options)} if config.head.options else {}),
        },
        "num_valid_tokens": config.num_valid_tokens,
        "target": dict(target),
        "training": dict(metadata),
    }


def _read_config(folder: Path) -> Eagle3Config:
    path = folder / CONFIG_FILE
    fields = read_object(path)
    try:
        return _config_of(fields)
    except KeyError as error:
        raise ValueError(f"{path}: the configuration lacks `{error.args[0]}`") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path}: the configuration is broken ({error})") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _config_of(fields: Mapping[str, Any]) -> Eagle3Config:
    own = fields.get("specjax", {})
    version = own.get("format_version", FORMAT_VERSION)
    if version != FORMAT_VERSION:
        raise ValueError(f"`specjax.format_version` must be {FORMAT_VERSION}; got {version!r}")
    for name, wanted in (("hidden_act", "silu"), ("attention_bias", False), ("num_hidden_layers", 1)):
        if fields.get(name, wanted) != wanted:
            raise ValueError(f"`{name}` of an EAGLE-3 drafter must be {wanted!r}; got {fields[name]!r}")
    layers = own.get("feature_layers")
    if layers is None:
        layers = [layer - 1 for layer in fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"]]
    for name in _SIZES:
        _check_size(name, fields[name])
    num_heads, width = fields["num_attention_heads"], fields["hidden_size"]
    rope_theta = fields.get("rope_theta", 10000.0)
    for name, value in (("rope_theta", rope_theta), ("rms_norm_eps", fields["rms_norm_eps"])):
        _check_number(name, value)
    head = _head_config(own.get("head"), width, fields["vocab_size"], fields.get("draft_vocab_size"))
    return Eagle3Config(
        vocab_size=fields["vocab_size"],
        hidden_size=width,
        intermediate_size=fields["intermediate_size"],
        num_heads=num_heads,
        num_kv_heads=fields.get("num_key_value_heads", num_heads),
        head_dim=fields.get("head_dim") or width // num_heads,
        target_hidden_size=fields.get("target_hidden_size") or width,
        feature_layers=tuple(layers),
        head=head,
        rope_theta=rope_theta,
        rope_scaling=_rope_scaling(fields.get("rope_scaling")),
        rms_norm_eps=fields["rms_norm_eps"],
        max_position_embeddings=fields["max_position_embeddings"],
        num_valid_tokens=own.get("num_valid_tokens"),
        **{name: bool(fields.get(name, False)) for name in _SWITCHES},
    )


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int or value < 1:
        raise ValueError(f"`{name}` must be a positive integer; got {value!r}")


def _check_number(name: str, value: Any) -> None:
    # Python's JSON reader takes NaN and Infinity; a NaN fails every comparison.
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise ValueError(f"`{name}` must be a positive finite number; got {value!r}")


def _head_config(own: Mapping[str, Any] | None, width: int, vocab_size: int, rows: int | None) -> HeadConfig:
    """The head that a configuration names, or what its number of rows tells of one from elsewhere."""
    rows = vocab_size if rows is None else rows
    if type(rows) is not int or not 1 <= rows <= vocab_size:
        raise ValueError(f"`draft_vocab_size` must be in [1, vocab_size = {vocab_size}]; got {rows!r}")
    if own is not None:
        options = tuple(own.get("options", {}).items())
        head = HeadConfig(own["kind"], width, vocab_size, own["rank"], options)
    elif rows < vocab_size:
        head = HeadConfig("vocab_trim", width, vocab_size, options=(("rows", rows), ("trained", True)))
    else:
        head = HeadConfig("full", width, vocab_size)
    expected = get_head(head.kind).num_rows(head)
    if rows != expected:
        raise ValueError(f"`draft_vocab_size` must be {expected} for the {head.kind} head; got {rows}")
    return head


def _rope_scaling(value: Mapping[str, Any] | None) -> RopeScaling | None:
    kind = None if value is None else value.get("rope_type", value.get("type"))
    if value is None or kind in (None, "default"):
        return None
    known = {field.name for field in dataclasses.fields(RopeScaling)} - {"kind"}
    settings = {key: item for key, item in value.items() if key in known and item is not None}
    for key, item in settings.items():
        _check_number(f"rope_scaling.{key}", item)
    return RopeScaling(kind=kind, **settings)


def _check_written(folder: Path, config: Eagle3Config, params: Params) -> None:
    read_config, read_params = load_drafter(folder)
    if read_config != config:
        raise ValueError(f"{folder}: the configuration reads back as another one: {read_config}")
    own = {name: leaf for name, leaf in params.items() if name != "embed_tokens"}
    same = jax.tree.map(lambda a, b: bool(np.array_equal(np.asarray(a), np.asarray(b))), own, read_params)
    if not all(jax.tree.leaves(same)):
        raise ValueError(f"{folder}: parameters read back as others: {same}")
