"""Examples to fixed-shape rows, and the order in which training reads them.

Rows are made once; every epoch visits all of them in a new order that depends on seed and epoch alone. The
rows of step n are a pure function of n, so a resumed run needs no saved position.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from train.artifacts import RunError

# Below this share of supervised tokens something is wrong with template or mask, not with the data.
_LEAST_SUPERVISED = 0.01


@dataclasses.dataclass(frozen=True)
class Example:
    """One token sequence with its supervised places.

    Attributes:
        id: name of the conversation or text.
        tokens: token ids, [T] int32.
        loss_mask: whether a token counts in the loss, [T] bool.
    """

    id: str
    tokens: np.ndarray
    loss_mask: np.ndarray

    def __post_init__(self) -> None:
        if self.tokens.shape != self.loss_mask.shape or self.tokens.ndim != 1:
            raise ValueError(
                f"`tokens` and `loss_mask` of {self.id} must be vectors of one length; "
                f"got {self.tokens.shape} and {self.loss_mask.shape}"
            )


@dataclasses.dataclass(frozen=True)
class Rows:
    """Fixed-shape training rows.

    Attributes:
        tokens: [R, T] int32, padded at the end.
        loss_mask: [R, T] bool; false on padding.
        segment_ids: [R, T] int32; 0 is padding, the sequences of a row are 1, 2, ...
        example_ids: for each row the ids of its sequences.
        num_cut: sequences that were longer than a row.
        num_dropped: sequences without a supervised token.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    segment_ids: np.ndarray
    example_ids: tuple[tuple[str, ...], ...]
    num_cut: int = 0
    num_dropped: int = 0

    @property
    def num_rows(self) -> int:
        """Number of rows R."""
        return self.tokens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(np.count_nonzero(self.segment_ids))

    @property
    def num_supervised(self) -> int:
        """Tokens that count in the loss."""
        return int(np.count_nonzero(self.loss_mask))

    def summary(self) -> str:
        """One line for the user."""
        waste = 1.0 - self.num_tokens / self.tokens.size
        text = (
            f"{self.num_rows} rows of {self.tokens.shape[1]} tokens from {sum(map(len, self.example_ids))} sequences: "
            f"{self.num_tokens} tokens, {self.num_supervised} supervised, {waste:.1%} padding"
        )
        if self.num_cut:
            text += f", {self.num_cut} cut at the row's length"
        if self.num_dropped:
            text += f", {self.num_dropped} dropped without a supervised token"
        return text


def make_rows(examples: Sequence[Example], row_length: int, *, packing: bool) -> Rows:
    """Puts sequences into rows of one length.

    With packing, the longest sequence goes first and each one goes to the fullest row that still holds it.

    Args:
        examples: sequences; longer ones are cut.
        row_length: tokens of a row, T.
        packing: whether a row may hold several sequences.

    Returns:
        The rows.

    Raises:
        RunError: if nothing is supervised, or less than one token in a hundred.
    """
    cut = [Example(e.id, e.tokens[:row_length], e.loss_mask[:row_length]) for e in examples]
    kept = [e for e in cut if e.loss_mask.any()]
    if not kept:
        raise RunError(
            f"no training example has a supervised token within {row_length} tokens; got {len(examples)} examples "
            "(check `--batch_length` and the dataset's assistant turns)"
        )
    lengths = [len(e.tokens) for e in kept]
    share = sum(int(e.loss_mask.sum()) for e in kept) / sum(lengths)
    if share < _LEAST_SUPERVISED:
        raise RunError(f"at least 1% of all tokens must be supervised; got {share:.2%}: the chat template does not fit")
    bins = _best_fit(lengths, row_length) if packing else [[index] for index in range(len(kept))]
    tokens = np.zeros((len(bins), row_length), np.int32)
    loss_mask = np.zeros((len(bins), row_length), bool)
    segment_ids = np.zeros((len(bins), row_length), np.int32)
    for row, members in enumerate(bins):
        start = 0
        for segment, index in enumerate(members, start=1):
            end = start + lengths[index]
            tokens[row, start:end] = kept[index].tokens
            loss_mask[row, start:end] = kept[index].loss_mask
            segment_ids[row, start:end] = segment
            start = end
    return Rows(
        tokens=tokens,
        loss_mask=loss_mask,
        segment_ids=segment_ids,
        example_ids=tuple(tuple(kept[index].id for index in members) for members in bins),
        num_cut=sum(len(e.tokens) > row_length for e in examples),
        num_dropped=len(cut) - len(kept),
    )


