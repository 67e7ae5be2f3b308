"""Questions to measure on: conversations of user turns, from a file in MT-Bench's form or from the shipped prompts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Question:
    """One conversation; each user turn is asked after the answers to the turns before it.

    Attributes:
        id: identifier, unique within its set.
        category: kind of question, for the tables by kind.
        turns: the user's turns, at least one.
    """

    id: str | int
    category: str
    turns: tuple[str, ...]


def load_questions(path: str | pathlib.Path) -> list[Question]:
    """Reads questions in the form of MT-Bench and Spec-Bench, one JSON object a line.

    Fields: `question_id` (or `id`; the line number if both are missing), `category` (or `kind`; the file's name if
    missing or empty) and `turns`, a list of texts. Other fields are ignored, blank lines are skipped.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: for a line that does not have this form (with file and line), and for a file without questions.
    """
    path = pathlib.Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no questions file at {path}")
    questions: list[Question] = []
    seen: dict[str | int, int] = {}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError:
                raise ValueError(f"{where}: not UTF-8 text") from None
            if not line:
                continue
            question = _parse(line, where, number, path.stem)
            if question.id in seen:
                raise ValueError(f"{where}: `question_id` {question.id!r} was used in line {seen[question.id]}")
            seen[question.id] = number
            questions.append(question)
    if not questions:
        raise ValueError(f"{path}: no questions in this file")
    return questions


def _parse(line: str, where: str, number: int, default_category: str) -> Question:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not JSON: {error.msg}") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where}: must be a JSON object; got {type(row).__name__}")
    turns = row.get("turns")
    if not isinstance(turns, list) or not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise ValueError(f"{where}: `turns` must be a list of at least one non-empty text")
    identifier = row.get("question_id", row.get("id", number))
    if not isinstance(identifier, str | int) or isinstance(identifier, bool):
        raise ValueError(f"{where}: `question_id` must be a text or an integer; got {identifier!r}")
    category = row.get("category") or row.get("kind") or default_category
    if not isinstance(category, str):
        raise ValueError(f"{where}: `category` must be a text; got {category!r}")
    return Question(identifier, category, tuple(turns))


def spread(questions: Sequence[Question], limit: int | None) -> list[Question]:
    """At most `limit` questions, taken in turn from each category so that no kind is missing.

    Raises:
        ValueError: if `limit` is below 1.
    """
    if limit is None:
        return list(questions)
    if limit < 1:
        raise ValueError(f"the number of questions must be at least 1; got {limit}")
    queues: dict[str, list[Question]] = {}
    for question in questions:
        queues.setdefault(question.category, []).append(question)
    chosen: list[Question] = []
    while len(chosen) < limit and any(queues.values()):
        for queue in queues.values():
            if queue and len(chosen) < limit:
                chosen.append(queue.pop(0))
    return chosen
