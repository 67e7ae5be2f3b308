"""From prompts to conversations to answer, and from answers to training examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specjax.checkpoints.target import Target
from specjax.text.conversations import load_conversations
from specjax.text.loss_mask import encode_conversation
from specjax.text.prompts import Prompt, load_prompts
from train.answers import AnswerFile, Conversation
from train.artifacts import RunError
from train.config import TrainConfig
from train.data import Example

Messages = list[dict[str, str]]


def plan_conversations(config: TrainConfig) -> tuple[list[Conversation], str]:
    """The conversations that the target answers, training first, and a line about them.

    Raises:
        RunError: if no prompt is left to train on.
    """
    if config.dataset is None:
        train = [(p.id, p.kind, p.turns, None) for p in load_prompts("train", config.prompt_kind_list)]
        held_out = [(p.id, p.kind, p.turns, None) for p in load_prompts("held_out", config.prompt_kind_list)]
        train, held_out = _shuffled(train, config.seed), _shuffled(held_out, config.seed)
        source = "shipped prompts"
    else:
        conversations, source = load_dataset(config)
        prompts = [(f"row-{index}", "dataset", *_user_turns(messages)) for index, messages in conversations]
        held_out, train = prompts[: config.held_out_prompts], prompts[config.held_out_prompts :]
        train = [(name, kind, turns, system) for name, kind, turns, system in train if turns]
        held_out = [(name, kind, turns, system) for name, kind, turns, system in held_out if turns]
    held_out = held_out[: config.held_out_prompts]
    train = train[: config.num_prompts or None]
    if not train or not held_out:
        raise RunError(
            f"at least one training prompt and one held-out prompt must be there; got {len(train)} and {len(held_out)} "
            f"from {source}"
        )
    planned = []
    for name, kind, turns, system in train:
        for answer in range(config.answers_per_prompt):
            greedy = answer == 0 and config.greedy_first
            planned.append(
                Conversation(
                    id=f"{name}#{answer}",
                    split="train",
                    kind=kind,
                    turns=turns,
                    temperature=0.0 if greedy else config.answer_temperature,
                    top_p=1.0 if greedy else config.answer_top_p,
                    seed=config.seed,
                    system=system,
                )
            )
    planned += [Conversation(name, "held_out", kind, turns, system=system) for name, kind, turns, system in held_out]
    return planned, f"{len(train)} training and {len(held_out)} held-out prompts from {source}"


def held_out_questions(config: TrainConfig) -> list[Prompt]:
    """Held-out prompts to measure on: the shipped ones, or the held-out part of `--dataset`."""
    if config.dataset is None:
        return load_prompts("held_out", config.prompt_kind_list)
    conversations, _ = load_dataset(config)
    asked = []
    for index, messages in conversations[: config.held_out_prompts]:
        turns, _ = _user_turns(messages)
        if turns:
            asked.append(Prompt(f"row-{index}", "dataset", turns))
    return asked


def load_dataset(config: TrainConfig) -> tuple[list[tuple[int, Messages]], str]:
    """Conversations of `--dataset` in a seeded order, each with its number in the dataset, and a line about them.

    Raises:
        RunError: if there are too few of them.
    """
    loaded = load_conversations(str(config.dataset), strict=config.strict_data, split=config.dataset_split)
    if len(loaded.conversations) <= config.held_out_prompts:
        raise RunError(
            f"`--dataset` must hold more conversations than `--held_out_prompts` ({config.held_out_prompts}); "
            f"got {len(loaded.conversations)} from {config.dataset}"
        )
    numbered = list(zip(loaded.indices, loaded.conversations, strict=True))
    return _shuffled(numbered, config.seed), loaded.report.summary()


def dataset_examples(config: TrainConfig, target: Target) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples that keep the dataset's own answers."""
    conversations, source = load_dataset(config)
    wanted = config.held_out_prompts + config.num_prompts if config.num_prompts else len(conversations)
    examples, refused = [], []
    for index, messages in conversations:
        if len(examples) == wanted:
            break
        try:
            encoded = encode_conversation(target.tokenizer, target.chat_template, messages)
        except ValueError as error:
            refused.append(f"conversation {index}: {error}")
            continue
        examples.append(_example(f"row-{index}", encoded.token_ids, encoded.loss_mask, config.supervise))
    if refused and (config.strict_data or len(examples) <= config.held_out_prompts):
        raise RunError(f"`--dataset` {source} has conversations that cannot be encoded; {refused[0]}")
    held_out, train = examples[: config.held_out_prompts], examples[config.held_out_prompts :]
    return train, held_out


def answer_examples(
    file: AnswerFile, conversations: Sequence[Conversation], target: Target, *, supervise: str
) -> tuple[list[Example], list[Example]]:
    """Training and held-out examples from the target's own answers.

    The tokens of the last answer are those that were generated, never text that was tokenised again.

    Args:
        file: the finished answers.
        conversations: the plan.
        target: gives tokenizer and template, for the masks of earlier turns.
        supervise: "answers" or "all".

    Returns:
        Examples of the two splits. Conversations without any answer are left out.
    """
    examples: dict[str, list[Example]] = {"train": [], "held_out": []}
    for conversation in conversations:
        lines = [line for line in file.turns(conversation.id) if line["token_ids"]]
        if not lines:
            continue
        last = lines[-1]
        prompt_ids, answer_ids = last["prompt_ids"], last["token_ids"]
        mask = np.zeros(len(prompt_ids) + len(answer_ids), bool)
        mask[len(prompt_ids) :] = True
        if len(lines) > 1:
            mask[: len(prompt_ids)] = _earlier_mask(conversation, lines[:-1], prompt_ids, target)
        tokens = np.asarray([*prompt_ids, *answer_ids], np.int32)
        examples[conversation.split].append(_example(conversation.id, tokens, mask, supervise))
    return examples["train"], examples["held_out"]


def _earlier_mask(conversation: Conversation, lines: Sequence[dict], prompt_ids: Sequence[int], target: Target):
    messages: Messages = []
    if conversation.system is not None:
        messages.append({"role": "system", "content": conversation.system})
    for line in lines:
        messages.append({"role": "user", "content": line["user"]})
        messages.append({"role": "assistant", "content": line["answer"]})
    mask = np.zeros(len(prompt_ids), bool)
    # Templates that render earlier turns differently once a new one follows give no mask for them.
    try:
        encoded = encode_conversation(target.tokenizer, target.chat_template, messages)
    except ValueError:
        return mask
    length = len(encoded.token_ids)
    if length <= len(prompt_ids) and np.array_equal(encoded.token_ids, prompt_ids[:length]):
        mask[:length] = encoded.loss_mask
    return mask


def _example(name: str, tokens: np.ndarray, mask: np.ndarray, supervise: str) -> Example:
    tokens = np.asarray(tokens, np.int32)
    return Example(name, tokens, np.ones(len(tokens), bool) if supervise == "all" else np.asarray(mask, bool))


def _user_turns(messages: Messages) -> tuple[tuple[str, ...], str | None]:
    system = next((m["content"] for m in messages if m["role"] == "system"), None)
    return tuple(m["content"] for m in messages if m["role"] == "user"), system


def _shuffled(items: list, seed: int) -> list:
    return [items[index] for index in np.random.default_rng(seed).permutation(len(items))]