class SampleOrder:
    """Which rows each step reads: epochs of seeded permutations, one after the other without a seam."""

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        """Fixes the order.

        Args:
            num_rows: rows in all; may be fewer than a batch.
            batch_size: rows of a step.
            seed: decides every permutation.
        """
        if num_rows < 1:
            raise ValueError(f"`num_rows` must be at least 1; got {num_rows}")
        self._num_rows, self._batch_size, self._seed = num_rows, batch_size, seed
        self._permutation = functools.lru_cache(maxsize=2)(self._draw)

    def rows(self, step: int) -> np.ndarray:
        """Row indices of one step, [batch_size]; steps count from 0."""
        first = step * self._batch_size
        places = range(first, first + self._batch_size)
        return np.array([self._permutation(place // self._num_rows)[place % self._num_rows] for place in places])

    def epoch(self, step: int) -> float:
        """Epochs that are behind the first row of a step."""
        return step * self._batch_size / self._num_rows

    def _draw(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self._seed, epoch]).permutation(self._num_rows)


def load_text_examples(
    path: str, encode: Callable[[str], list[int]], row_length: int, *, max_rows: int, flag: str = "text"
) -> list[Example]:
    """Plain text as fully supervised examples of one row each.

    Args:
        path: a .txt file (documents with blank lines between) or a .jsonl file with a `text` field.
        encode: the target tokenizer's.
        row_length: tokens of an example.
        max_rows: examples at most; 0 takes all.
        flag: the flag that names the file, for messages.

    Returns:
        Examples of at most `row_length` tokens; all tokens are supervised.

    Raises:
        RunError: naming flag, file and line, if the file cannot be used.
    """
    examples: list[Example] = []
    for number, document in enumerate(_read_documents(Path(path), flag)):
        ids = np.asarray(encode(document), np.int32)
        for part, start in enumerate(range(0, len(ids), row_length)):
            piece = ids[start : start + row_length]
            examples.append(Example(f"text-{number}-{part}", piece, np.ones(len(piece), bool)))
            if max_rows and len(examples) == max_rows:
                return examples
    if not examples:
        raise RunError(f"`--{flag}` must hold text; {path} is empty")
    return examples


def _read_documents(path: Path, flag: str) -> list[str]:
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise RunError(f"`--{flag}` must be a readable file; {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise RunError(f"`--{flag}` must be UTF-8; {path} is not at byte {error.start}") from None
    if path.suffix != ".jsonl":
        return [part for part in content.split("\n\n") if part.strip()]
    documents = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
        except (json.JSONDecodeError, KeyError, TypeError):
            text = None
        if not isinstance(text, str):
            raise RunError(
                f"a line of `--{flag}` must be an object with a `text` string; got another ({path}, line {number})"
            )
        documents.append(text)
    return documents


def _best_fit(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    rows: list[list[int]] = []
    spaces: list[int] = []
    by_space: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        place = bisect.bisect_left(spaces, length)
        if place == len(spaces):
            row, space = len(rows), row_length
            rows.append([])
        else:
            space = spaces[place]
            row = by_space[space].pop()
            if not by_space[space]:
                del by_space[space]
                spaces.pop(place)
        rows[row].append(index)
        left = space - length
        if left:
            if left not in by_space:
                by_space[left] = []
                bisect.insort(spaces, left)
            by_space[left].append(row)
    return rows
