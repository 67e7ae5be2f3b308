"""What one call of a draft head moves and computes, for every published kind, from its sizes alone.

With d the drafter's width, V the vocabulary, r a rank, k rows, C candidates and G groups of which g are used, the
weights that one row of the batch reads are

| kind | weights | paper |
|---|---|---|
| full | V d | |
| low_rank | r (d + V) | SlimSpec, arXiv 2605.10453 |
| fr_spec, vocab_trim, bcl | k d | arXiv 2502.14856, 2506.22694, 2603.05210 |
| coral | G d + (g / G) V d | arXiv 2502.16880, section on the head router |
| dyna_spec | w (d + G) + (g / G) V d, w the classifier's width | arXiv 2510.13847 |
| spec_vocab, low_rank_preview | r (d + V) + C d | arXiv 2602.13836; EAGLE-4 |

Rows of a batch share the dense matrices; the groups and candidates that they choose are counted as a union.
CORAL's and DynaSpec's group counts were not published where we could read them: their defaults here are ours.

The kernels are counted as an engine that calls one library routine for each operation runs them (see `_PRODUCT` and
what follows); a fused kernel needs fewer. `torch.topk` over a long row of float32 is 19 kernels: a fill, four radix
passes of three, a count, two scans of two and a gather.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from specjax.cost import full_head_params, low_rank_head_params, preview_head_params
from specjax.heads.base import DEFAULT_RANK_DIVISOR
from specjax.roofline.work import Number, Work

STATIC_KINDS = ("fr_spec", "vocab_trim", "bcl")
ROUTED_KINDS = ("coral", "dyna_spec")
PREVIEW_KINDS = ("spec_vocab", "low_rank_preview")
HEAD_KINDS = ("full", "low_rank", *STATIC_KINDS, *ROUTED_KINDS, *PREVIEW_KINDS)

# A product over few rows splits its inner dimension over the device: a second kernel adds the parts.
_PRODUCT, _SPLIT_SUM, _TO_FLOAT32, _ARGMAX, _COPY_ID = 1, 1, 1, 2, 1
_MAP_ID = 1
_TOP_K = 19
# A top-k as one cooperative kernel took 33 microseconds where torch's took 79 (EAGLE-4's notes: one row of 248,320).
_FUSED_TOP_K = 8
_GATHER_PRODUCT = 1
# A top-g of a few dozen groups fits one block; the rows' numbers are then laid out side by side.
_TOP_GROUPS, _LIST_ROWS, _ACTIVATION = 1, 1, 1
_HEAP_VALUES = 128

BCL_ROWS = 13264
CORAL_GROUPS, CORAL_ACTIVE = 64, 16
DYNA_SPEC_CLUSTERS, DYNA_SPEC_ACTIVE = 128, 27
SPEC_VOCAB_CANDIDATES = 2048
PREVIEW_RANK, PREVIEW_CANDIDATES = 128, 128


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """Sizes of a draft head.

    Attributes:
        kind: one of `HEAD_KINDS`.
        hidden_size: d.
        vocab_size: V.
        rank: r of low_rank, spec_vocab and low_rank_preview.
        num_rows: k of the static vocabularies.
        num_candidates: C of the previews.
        num_groups: G of the routed heads.
        num_active_groups: g of the routed heads.
        router_width: w of dyna_spec's classifier.

    Raises:
        ValueError: if a size that the kind needs is missing or out of range, or one is given that it has not.
    """

    kind: str
    hidden_size: int
    vocab_size: int
    rank: int | None = None
    num_rows: int | None = None
    num_candidates: int | None = None
    num_groups: int | None = None
    num_active_groups: int | None = None
    router_width: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in HEAD_KINDS:
            raise ValueError(f"`kind` must be one of {', '.join(HEAD_KINDS)}; got {self.kind!r}")
        limits = {"hidden_size": None, "vocab_size": None} | self._limits()
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "kind":
                continue
            if name not in limits:
                if value is not None:
                    raise ValueError(f"`{name}` must be None for a {self.kind} head; got {value!r}")
                continue
            most = limits[name]
            if isinstance(value, bool) or not isinstance(value, int) or value < 1 or (most and value > most):
                rule = f"in [1, {most}]" if most else "a positive integer"
                raise ValueError(f"`{name}` of a {self.kind} head must be {rule}; got {value!r}")

    def _limits(self) -> dict[str, int | None]:
        """Sizes that the kind has, with their largest values."""
        if self.kind == "full":
            return {}
        if self.kind == "low_rank":
            return {"rank": self.hidden_size}
        if self.kind in STATIC_KINDS:
            return {"num_rows": self.vocab_size}
        if self.kind in PREVIEW_KINDS:
            return {"rank": self.hidden_size, "num_candidates": self.vocab_size}
        limits: dict[str, int | None] = {"num_groups": self.vocab_size, "num_active_groups": self.num_groups}
        return limits | ({"router_width": None} if self.kind == "dyna_spec" else {})

    @property
    def label(self) -> str:
        """Kind and sizes, for tables."""
        if self.rank and self.num_candidates:
            return f"{self.kind} r={self.rank} C={self.num_candidates}"
        if self.rank:
            return f"{self.kind} r={self.rank}"
        if self.num_rows:
            return f"{self.kind} k={self.num_rows}"
        if self.num_groups:
            return f"{self.kind} {self.num_active_groups}/{self.num_groups}"
        return self.kind

    @property
    def support(self) -> int:
        """Tokens with a logit, for one row."""
        if self.num_groups and self.num_active_groups:
            return -(-self.vocab_size * self.num_active_groups // self.num_groups)
        return self.num_rows or self.num_candidates or self.vocab_size


def expected_union(total: Number, chosen: Number, draws: Number) -> float:
    """Expected number of distinct items when each of `draws` rows chooses `chosen` of `total` at random.

        total * (1 - (1 - chosen / total)^draws)

    Real choices of neighbouring rows are alike, so this is from above.
    """
    return total * (1.0 - (1.0 - chosen / total) ** draws)


def head_params(head: HeadShape, rows: int = 1) -> Number:
    """Weights that one call reads for `rows` rows; routed groups and candidates as their expected union."""
    width, vocab = head.hidden_size, head.vocab_size
    if head.kind == "full":
        return full_head_params(width, vocab)
    if head.kind == "low_rank":
        return low_rank_head_params(width, vocab, head.rank or 0)
    if head.kind in STATIC_KINDS:
        return (head.num_rows or 0) * width
    if head.kind in PREVIEW_KINDS:
        candidates = head.num_candidates or 0
        if rows == 1:
            return preview_head_params(width, vocab, head.rank or 0, candidates)
        fetched = expected_union(vocab, candidates, rows)
        return low_rank_head_params(width, vocab, head.rank or 0) + fetched * width
    groups, active = head.num_groups or 1, head.num_active_groups or 1
    used = active if rows == 1 else expected_union(groups, active, rows)
    return _router_params(head) + used / groups * vocab * width


def _router_params(head: HeadShape) -> int:
    groups = head.num_groups or 1
    if head.kind == "coral":
        return groups * head.hidden_size
    return (head.router_width or 0) * (head.hidden_size + groups)


def head_kernels(head: HeadShape) -> int:
    """Kernels of one greedy call, from the hidden state to the token's id."""
    scores = _PRODUCT + _SPLIT_SUM + _TO_FLOAT32
    choice = _ARGMAX + _COPY_ID
    if head.kind == "full":
        return scores + choice
    if head.kind == "low_rank":
        return _PRODUCT + scores + choice
    if head.kind in STATIC_KINDS:
        return scores + _ARGMAX + _MAP_ID + _COPY_ID
    if head.kind in PREVIEW_KINDS:
        top = _TOP_K if head.kind == "spec_vocab" else _FUSED_TOP_K
        # The gathered product writes float32 itself, and the top-k reads what the preview wrote.
        return 2 * _PRODUCT + _SPLIT_SUM + top + _GATHER_PRODUCT + _ARGMAX + _MAP_ID
    router = _PRODUCT if head.kind == "coral" else 2 * _PRODUCT + _ACTIVATION
    return router + _TOP_GROUPS + _LIST_ROWS + _GATHER_PRODUCT + _SPLIT_SUM + _ARGMAX + _MAP_ID + _COPY_ID


