"""Whether the settings recorded in a directory are those of the run that finds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from train.config import TrainConfig


def recorded_identity(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """A run's recorded identity as this version sees it.

    A run of an earlier version may not know a flag: it did what the flag's default does. It may also hold one that no
    longer says anything about what a run is.
    """
    rules = {field.name: field for field in dataclasses.fields(TrainConfig)}
    defaults = {name: rule.default for name, rule in rules.items() if rule.metadata["identity"]}
    kept = {name: value for name, value in recorded.items() if name not in rules or rules[name].metadata["identity"]}
    return {**defaults, **kept}


def differing_flags(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Names of settings that two runs do not share, each with both values, for messages."""
    missing = "absent"
    return [
        f"--{name} (there {theirs.get(name, missing)!r}, here {mine.get(name, missing)!r})"
        for name in sorted({*mine, *theirs})
        if mine.get(name, missing) != theirs.get(name, missing)
    ]
