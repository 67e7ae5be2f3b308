"""Prompts: those that come with the package, and files of questions."""

from __future__ import annotations

import collections
import dataclasses
import importlib.resources
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from specjax.text.json_records import read_json_records

SPLITS = ("train", "held_out")
KINDS = ("chat", "code", "maths", "lists", "rewriting")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a user says, turn by turn.

    Attributes:
        id: unique in its set.
        kind: what it is about, for figures by kind.
        turns: the user's texts, at least one; each but the first follows the answer to the one before.
    """

    id: str
    kind: str
    turns: tuple[str, ...]

    def messages(self, answers: Sequence[str] = ()) -> list[dict[str, str]]:
        """The conversation after some answers: it ends with the user's next turn, if there is one left.

        Raises:
            ValueError: if there are more answers than turns.
        """
        if len(answers) > len(self.turns):
            raise ValueError(
                f"`answers` must be at most the {len(self.turns)} turns of {self.id!r}; got {len(answers)}"
            )
        messages = []
        for index, turn in enumerate(self.turns[: len(answers) + 1]):
            messages.append({"role": "user", "content": turn})
            if index < len(answers):
                messages.append({"role": "assistant", "content": answers[index]})
        return messages


def load_prompts(split: str, kinds: tuple[str, ...] | None = None) -> list[Prompt]:
    """The prompts that come with the package, in a fixed order.

    Args:
        split: "train" or "held_out".
        kinds: those wanted ("chat", "code", "maths", "lists", "rewriting"); None is all.

    Raises:
        ValueError: if the split or a kind is unknown, or the file is damaged.
    """
    if split not in SPLITS:
        raise ValueError(f"`split` must be one of {SPLITS}; got {split!r}")
    unknown = sorted(set(kinds or ()) - set(KINDS))
    if unknown or kinds == ():
        raise ValueError(f"`kinds` must be among {KINDS}; got {unknown or kinds}")
    resource = importlib.resources.files("specjax.text") / "data" / f"{split}_prompts.jsonl"
    with importlib.resources.as_file(resource) as path:
        prompts = load_questions(path)
    for prompt in prompts:
        if prompt.kind not in KINDS:
            raise ValueError(
                f"{split}_prompts.jsonl: `kind` of {prompt.id!r} must be among {KINDS}; got {prompt.kind!r}"
            )
    return [prompt for prompt in prompts if kinds is None or prompt.kind in kinds]


def load_questions(path: str | os.PathLike[str]) -> list[Prompt]:
    """Reads questions, one JSON object a line: `turns`, and where they exist an id and a kind.

    This is the form of MT-Bench and Spec-Bench (`question_id`, `category`, `turns`) as well as our own (`id`,
    `kind`, `turns`). A question without id is called by its line, one without kind by the file's name.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: at the first line that is no question, with file and line; if there is none at all.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    lines: dict[str, int] = {}
    for record in read_json_records(path):
        place = f"{path}:{record.line}"
        if record.problem is not None:
            raise ValueError(f"{place}: {record.problem}")
        prompt = _prompt(record.value, place, default_id=str(record.line), default_kind=path.stem)
        if prompt.id in lines:
            raise ValueError(f"{place}: id {prompt.id!r} was already used on line {lines[prompt.id]}")
        lines[prompt.id] = record.line
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path}: no questions in this file")
    return prompts


def count_turns(prompts: Iterable[Prompt]) -> int:
    """Number of user turns of all prompts: two for each of MT-Bench's 80 conversations."""
    return sum(len(prompt.turns) for prompt in prompts)


def normalise(text: str) -> str:
    """Text without what does not make two prompts different: case, punctuation, spacing and letter forms."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return " ".join(re.findall(r"\w+", folded))


def repeated_first_turns(prompts: Iterable[Prompt]) -> dict[str, list[str]]:
    """First turns that several prompts share up to `normalise`, each with the ids of its prompts."""
    ids = collections.defaultdict(list)
    for prompt in prompts:
        ids[normalise(prompt.turns[0])].append(prompt.id)
    return {text: found for text, found in ids.items() if len(found) > 1}


def _prompt(value: Any, place: str, *, default_id: str, default_kind: str) -> Prompt:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: a question must be a JSON object; got {value!r:.40}")
    turns = value.get("turns")
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{place}: `turns` must be a list of at least one text; got {turns!r:.40}")
    for index, turn in enumerate(turns):
        if not isinstance(turn, str) or not turn.strip():
            raise ValueError(f"{place}: `turns[{index}]` must be a text that is not blank; got {turn!r:.40}")
    name = value.get("question_id", value.get("id", default_id))
    if isinstance(name, bool) or not isinstance(name, str | int) or name == "":
        raise ValueError(f"{place}: the id must be a text or an integer; got {name!r:.40}")
    kind = value.get("category", value.get("kind")) or default_kind
    if not isinstance(kind, str):
        raise ValueError(f"{place}: the kind must be a text; got {kind!r:.40}")
    return Prompt(str(name), kind, tuple(turns))
