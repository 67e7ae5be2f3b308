"""Shapes of real models that tests, compilation checks and benchmarks share."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class VerifierShape:
    """The laws of one verification.

    Attributes:
        name: model and numbers, for tables.
        batch: requests.
        num_drafts: K, drafted chains of each request.
        draft_length: L, drafted tokens of each chain.
        vocab_size: V.
        dtype: "bfloat16" (logits) or "float32" (laws).
    """

    name: str
    batch: int
    num_drafts: int
    draft_length: int
    vocab_size: int
    dtype: str

    @property
    def num_target_rows(self) -> int:
        """Rows of the target: one after every drafted token, and one before the first of each chain."""
        return self.batch * self.num_drafts * (self.draft_length + 1)

    @property
    def num_draft_rows(self) -> int:
        """Rows of the draft: one before every drafted token."""
        return self.batch * self.num_drafts * self.draft_length

    @property
    def row_bytes(self) -> int:
        """Bytes of one law."""
        return self.vocab_size * (2 if self.dtype == "bfloat16" else 4)

    @property
    def statistics_bytes(self) -> int:
        """Bytes that pass 1 cannot avoid: every row of both laws once."""
        return (self.num_target_rows + self.num_draft_rows) * self.row_bytes

    @property
    def residual_bytes(self) -> int:
        """Bytes that pass 2 cannot avoid: every draft row once, and the target's row at the same place."""
        return 2 * self.num_draft_rows * self.row_bytes


VOCAB_SIZES = {"llama-3.1-8b": 128256, "qwen3-30b-a3b": 151936, "gpt-oss-20b": 201088}

NAMED_SHAPES: dict[str, VerifierShape] = {
    shape.name: shape
    for shape in (
        *(
            VerifierShape(f"{model} batch {batch}, 1 x 4", batch, 1, 4, vocab_size, "float32")
            for model, vocab_size in VOCAB_SIZES.items()
            for batch in (1, 64)
        ),
        VerifierShape("llama-3.1-8b batch 1, 8 x 8", 1, 8, 8, 128256, "bfloat16"),
        VerifierShape("llama-3.1-8b batch 1, 8 x 8, float32", 1, 8, 8, 128256, "float32"),
    )
}


def get_shape(name: str) -> VerifierShape:
    """A named shape.

    Raises:
        ValueError: if there is none of that name; the message lists the names.
    """
    if name not in NAMED_SHAPES:
        raise ValueError(f"`shape` must be one of {', '.join(NAMED_SHAPES)}; got {name!r}")
    return NAMED_SHAPES[name]
