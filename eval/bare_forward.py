"""Decoding without an engine: the least that a token costs here, and what another library takes for it."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checkpoints.llama_names import EMBEDDING, FINAL_NORM, HEAD, layer_tensors
from specjax.models import KVCache, ModelConfig, compute_logits, forward
from specjax.sampling import lowest_argmax


class BareLoop:
    """A jitted forward, its head and an argmax in a Python loop: no drafts, no laws, no stopping, no text.

    Args:
        target: with `config` and `params`.
        prompt_ids: at least one token.
        num_slots: slots of the cache.
        num_queries: tokens of a block. Above 1 the forward does the work of verifying `num_queries - 1` drafts; one
            token is kept.
    """

    def __init__(self, target: Any, prompt_ids: Sequence[int], num_slots: int, num_queries: int = 1) -> None:
        self._target = target
        self._num_queries = num_queries
        config, params = target.config, target.params
        cache = KVCache.zeros(config, 1, num_slots, params["embed_tokens"].dtype)
        tokens = jnp.asarray([prompt_ids], jnp.int32)
        self._cache, first = _block(config)(params, cache, tokens, jnp.zeros(1, jnp.int32))
        self._start = len(prompt_ids)
        self._first = first[:, -1:]

    def run(self, num_tokens: int) -> jax.Array:
        """Decodes from the prompt on; each step waits for its token, as a streaming loop must."""
        block = _block(self._target.config)
        token, cache = self._first, self._cache
        for offset in range(num_tokens):
            tokens = jnp.broadcast_to(token, (1, self._num_queries))
            start = jnp.full(1, self._start + offset, jnp.int32)
            cache, greedy = block(self._target.params, cache, tokens, start)
            token = greedy[:, :1].block_until_ready()
        self._cache = cache
        return token


@functools.lru_cache(maxsize=8)
def _block(config: ModelConfig) -> Callable[..., tuple[KVCache, jax.Array]]:
    def block(params: Any, cache: KVCache, tokens: jax.Array, start: jax.Array) -> tuple[KVCache, jax.Array]:
        output = forward(params, config, tokens, cache, start)
        return output.cache, lowest_argmax(compute_logits(params, config, output.hidden))

    return jax.jit(block, donate_argnums=1)


def transformers_available() -> bool:
    """Whether torch and transformers are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))


def transformers_generate(target: Any, prompt_ids: Sequence[int]) -> Callable[[int], list[int]]:
    """transformers' `generate` on the same weights and cores, greedy, float32.

    Args:
        target: with `config` and `params`.
        prompt_ids: the prompt.

    Returns:
        A function from a number of tokens to the new tokens.
    """
    import torch
    import transformers

    settings = target.config.to_huggingface()
    settings.pop("architectures", None)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    tensors = {name: torch.from_numpy(value) for name, value in _checkpoint_tensors(target).items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if target.config.tie_word_embeddings:
        missing = [name for name in missing if name != HEAD]
    if missing or unexpected:
        raise ValueError(f"transformers' model has other weights: missing {missing}, unexpected {unexpected}")
    if target.config.tie_word_embeddings:
        model.tie_weights()
    model.eval()
    inputs = torch.tensor([list(prompt_ids)])

    def generate(num_tokens: int) -> list[int]:
        with torch.no_grad():
            output = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                pad_token_id=0,
            )
        return output[0, inputs.shape[1] :].tolist()

    return generate


def _checkpoint_tensors(target: Any) -> dict[str, np.ndarray]:
    """The target's weights under their names in checkpoints, float32 [out, in]."""

    def array(value: Any, transposed: bool = False) -> np.ndarray:
        # A copy: torch refuses memory that it may not write to.
        value = np.array(value, np.float32)
        return np.ascontiguousarray(value.T) if transposed else value

    params = target.params
    tensors = {EMBEDDING: array(params["embed_tokens"]), FINAL_NORM: array(params["final_norm"])}
    if not target.config.tie_word_embeddings:
        tensors[HEAD] = array(params["lm_head"], transposed=True)
    for index, layer in enumerate(params["layers"]):
        for parameter, (name, transposed) in layer_tensors(target.config).items():
            tensors[f"model.layers.{index}.{name}"] = array(layer[parameter], transposed)
    return tensors
