"""Targets and drafters for the commands: from a run directory, or from a target and exported drafters."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from eval.records import PLAIN
from eval.run_directory import RunDirectory
from specjax.checkpoints.eagle import load_drafter
from specjax.checkpoints.target import Target, load_target
from specjax.drafters.eagle3 import Eagle3Drafter
from specjax.drafters.language_model import LanguageModelDrafter, keep_layers
from specjax.drafters.ngram import NgramDrafter
from specjax.json_files import read_object

NGRAM = "ngram"
SELF_DRAFT = "self_draft"


@dataclasses.dataclass(frozen=True)
class LoadedSystem:
    """A drafter ready for the engine.

    Attributes:
        name: in tables.
        drafter: its configuration object.
        params: its parameters, the target's embedding among them; None without parameters.
        template_digest: of the chat template it was trained with; None where the export does not say.
        notes: what a user should know before trusting its figures.
    """

    name: str
    drafter: Any
    params: Any
    template_digest: str | None = None
    notes: tuple[str, ...] = ()


def load_command(
    *,
    run: str | None,
    target: str | None,
    drafters: Sequence[str],
    ngram: bool,
    self_draft_layers: str | None = None,
    dtype: str | None = None,
    cache_dir: str | None = None,
) -> tuple[Target, dict[str, LoadedSystem]]:
    """Loads what a command's flags name.

    Args:
        run: run directory; gives the target, its dtype and the exported drafter.
        target: source of the target, instead of `run`'s.
        drafters: folders of exported drafters, "FOLDER" or "NAME=FOLDER", beside `run`'s.
        ngram: whether prompt lookup is a system too.
        self_draft_layers: layers of the target that draft for it, as in "0-15,18-29"; None is no such system.
        dtype: of the target's weights; None is the run's, or float32.
        cache_dir: where fetched weights are kept.

    Returns:
        The target, and systems by name.

    Raises:
        ValueError: if neither `run` nor `target` is given, names clash, or a drafter or layer does not fit the target.
        FileNotFoundError: if a folder is missing.
    """
    folders: dict[str, pathlib.Path] = {}
    source = target
    if run is not None:
        directory = RunDirectory.open(run)
        source = source or directory.target
        dtype = dtype or directory.flags.get("target_dtype")
        folders[directory.flags.get("head", "trained")] = directory.export
    if source is None:
        raise ValueError("`--run` or `--target` must be given")
    for value in drafters:
        name, folder = _parse_drafter(value)
        if name in folders or name in (PLAIN, NGRAM, SELF_DRAFT):
            raise ValueError(f"`--drafter` must give each drafter its own name (NAME=FOLDER); got {name!r} twice")
        folders[name] = folder
    layers = None if self_draft_layers is None else parse_layers(self_draft_layers)
    for folder in folders.values():
        if not folder.is_dir():
            raise FileNotFoundError(f"no exported drafter at {folder}")
    loaded = load_target(source, dtype=dtype or "float32", cache_dir=cache_dir)
    systems = {name: load_system(name, folder, loaded) for name, folder in folders.items()}
    if layers is not None:
        systems[SELF_DRAFT] = load_self_drafter(layers, loaded)
    if ngram:
        systems[NGRAM] = LoadedSystem(NGRAM, NgramDrafter(vocab_size=loaded.config.vocab_size), None)
    return loaded, systems


def load_system(name: str, folder: pathlib.Path, target: Target) -> LoadedSystem:
    """Loads an exported drafter and gives it the target's embedding.

    Raises:
        ValueError: if its vocabulary or the width of its features is not the target's, or its config.json is broken.
    """
    config, params = load_drafter(folder)
    for field, own, other in (
        ("vocab_size", config.vocab_size, target.config.vocab_size),
        ("target_hidden_size", config.target_hidden_size, target.config.hidden_size),
    ):
        if own != other:
            raise ValueError(f"`{field}` of the drafter in {folder} must be the target's {other}; got {own}")
    if max(config.feature_layers) >= target.config.num_layers:
        raise ValueError(
            f"`feature_layers` of the drafter in {folder} must be below the target's {target.config.num_layers} "
            f"layers; got {config.feature_layers}"
        )
    recorded = _recorded_target(folder)
    notes = ()
    if recorded.get("digest") not in (None, target.digest):
        notes = (
            f"{name} was trained for other weights ({recorded['digest'][:12]}) than the target's "
            f"({target.digest[:12]}): expect lower acceptance",
        )
    embedded = {**params, "embed_tokens": target.params["embed_tokens"]}
    return LoadedSystem(name, Eagle3Drafter(config), embedded, recorded.get("template_digest"), notes)


def load_self_drafter(layers: Sequence[int], target: Target) -> LoadedSystem:
    """Makes a drafter of some of the target's own layers, without copying or training anything.

    Raises:
        ValueError: if a layer does not exist or they are not ascending.
    """
    config, params = keep_layers(target.config, target.params, layers)
    drafter = LanguageModelDrafter(
        config, cache_dtype=str(params["embed_tokens"].dtype), name=f"target layers {format_layers(layers)}"
    )
    return LoadedSystem(SELF_DRAFT, drafter, params)


def parse_layers(text: str) -> tuple[int, ...]:
    """Layer indices of a text such as "0-15,18-29" or "0,2,4".

    Raises:
        ValueError: if it is none.
    """
    layers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise ValueError(
                f"`--self_draft_layers` must be layers and ranges of them, such as 0-15,18-29; got {text!r}"
            )
        layers += range(first, last + 1)
    return tuple(layers)


def format_layers(layers: Sequence[int]) -> str:
    """The shortest text that `parse_layers` reads as these ascending layers."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and layer == ranges[-1][1] + 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _parse_drafter(value: str) -> tuple[str, pathlib.Path]:
    if not value.strip():
        raise ValueError("`--drafter` must not be empty")
    name, equals, folder = value.partition("=")
    # An empty path is the current folder to pathlib, which nobody means by an empty name.
    if equals and not (name and folder):
        raise ValueError(f"`--drafter` must be FOLDER or NAME=FOLDER; got {value!r}")
    path = pathlib.Path(folder if equals else value)
    return (name if equals else path.resolve().name), path


def _recorded_target(folder: pathlib.Path) -> dict[str, Any]:
    """What the export says about the target it was trained for; checkpoints of other trainers say nothing.

    Raises:
        ValueError: if a digest is no text.
    """
    path = folder / "config.json"
    own = read_object(path).get("specjax")
    recorded = own.get("target") if isinstance(own, dict) else None
    if not isinstance(recorded, dict):
        return {}
    for field in ("digest", "template_digest"):
        value = recorded.get(field)
        if value is not None and not isinstance(value, str):
            raise ValueError(f"{path}: `specjax.target.{field}` must be a text; got {value!r}")
    return recorded