def head_work(head: HeadShape, *, rows: int = 1, weight_bytes: Number = 2) -> Work:
    """One greedy call of a head over `rows` rows of a batch.

    Args:
        head: its sizes.
        rows: rows of the batch.
        weight_bytes: bytes of one weight.

    Returns:
        Weights; logits written once as computed and read twice (converted, then searched); FLOPs of the matrices;
        kernels; values that are searched.
    """
    width, vocab = head.hidden_size, head.vocab_size
    if head.kind in PREVIEW_KINDS:
        rank, candidates = head.rank or 0, head.num_candidates or 0
        multiply_adds = preview_head_params(width, vocab, rank, candidates)
        logits, searched = vocab + candidates, vocab + (_HEAP_VALUES + 1) * candidates
    elif head.kind in ROUTED_KINDS:
        multiply_adds = _router_params(head) + head.support * width
        logits, searched = head.support, head.support
    else:
        multiply_adds = head_params(head)
        logits, searched = head.support, head.support
    # Float32 logits: written, read and written by the conversion, read by the search.
    activations = rows * (width * weight_bytes + logits * (2 * weight_bytes + 2 * 4))
    return Work(
        weight_bytes=head_params(head, rows) * weight_bytes,
        activation_bytes=activations,
        flops=2 * rows * multiply_adds,
        kernels=head_kernels(head),
        selected_values=rows * searched,
    )


