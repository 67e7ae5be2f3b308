"""One tiny target and a few engines that the engine's tests share: a step is compiled once for each shape."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax.decoding import Engine, Request, SamplingParams
from specjax.drafters.language_model import LanguageModelDrafter
from specjax.drafters.ngram import NgramDrafter
from specjax.models import KVCache, compute_logits, forward
from specjax.testing.tiny_models import TabularDrafter, TinyTarget, tiny_config, tiny_target

VOCAB = 13
EOS = 0
CACHE = 48
SLOTS = 8
CONFIG = tiny_config(vocab_size=VOCAB, eos_token_ids=(EOS,))
MAX_DRAFT = {"plain": 0, "tabular": 8, "greedy_tabular": 8, "ngram": 8, "self": 5}


@functools.cache
def target() -> TinyTarget:
    return tiny_target(jax.random.key(0), vocab_size=VOCAB, eos_token_ids=(EOS,))


def drafter_of(kind: str):
    if kind == "plain":
        return None, None
    if kind == "ngram":
        return NgramDrafter(VOCAB), None
    if kind == "self":
        return LanguageModelDrafter(CONFIG), target().params
    drafter = TabularDrafter(VOCAB, greedy=kind == "greedy_tabular")
    return drafter, drafter.init_params(jax.random.key(3))


def engine_of(kind: str, *, num_slots: int = SLOTS, drafter_params=None, **settings) -> Engine:
    """An engine over the shared target, or over one with other parameters (`target=`)."""
    drafter, params = drafter_of(kind)
    settings = {"cache_length": CACHE, "draft_length": MAX_DRAFT[kind], "target": target()} | settings
    return Engine(
        settings.pop("target"),
        drafter,
        params if drafter_params is None else drafter_params,
        num_slots=num_slots,
        **settings,
    )


def request(name: str, prompt, **params) -> Request:
    return Request(name, tuple(int(token) for token in prompt), SamplingParams(**({"ignore_eos": True} | params)))


def random_prompts(count: int, *, seed: int = 0, longest: int = 16) -> list[tuple[int, ...]]:
    generator = np.random.default_rng(seed)
    return [tuple(generator.integers(0, VOCAB, generator.integers(1, longest + 1)).tolist()) for _ in range(count)]


@jax.jit
def _run_text(params, tokens):
    cache = KVCache.zeros(CONFIG, 1, tokens.shape[1])
    output = forward(params, CONFIG, tokens, cache, jnp.zeros(1, jnp.int32))
    return compute_logits(params, CONFIG, output.hidden)[0], output.cache


def run_text(text, params=None) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits after each token of a text and its keys and values [KV, T, head_dim], from one run without an engine."""
    tokens = np.zeros((1, CACHE + 16), np.int32)
    tokens[0, : len(text)] = text
    logits, cache = _run_text(target().params if params is None else params, tokens)
    rows = [np.asarray(leaf)[0, :, : len(text)] for leaf in jax.tree.leaves(cache)]
    return np.asarray(logits)[: len(text)], rows


def text_logits(text, params=None) -> np.ndarray:
    """Logits after each token of a text, [T, V]."""
    return run_text(text, params)[0]


def greedy_text(prompt, num_tokens: int, params=None) -> tuple[int, ...]:
    """Greedy decoding by recomputing the whole text for every token."""
    text = [int(token) for token in prompt]
    for _ in range(num_tokens):
        text.append(int(np.argmax(text_logits(text, params)[-1])))
    return tuple(text[len(prompt) :])
