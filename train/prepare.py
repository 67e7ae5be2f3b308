"""From prompts to rows and features: the stages before training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax

from eval import files
from specjax.checkpoints.target import Target
from train import conversations as conversations_lib
from train import mesh as mesh_lib
from train.answers import AnswerLimits, answer_conversations
from train.artifacts import RunError
from train.config import TrainConfig
from train.data import Example, Rows, load_text_examples, make_rows
from train.features import FeatureSource, OnlineFeatures, cache_features
from train.stages import stage


def prepare_rows(config: TrainConfig, target: Target, run_dir: Path, data_dir: Path) -> tuple[Rows, Rows]:
    """Answers the prompts and makes training and held-out rows.

    Args:
        config: the settings.
        target: the model that answers.
        run_dir: gets a copy of the answers' manifest.
        data_dir: keeps the answers.

    Returns:
        Training rows and held-out rows.

    Raises:
        RunError: if there is nothing to train or to test on.
    """
    train, held_out = _examples(config, target, run_dir, data_dir)
    with stage("rows") as done:
        if config.text is not None:
            train = train + load_text_examples(
                config.text, target.tokenizer.encode, config.batch_length, max_rows=config.max_text_rows
            )
        train_rows = make_rows(train, config.batch_length, packing=config.packing)
        held_out_rows = make_rows(held_out, config.batch_length, packing=config.packing)
        done(f"training: {train_rows.summary()}")
        done(f"held out: {held_out_rows.summary()}")
    return train_rows, held_out_rows


def feature_source(
    config: TrainConfig, target: Target, rows: Rows, layers: tuple[int, ...], data_dir: Path, title: str, place: object
) -> FeatureSource:
    """Features of rows, from the cache on disk or online.

    Args:
        config: the settings.
        target: the frozen model.
        rows: all rows.
        layers: layers to read.
        data_dir: keeps the cache.
        title: of the progress bar and the summary.
        place: puts a batch array onto the devices, for online features.
    """
    if config.features == "online":
        return OnlineFeatures(target, rows, layers, place)
    if jax.process_index() > 0:
        mesh_lib.wait_for_all(title)
    with stage(title) as done:
        cache = cache_features(
            data_dir / "features",
            target,
            rows,
            layers,
            dtype=config.feature_dtype,
            rows_at_once=min(config.feature_rows, rows.num_rows),
            progress=config.progress,
            title=title,
        )
        done(f"{rows.num_rows} rows in {cache.folder}")
    if jax.process_index() == 0:
        mesh_lib.wait_for_all(title)
    return cache


def in_dtype(target: Target, dtype: str | None) -> Target:
    """The target with all parameters in another dtype; None leaves them as they are."""
    if dtype is None or dtype == str(target.params["embed_tokens"].dtype):
        return target
    return dataclasses.replace(target, params=jax.tree.map(lambda leaf: leaf.astype(dtype), target.params))


def _examples(
    config: TrainConfig, target: Target, run_dir: Path, data_dir: Path
) -> tuple[list[Example], list[Example]]:
    if config.answer_source == "dataset":
        with stage("dataset") as done:
            train, held_out = conversations_lib.dataset_examples(config, target)
            done(f"{len(train)} training and {len(held_out)} held-out conversations of {config.dataset}")
        return train, held_out
    with stage("prompts") as done:
        plan, summary = conversations_lib.plan_conversations(config)
        done(summary)
    limits = AnswerLimits(config.max_answer_tokens, config.batch_length, config.answer_slots)
    if jax.process_index() > 0:
        mesh_lib.wait_for_all("answers")
    with stage("answers") as done:
        path = data_dir / "data" / "answers.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        answering = in_dtype(target, config.answer_dtype)
        file = answer_conversations(answering, plan, path, limits, progress=config.progress)
        manifest = files.read_json(path.with_name("manifest.json"))
        if data_dir.resolve() != run_dir.resolve():
            files.write_json(run_dir / "data" / "manifest.json", manifest)
        done(f"{manifest['num_answer_tokens']} tokens in {manifest['num_turns']} answers")
    if jax.process_index() == 0:
        mesh_lib.wait_for_all("answers")
    train, held_out = conversations_lib.answer_examples(file, plan, target, supervise=config.supervise)
    if not train or not held_out:
        reasons = manifest["finish_reasons"]
        raise RunError(
            f"no answer is left to train on or to test on; got {len(train)} and {len(held_out)} ({reasons}): "
            "check `--batch_length` against the length of the prompts"
        )
    return train, held_out
