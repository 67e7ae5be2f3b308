"""The target answers the training prompts: batched, seeded, one finished turn a line, resumable at any line.

`answers.jsonl` grows by complete lines, each on disk before the next is written. When the last turn is there,
the file is put into the order of the plan, so that it does not show where a run was cut or in which order the
answers ended. The manifest beside it names everything that the answers depend on.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from eval.files import write_json, write_text
from specjax.checkpoints.target import Target
from specjax.decoding.engine import Engine
from specjax.decoding.request import Request, SamplingParams
from specjax.json_files import read_object
from specjax.text.chat_template import encode_prompt
from train.answer_lines import Line, read_answer_lines
from train.artifacts import RunError
from train.json_fields import field_problem
from train.run_identity import differing_flags

Message = dict[str, str]
# What the manifest of a complete file says beside its key.
_TOTALS: dict[str, type] = {"num_turns": int, "num_answer_tokens": int, "finish_reasons": dict}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """User turns that the target answers one after the other.

    Attributes:
        id: unique name.
        split: "train" or "held_out".
        kind: kind of prompt, for reports.
        turns: what the user says.
        temperature: of the answers; 0 is greedy.
        top_p: of the answers.
        seed: of the answers; each turn derives its own.
        system: a system message before the first turn, or None for the template's own.
    """

    id: str
    split: str
    kind: str
    turns: tuple[str, ...]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    system: str | None = None

    def turn_seed(self, turn: int) -> int:
        """Seed of one turn, in [0, 2**32)."""
        digest = hashlib.sha256(f"{self.seed}/{self.id}/{turn}".encode()).digest()
        return int.from_bytes(digest[:4], "little")


@dataclasses.dataclass(frozen=True)
class AnswerLimits:
    """How long answers may be and how many are generated side by side.

    Attributes:
        max_answer_tokens: longest answer.
        max_total_tokens: longest conversation, prompt and answers together.
        num_slots: slots of the engine.
    """

    max_answer_tokens: int
    max_total_tokens: int
    num_slots: int


class AnswerFile:
    """The finished turns of a plan, by conversation and turn."""

    def __init__(self, path: Path, key: Mapping[str, Any]) -> None:
        """Opens the file, or starts it; a line that a kill cut in two is removed.

        Args:
            path: the JSON-lines file; the manifest lies beside it.
            key: what the answers depend on.

        Raises:
            RunError: if the file belongs to another key, or a line that is not the last one is damaged.
            ValueError: if the manifest is not an object in JSON.
        """
        self._path, self._manifest = path, path.with_name("manifest.json")
        self._key = dict(key)
        if self._manifest.exists():
            recorded = self._recorded_key()
            if recorded != self._key:
                raise RunError(
                    f"the answers in {path.parent} were made for other settings: "
                    f"{', '.join(differing_flags(self._key, recorded))}; choose another `--data_dir`"
                )
        elif path.exists():
            raise RunError(f"{path} has no manifest beside it, so nobody knows what made it; remove one or the other")
        else:
            write_json(self._manifest, {"key": self._key, "complete": False})
        lines, kept = read_answer_lines(path)
        self._lines: dict[tuple[str, int], Line] = {(line["id"], line["turn"]): line for line in lines}
        if path.exists() and path.stat().st_size != kept:
            os.truncate(path, kept)

    def __contains__(self, place: tuple[str, int]) -> bool:
        return place in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def complete(self) -> bool:
        """Whether the manifest calls the file complete and every turn that it counts is still there."""
        manifest = read_object(self._manifest)
        # Where a total is lost, `finish` counts again.
        sound = manifest.get("complete") is True and field_problem(manifest, _TOTALS) is None
        return sound and manifest["num_turns"] == len(self._lines)

    def get(self, conversation_id: str, turn: int) -> Line | None:
        """The finished turn, or None."""
        return self._lines.get((conversation_id, turn))

    def turns(self, conversation_id: str) -> list[Line]:
        """All finished turns of a conversation, in order."""
        found = []
        while (line := self.get(conversation_id, len(found))) is not None:
            found.append(line)
        return found

    def append(self, line: Line) -> None:
        """Adds a finished turn; it is on disk when this returns."""
        with open(self._path, "ab") as file:
            file.write((json.dumps(line, ensure_ascii=False) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())
        self._lines[line["id"], line["turn"]] = line

    def _recorded_key(self) -> dict[str, Any]:
        manifest = read_object(self._manifest)
        problem = field_problem(manifest, {"key": dict})
        if problem is not None:
            raise RunError(
                f"{self._manifest}: {problem}: the file is damaged, so nobody knows what made the answers beside it; "
                "restore it or choose another `--data_dir`"
            )
        return manifest["key"]

    def finish(self, conversations: Sequence[Conversation]) -> None:
        """Puts the file into the order of the plan and marks it complete."""
        ordered = [line for conversation in conversations for line in self.turns(conversation.id)]
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in ordered)
        write_text(self._path, text)
        reasons: dict[str, int] = {}
        for line in ordered:
            reason = line["finish_reason"].partition(":")[0]
            reasons[reason] = reasons.get(reason, 0) + 1
        write_json(
            self._manifest,
            {
                "key": self._key,
                "complete": True,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "num_conversations": len(conversations),
                "num_turns": len(ordered),
                "num_answer_tokens": sum(len(line["token_ids"]) for line in ordered),
                "finish_reasons": reasons,
            },
        )


def answers_key(target: Target, conversations: Sequence[Conversation], limits: AnswerLimits) -> dict[str, Any]:
    """What a file of answers depends on."""
    plan = json.dumps([dataclasses.asdict(conversation) for conversation in conversations], sort_keys=True)
    return {
        "target_digest": target.digest,
        "target_dtype": str(target.params["embed_tokens"].dtype),
        "tokenizer_digest": target.tokenizer.digest,
        "template_digest": target.chat_template.digest if target.chat_template else None,
        "prompts_and_sampling_digest": hashlib.sha256(plan.encode()).hexdigest(),
        **dataclasses.asdict(limits),
    }


def rounds_of(conversations: Sequence[Conversation]) -> list[list[tuple[Conversation, int]]]:
    """Turns that can be generated together: every turn comes in a later round than the one before it.

    Short conversations start in different rounds, so that all rounds keep the slots busy.
    """
    num_rounds = max(len(conversation.turns) for conversation in conversations)
    rounds: list[list[tuple[Conversation, int]]] = [[] for _ in range(num_rounds)]
    for index, conversation in enumerate(conversations):
        first = index % (num_rounds - len(conversation.turns) + 1)
        for turn in range(len(conversation.turns)):
            rounds[first + turn].append((conversation, turn))
    return rounds


def answer_conversations(
    target: Target,
    conversations: Sequence[Conversation],
    path: Path,
    limits: AnswerLimits,
    *,
    progress: bool,
    make_engine: Callable[..., Any] = Engine,
) -> AnswerFile:
    """Generates the answers that are missing in a file.

    Args:
        target: the model that answers.
        conversations: the plan.
        path: the file, `answers.jsonl`.
        limits: lengths and slots.
        progress: whether to show a progress bar.
        make_engine: the engine's constructor.

    Returns:
        The complete file.

    Raises:
        RunError: if the file belongs to other settings.
    """
    file = AnswerFile(path, answers_key(target, conversations, limits))
    if file.complete:
        return file
    engine = make_engine(target, num_slots=limits.num_slots, cache_length=limits.max_total_tokens, draft_length=0)
    total = sum(len(conversation.turns) for conversation in conversations)
    with tqdm(total=total, initial=len(file), desc="answers", unit="turn", disable=not progress) as bar:
        for turns in rounds_of(conversations):
            todo: dict[str, tuple[Conversation, int]] = {}
            requests: list[Request] = []
            for conversation, turn in turns:
                if (conversation.id, turn) in file:
                    continue
                prompt_ids = _prompt_ids(target, conversation, file.turns(conversation.id), turn)
                room = limits.max_total_tokens - len(prompt_ids or ())
                if prompt_ids is None or room < 1:
                    file.append(_skipped(conversation, turn, prompt_ids, limits))
                    bar.update()
                    continue
                name = f"{conversation.id}/{turn}"
                todo[name] = (conversation, turn)
                requests.append(_request(name, conversation, turn, prompt_ids, min(room, limits.max_answer_tokens)))
            for completion in _completions(engine, requests):
                conversation, turn = todo[completion.request_id]
                file.append(_line(conversation, turn, completion))
                bar.update()
    file.finish(conversations)
    return file


def _completions(engine: Any, requests: Iterable[Request]) -> Iterator[Any]:
    for event in engine.stream(requests):
        if event.completion is not None:
            yield event.completion


def _prompt_ids(target: Target, conversation: Conversation, before: Sequence[Line], turn: int) -> list[int] | None:
    if len(before) < turn or any(line["finish_reason"].startswith(("error", "skipped")) for line in before):
        return None
    messages: list[Message] = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for line in before[:turn]:
        messages.append({"role": "user", "content": line["user"]})
        messages.append({"role": "assistant", "content": line["answer"]})
    messages.append({"role": "user", "content": conversation.turns[turn]})
    return [int(token) for token in encode_prompt(target.tokenizer, target.chat_template, messages)]


def _request(name: str, conversation: Conversation, turn: int, prompt_ids: Sequence[int], longest: int) -> Request:
    params = SamplingParams(
        temperature=conversation.temperature,
        top_p=conversation.top_p,
        seed=conversation.turn_seed(turn),
        max_new_tokens=longest,
    )
    return Request(id=name, prompt_ids=tuple(prompt_ids), params=params)


def _line(conversation: Conversation, turn: int, completion: Any) -> Line:
    return {
        "id": conversation.id,
        "turn": turn,
        "split": conversation.split,
        "kind": conversation.kind,
        "user": conversation.turns[turn],
        "answer": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_ids": [int(token) for token in completion.prompt_ids],
        "token_ids": [int(token) for token in completion.token_ids],
    }


def _skipped(conversation: Conversation, turn: int, prompt_ids: Sequence[int] | None, limits: AnswerLimits) -> Line:
    reason = "an earlier turn has no answer"
    if prompt_ids is not None:
        reason = f"a prompt of {len(prompt_ids)} tokens leaves no room in {limits.max_total_tokens}"
    return {
        "id": conversation.id,
        "turn": turn,
        "split": conversation.split,
        "kind": conversation.kind,
        "user": conversation.turns[turn],
        "answer": "",
        "finish_reason": f"skipped: {reason}",
        "prompt_ids": [],
        "token_ids": [],
    }