def rank_step(hidden_size: int) -> int:
    """Ranks are multiples of this: whole tiles of a GPU's products for wide drafters, 8 for narrow ones."""
    return 64 if hidden_size >= 2048 else 8


def round_rank(rank: Number, hidden_size: int) -> int:
    """A rank rounded up to a whole number of tiles, at most d."""
    step = rank_step(hidden_size)
    return min(hidden_size, max(step, int(-(-rank // step)) * step))


def default_ranks(hidden_size: int) -> tuple[int, ...]:
    """d/2, d/4, d/8, d/16 and d/32, rounded up to whole tiles."""
    ranks = {round_rank(hidden_size / divisor, hidden_size) for divisor in (2, 4, 8, 16, 32)}
    return tuple(sorted(ranks, reverse=True))


def head_family(hidden_size: int, vocab_size: int, ranks: Sequence[int] | None = None) -> list[HeadShape]:
    """Every published head at its published or usual sizes, cut to the vocabulary.

    Args:
        hidden_size: d of the drafter.
        vocab_size: V.
        ranks: of the low-rank heads; None is d/2 down to d/32.

    Raises:
        ValueError: if a rank is not in [1, d].
    """

    def shape(kind: str, **sizes: int) -> HeadShape:
        return HeadShape(kind, hidden_size, vocab_size, **sizes)

    eighth = round_rank(hidden_size / DEFAULT_RANK_DIVISOR, hidden_size)
    sizes = [size for size in (65536, 32768, 16384, 8192, 4096, 2048) if size < 0.6 * vocab_size][:3]
    heads = [shape("full")]
    heads += [shape("low_rank", rank=rank) for rank in (ranks or default_ranks(hidden_size))]
    heads += [shape("vocab_trim", num_rows=size) for size in sizes]
    heads += [shape("fr_spec", num_rows=size) for size in sizes[1:2]]
    if vocab_size >= 2 * BCL_ROWS:
        heads.append(shape("bcl", num_rows=BCL_ROWS))
    if vocab_size >= DYNA_SPEC_CLUSTERS:
        heads.append(shape("coral", num_groups=CORAL_GROUPS, num_active_groups=CORAL_ACTIVE))
        heads.append(
            shape(
                "dyna_spec",
                num_groups=DYNA_SPEC_CLUSTERS,
                num_active_groups=DYNA_SPEC_ACTIVE,
                router_width=eighth,
            )
        )
    heads.append(shape("spec_vocab", rank=eighth, num_candidates=max(1, min(SPEC_VOCAB_CANDIDATES, vocab_size // 8))))
    preview_rank = max(1, min(PREVIEW_RANK, hidden_size // DEFAULT_RANK_DIVISOR))
    preview_candidates = max(1, min(PREVIEW_CANDIDATES, vocab_size // 8))
    heads.append(shape("low_rank_preview", rank=preview_rank, num_candidates=preview_candidates))
    return heads
