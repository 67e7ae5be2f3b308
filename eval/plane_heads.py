"""The drafters of a run over heads, loaded, with all that names their measurements."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from eval.heads_directory import HeadsDirectory
from eval.loading import LoadedSystem, load_system
from eval.provenance import params_digest
from specjax import cost
from specjax.checkpoints.target import Target
from specjax.heads import HeadConfig, get_head

FULL = "full"


@dataclasses.dataclass(frozen=True)
class PlaneHead:
    """One drafter.

    Attributes:
        name: of the head, the same for all seeds.
        seed: of its training.
        made: "trained" or "derived".
        base: folder of the drafter it was made from, or None.
        system: the drafter and its parameters.
        digest: of its parameters.
    """

    name: str
    seed: int
    made: str
    base: str | None
    system: LoadedSystem
    digest: str

    @property
    def mark(self) -> str:
        """Names measurements of this drafter; one that was trained anew has another mark."""
        return f"{self.name}-s{self.seed}-{self.digest[:8]}"

    @property
    def config(self) -> HeadConfig:
        """Shape of the head."""
        return self.system.drafter.config.head

    @property
    def pair(self) -> tuple[Any, Any]:
        """Drafter and parameters."""
        return self.system.drafter, self.system.params

    def describe(self) -> dict[str, Any]:
        """What the head is, as JSON values."""
        head, config = get_head(self.config.kind), self.config
        full = cost.full_head_params(config.hidden_size, config.vocab_size)
        # Four bytes a number: all heads of a run have one dtype, and only ratios matter.
        full_bytes = 4 * full
        support = head.support(self.system.params["head"])
        return {
            "name": self.name,
            "kind": config.kind,
            "rank": config.rank,
            "options": dict(config.options),
            "made": self.made,
            "base": self.base,
            "shapes": head.describe(config),
            "num_params": head.num_params(config),
            "byte_ratio": head.bytes_per_call(config, "float32") / full_bytes,
            "num_supported": None if support is None else int(support.shape[0]),
        }


def load_heads(directory: HeadsDirectory, target: Target) -> list[PlaneHead]:
    """Loads all finished drafters, that with the full head first.

    Raises:
        ValueError: if none has the full head, with which all others are compared, or one does not fit the target.
        FileNotFoundError: if an export is gone.
    """
    heads = []
    for entry in sorted(directory.heads, key=lambda entry: entry.name != FULL):
        system = load_system(entry.name, entry.directory.export, target)
        own = {name: value for name, value in system.params.items() if name != "embed_tokens"}
        heads.append(PlaneHead(entry.name, entry.seed, entry.made, entry.base, system, params_digest(own)))
    with_full = {head.seed for head in heads if head.name == FULL}
    lacking = sorted({head.seed for head in heads} - with_full)
    if not heads or lacking:
        what = f"of seed {lacking[0]}" if lacking else "of any seed"
        raise ValueError(f"{directory.path} holds no drafter with the full head {what}; let `train.heads` end first")
    return heads


def first_seed(heads: Sequence[PlaneHead]) -> list[PlaneHead]:
    """One drafter of each head: that of the first seed."""
    chosen: dict[str, PlaneHead] = {}
    for head in heads:
        chosen.setdefault(head.name, head)
    return list(chosen.values())
