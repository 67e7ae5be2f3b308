"""The heads that one command trains: how they are written, what they are called, and which comes from which.

    full,low_rank:rank=72,vocab_trim:rows=v/4,trained=true,low_rank:ranks=96:72:48

A comma separates heads and, within a head, its settings: `name=value` belongs to the head before it. Sizes may be
written as parts of the drafter's width (`d/8`) or of the vocabulary (`v/4`). Beside its rank and the options of its
kind a head may have its own `loss`, `lk_decay` and `head_init`, which are flags of the training otherwise.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Sequence
from typing import Any

from specjax.drafters.eagle3_layer import Eagle3Config
from specjax.heads import HeadConfig, format_options, get_head, head_kinds, parse_options
from specjax.models import ModelConfig

ALL = "all"
# What every other head is compared with, and what heads without a training of their own are made from.
BASE = "full"
# What "all" means: every registered kind, these ones at several sizes. Sizes are those of published comparisons.
SIZES: dict[str, tuple[str, ...]] = {
    "low_rank": ("rank=d/16", "rank=d/8", "rank=d/4"),
    "fr_spec": ("rows=v/8", "rows=v/4", "rows=v/2"),
    "vocab_trim": ("rows=v/8", "rows=v/4", "rows=v/2", "rows=v/4,trained=true"),
}
# What "all" means in a quick run.
QUICK_SIZES: dict[str, tuple[str, ...]] = {"low_rank": ("rank=d/8",), "fr_spec": ("",), "vocab_trim": ("",)}

# Flags of a training run that one head may have its own values of.
TRAINING_SETTINGS: dict[str, type] = {"loss": str, "lk_decay": float, "head_init": str}

_PUBLIC_NAME = re.compile(r"[a-z][a-z0-9_]*")
_SETTING = re.compile(r"\w+\s*=")
_PART = re.compile(r"([dv])/([1-9]\d*)")


@dataclasses.dataclass(frozen=True)
class HeadRequest:
    """A head as it was asked for.

    Attributes:
        kind: a registered kind.
        settings: its settings as written, "name=value,name=value".
    """

    kind: str
    settings: str = ""

    def __str__(self) -> str:
        return f"{self.kind}:{self.settings}" if self.settings else self.kind


@dataclasses.dataclass(frozen=True)
class PlannedHead:
    """One drafter of a run over heads.

    Attributes:
        name: of the head, the same for all seeds: "low_rank-rank72".
        config: its shape; heads that choose a size by the data have it chosen later.
        seed: of the start of its drafter and of the order of rows.
        folder: its run directory, below that of the whole run.
        base: folder of the drafter that it is made from, None for one that is trained from the start.
        training: its own values of `TRAINING_SETTINGS`, as pairs.
    """

    name: str
    config: HeadConfig
    seed: int
    folder: str
    base: str | None
    training: tuple[tuple[str, Any], ...] = ()

    @property
    def is_trained(self) -> bool:
        """Whether anything of it is trained."""
        return get_head(self.config.kind).is_trained(self.config)


def parse_heads(text: str, *, quick: bool = False) -> tuple[HeadRequest, ...]:
    """Reads `--heads`.

    Args:
        text: what the user wrote.
        quick: whether "all" is the short list.

    Returns:
        The heads in the order they are written.

    Raises:
        ValueError: in one line, if there is no head, one is unknown or its settings are not written as such.
    """
    requests: list[HeadRequest] = []
    for piece in text.split(","):
        piece = piece.strip()
        if not piece:
            raise ValueError(f"`--heads` must be heads with commas between, such as {BASE},low_rank; got {text!r}")
        if _SETTING.match(piece):
            if not requests or not requests[-1].settings:
                raise ValueError(f"`--heads` must name a head (KIND:name=value) before a setting; got {piece!r}")
            last = requests[-1]
            requests[-1] = dataclasses.replace(last, settings=f"{last.settings},{piece}")
            continue
        kind, colon, settings = piece.partition(":")
        if kind == ALL and not colon:
            requests += _all_heads(quick)
            continue
        known = public_kinds()
        if kind not in known:
            close = difflib.get_close_matches(kind, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(f"`--heads` must be {ALL!r} or among {', '.join(known)}; got {kind!r}{hint}")
        if colon and not settings:
            raise ValueError(f"`--heads` must have settings (name=value) behind a colon; got {piece!r}")
        requests.append(HeadRequest(kind, settings))
    return tuple(requests)


def public_kinds() -> tuple[str, ...]:
    """Registered kinds; entries that only measurements register have names that nobody can write."""
    return tuple(kind for kind in head_kinds() if _PUBLIC_NAME.fullmatch(kind))


def resolve(request: HeadRequest, model: ModelConfig) -> tuple[HeadConfig, tuple[tuple[str, Any], ...]]:
    """The head's shape in the drafter for a target, and its own training settings.

    Raises:
        ValueError: in one line, if a setting is unknown or does not fit the target.
    """
    head = get_head(request.kind)
    try:
        settings = dict(_split(request.settings))
        written = {name: _size(value, model) for name, value in settings.items()}
        own = {option.name for option in head.options}
        training = [
            (name, _training_value(name, written.pop(name)))
            for name in sorted(set(TRAINING_SETTINGS) - own)
            if name in written
        ]
        rank = written.pop("rank", None)
        if rank is not None and not re.fullmatch(r"-?\d+", rank):
            raise ValueError(f"`rank` must be a whole number or a part of the width, such as d/8; got {rank!r}")
        options = parse_options(",".join(f"{name}={value}" for name, value in written.items()), head.options)
        drafter = Eagle3Config.for_target(
            model, head_kind=request.kind, rank=None if rank is None else int(rank), head_options=options
        )
        return drafter.head, tuple(training)
    except ValueError as error:
        raise ValueError(f"`--heads`, {request}: {error}") from None


def head_name(config: HeadConfig, training: Sequence[tuple[str, Any]] = ()) -> str:
    """A short name that can be a folder's: kind, rank, options that are not their defaults, own training settings."""
    parts = [config.kind]
    if config.rank is not None:
        parts.append(f"rank{config.rank}")
    for name, value in (*config.options, *training):
        parts.append(name if value is True else f"{name}{_text(value)}")
    return "-".join(parts)


