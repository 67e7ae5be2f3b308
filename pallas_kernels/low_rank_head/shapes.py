"""Shapes of real models' heads, for tests, static cost reports and benchmarks alike."""

from __future__ import annotations

import dataclasses

BATCH_SIZES = (1, 8, 64)


@dataclasses.dataclass(frozen=True)
class HeadShape:
    """A drafter's head.

    Attributes:
        name: of the target and the head.
        hidden_size: d.
        rank: r; None is the full head.
        vocab_size: V.
    """

    name: str
    hidden_size: int
    rank: int | None
    vocab_size: int

    @property
    def inner_size(self) -> int:
        """Width of a token's row."""
        return self.hidden_size if self.rank is None else self.rank

    def weight_bytes(self, itemsize: int = 2) -> int:
        """Bytes of weights that one call has to read."""
        down = 0 if self.rank is None else self.hidden_size * self.rank
        return (down + self.vocab_size * self.inner_size) * itemsize

    @property
    def full(self) -> HeadShape:
        """The full head of the same target."""
        return HeadShape(self.name.split("/")[0] + "/full", self.hidden_size, None, self.vocab_size)


# SlimSpec's three targets at its recommended rank, an eighth of the width (Plaksin et al., arXiv 2605.10453).
LLAMA_8B = HeadShape("llama-3.1-8b/d8", 4096, 512, 128256)
QWEN_30B = HeadShape("qwen3-30b-a3b/d8", 2048, 256, 151936)
GPT_OSS_20B = HeadShape("gpt-oss-20b/d8", 2880, 360, 201088)

LOW_RANK = {shape.name: shape for shape in (LLAMA_8B, QWEN_30B, GPT_OSS_20B)}
FULL = {shape.full.name: shape.full for shape in LOW_RANK.values()}
SHAPES = LOW_RANK | FULL
