"""Conversations at the door: every record is checked, and what is left out is counted and named."""

from __future__ import annotations

import collections
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from specjax.text.conversation_record import RecordProblem, conversation_of
from specjax.text.json_records import read_json_records

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclasses.dataclass(frozen=True)
class SkippedRecord:
    """A record that was left out.

    Attributes:
        place: file and line, or data set and row.
        reason: short and of few kinds.
        detail: what was found.
    """

    place: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.place}: {self.reason}" + (f" ({self.detail})" if self.detail else "")


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What became of the records of a source.

    Attributes:
        source: where they came from.
        num_records: records seen.
        skipped: those left out, in order.
    """

    source: str
    num_records: int
    skipped: tuple[SkippedRecord, ...]

    @property
    def num_kept(self) -> int:
        """Number of records that became conversations."""
        return self.num_records - len(self.skipped)

    @property
    def counts(self) -> dict[str, int]:
        """Number of records left out, by reason, most frequent first."""
        return dict(collections.Counter(record.reason for record in self.skipped).most_common())

    def summary(self) -> str:
        """One line: counts, and the reasons where records were left out."""
        line = f"{self.source}: {self.num_kept} of {self.num_records} records kept"
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.counts.items())
        return f"{line}; left out: {reasons}; first: {self.skipped[0]}" if self.skipped else line


@dataclasses.dataclass(frozen=True)
class LoadedConversations:
    """The conversations of a source.

    Attributes:
        conversations: messages with "role" ("system", "user", "assistant", "tool") and "content".
        indices: for each conversation the number of its record in the source, from 0, counting those left
            out: it stays the same when another record is repaired or dropped by the checks.
        report: what was left out and why.
    """

    conversations: list[list[dict[str, str]]]
    indices: list[int]
    report: LoadReport


def load_conversations(
    source: str | os.PathLike[str], *, strict: bool = False, split: str = "train"
) -> LoadedConversations:
    """Reads and checks conversations.

    Args:
        source: a `.json` or `.jsonl` file, a folder written by `datasets` (`save_to_disk`), or the name of a
            data set on the hub.
        strict: whether the first bad record is an error instead of being left out.
        split: of a hub data set, or of a folder with several.

    Raises:
        FileNotFoundError: if the file or folder does not exist.
        ValueError: if no record is left; in strict mode for the first bad record; if the data set or split
            cannot be loaded. Messages name file and line.
    """
    source = os.fspath(source)
    conversations: list[list[dict[str, str]]] = []
    indices: list[int] = []
    skipped: list[SkippedRecord] = []
    num_records = 0
    for place, record, problem in _records(source, split):
        try:
            if problem is not None:
                reason, _, detail = problem.partition(": ")
                raise RecordProblem(reason, detail)
            conversations.append(conversation_of(record))
            indices.append(num_records)
        except RecordProblem as error:
            skipped.append(SkippedRecord(place, error.reason, error.detail))
            if strict:
                raise ValueError(str(skipped[-1])) from None
        num_records += 1
    report = LoadReport(source, num_records, tuple(skipped))
    if not conversations:
        raise ValueError(report.summary() if num_records else f"{source}: no records in this data set")
    return LoadedConversations(conversations, indices, report)


def _records(source: str, split: str) -> Iterator[tuple[str, Any, str | None]]:
    """Place, value and problem of each record of any source."""
    path = Path(source)
    if path.is_dir():
        yield from _rows(source, _from_folder(path, split))
    elif path.is_file() or path.suffix.lower() in (".json", ".jsonl"):
        for record in read_json_records(path):
            yield f"{source}:{record.line}", record.value, record.problem
    elif _HUB_NAME.fullmatch(source):
        yield from _rows(f"{source}[{split}]", _from_hub(source, split))
    else:
        raise FileNotFoundError(f"{source}: no such file or folder, and no name of a hub data set")


def _rows(name: str, dataset: Any) -> Iterator[tuple[str, Any, str | None]]:
    for index, row in enumerate(dataset):
        yield f"{name}:row {index}", row, None


def _from_folder(path: Path, split: str) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    # Broken Arrow files raise errors of several libraries.
    except Exception as error:
        raise ValueError(f"{path}: not a data set saved by `datasets` ({_first_line(error)})") from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise ValueError(f"`split` must be one of {sorted(map(str, loaded))} in {path}; got {split!r}")
    return loaded[split]


def _from_hub(name: str, split: str) -> Any:
    import datasets

    try:
        return datasets.load_dataset(name, split=split)
    # Missing names, refused access, no network and unknown splits raise errors of several libraries.
    except Exception as error:
        raise ValueError(f"data set {name!r}, split {split!r} cannot be loaded ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
