"""What flags need to know of a kind of head, and the values of its own options."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class HeadFacts:
    """What flags need to know of a kind of head; see `specjax.heads.Head`."""

    uses_rank: bool = False
    uses_loss: bool = True
    needs_base: bool = False
    counts: str = ""


def head_facts(kind: str) -> HeadFacts:
    """Facts of a kind of head.

    Raises:
        ValueError: if there is no such kind.
    """
    # The two usual heads are known here, so that flags are checked before the numerical libraries are loaded.
    if kind in ("low_rank", "full"):
        return HeadFacts(uses_rank=kind == "low_rank")
    from specjax.heads import get_head, head_kinds

    if kind not in head_kinds():
        raise ValueError(f"`--head` must be one of {', '.join(head_kinds())}; got {kind!r}")
    head = get_head(kind)
    return HeadFacts(**{field.name: getattr(head, field.name) for field in dataclasses.fields(HeadFacts)})


def parse_head_options(kind: str, text: str) -> dict[str, Any]:
    """Values of `--head_options` by name.

    Raises:
        ValueError: naming the flag, if the head has no such option or a value is wrong.
    """
    if not text:
        return {}
    from specjax.heads import get_head, parse_options
    from specjax.heads.options import check_option

    options = get_head(kind).options
    known = {option.name: option for option in options}
    try:
        return {name: check_option(kind, known, name, value) for name, value in parse_options(text, options).items()}
    except ValueError as error:
        raise ValueError(f"`--head_options` must fit the head: {error}") from None