def plan_heads(
    requests: Sequence[HeadRequest], model: ModelConfig, seeds: Sequence[int], *, data_seed: int = 0
) -> tuple[PlannedHead, ...]:
    """The drafters of a run in the order they are made: that with the full head first, whether or not it is asked for.

    Args:
        requests: the heads.
        model: the target's configuration.
        seeds: one drafter of every head for each.
        data_seed: seed of the data; drafters of the same seed have the plain names.

    Returns:
        The drafters, seed by seed.

    Raises:
        ValueError: in one line, if a head does not fit the target or two are the same.
    """
    configs: dict[str, tuple[HeadConfig, tuple[tuple[str, Any], ...]]] = {}
    for request in (HeadRequest(BASE), *requests):
        config, training = resolve(request, model)
        name = head_name(config, training)
        if name in configs and name != BASE:
            raise ValueError(f"`--heads` must name each head once; got {name} twice")
        configs[name] = (config, training)
    planned = []
    for seed in dict.fromkeys(seeds):
        ending = "" if seed == data_seed else f"-seed{seed}"
        for name, (config, training) in configs.items():
            head = get_head(config.kind)
            derived = name != BASE and (head.needs_base or not head.is_trained(config))
            base = f"{BASE}{ending}" if derived else None
            planned.append(PlannedHead(name, config, seed, f"{name}{ending}", base, training))
    return tuple(planned)


def options_text(config: HeadConfig) -> str:
    """The options as the flag of a single run takes them."""
    return format_options(config.options)


def _all_heads(quick: bool) -> list[HeadRequest]:
    sizes = QUICK_SIZES if quick else SIZES
    kinds = [BASE, *(kind for kind in public_kinds() if kind != BASE)]
    return [HeadRequest(kind, settings) for kind in kinds for settings in sizes.get(kind, ("",))]


def _split(settings: str) -> list[tuple[str, str]]:
    """Pairs of name and value, each name once."""
    pairs: list[tuple[str, str]] = []
    for part in settings.split(",") if settings else ():
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not name or not value:
            raise ValueError(f"settings must be written as name=value,name=value; got {settings!r}")
        if name in dict(pairs):
            raise ValueError(f"settings must be given once each; got `{name}` twice")
        pairs.append((name, value))
    return pairs


def _training_value(name: str, value: str) -> Any:
    try:
        return TRAINING_SETTINGS[name](value)
    except ValueError:
        raise ValueError(f"`{name}` must be a number; got {value!r}") from None


def _size(value: str, model: ModelConfig) -> str:
    match = _PART.fullmatch(value)
    if match is None:
        return value
    whole = model.hidden_size if match[1] == "d" else model.num_valid_tokens or model.vocab_size
    return str(max(1, whole // int(match[2])))


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ".".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
