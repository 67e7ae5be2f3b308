"""What draft heads are made from in a training run: token counts, special tokens, operations; and what they cover."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from specjax.checkpoints.target import Target
from specjax.drafters.eagle3_layer import Eagle3Config, parameter_shapes
from specjax.heads import HeadSource
from specjax.heads.vocabulary import count_tokens, coverage
from train.config import TrainConfig
from train.data import Rows, load_text_examples


def head_source_of(
    config: TrainConfig, target: Target, drafter: Eagle3Config, rows: Rows
) -> tuple[HeadSource, dict[str, Any]]:
    """All that heads may want of the data, without the dense head.

    Answers are the supervised tokens of the training rows. The corpus is `--frequency_text`, or what of the rows the
    target did not write: the prompts; where everything is supervised, all tokens.

    Args:
        config: the settings.
        target: the model.
        drafter: shape of the drafter.
        rows: training rows.

    Returns:
        The source, and what was counted, for the record.
    """
    vocab_size = drafter.vocab_size
    answers = rows.tokens[rows.loss_mask]
    prompts = rows.tokens[(rows.segment_ids > 0) & ~rows.loss_mask]
    if config.frequency_text is not None:
        examples = load_text_examples(
            config.frequency_text, target.tokenizer.encode, config.batch_length, max_rows=0, flag="frequency_text"
        )
        corpus, name = np.concatenate([example.tokens for example in examples]), config.frequency_text
    elif prompts.size:
        corpus, name = prompts, "prompts"
    else:
        corpus, name = answers, "all supervised tokens"
    source = HeadSource(
        answer_counts=count_tokens(answers, vocab_size),
        corpus_counts=count_tokens(corpus, vocab_size),
        num_valid_tokens=drafter.num_valid_tokens,
        special_ids=tuple(sorted(target.tokenizer.special_ids)),
        byte_ids=tuple(sorted(target.tokenizer.byte_ids)),
        backbone_flops=backbone_flops(drafter),
    )
    record = {"corpus": name, "corpus_tokens": int(corpus.size), "answer_tokens": int(answers.size)}
    return source, record


def backbone_flops(drafter: Eagle3Config) -> int:
    """Operations of the drafter's matrices for one token, head and attention scores left out."""
    shapes = parameter_shapes(drafter)
    matrices = [shapes["fc"], *(shape for shape in shapes["midlayer"].values() if len(shape) == 2)]
    return 2 * sum(math.prod(shape) for shape in matrices)


def vocabulary_report(
    ids: np.ndarray, source: HeadSource, rows: Rows, held_out: Rows, record: dict[str, Any]
) -> dict[str, Any]:
    """What a draft vocabulary covers.

    Args:
        ids: kept tokens, ascending.
        source: what it was chosen from.
        rows: training rows.
        held_out: held-out rows.
        record: what was counted.

    Returns:
        A JSON-able report.
    """
    counts = source.answer_counts
    vocab_size = len(counts) if counts is not None else int(ids[-1]) + 1
    return {
        **record,
        "size": len(ids),
        "vocab_size": vocab_size,
        "training_coverage": coverage(count_tokens(rows.tokens[rows.loss_mask], vocab_size), ids),
        "held_out_coverage": coverage(count_tokens(held_out.tokens[held_out.loss_mask], vocab_size), ids),
        "ids": ids.tolist(),
    }
