"""Leaving layers out of a target: the least needed one goes first."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.layer_choice import AnsweredTexts, answer, drop_layers
from eval.questions import Question
from specjax.models import KVCache, compute_logits, forward
from specjax.testing.tiny_models import tiny_target

TEXTS = [((1, 5, 2), (7, 3, 3)), ((4,), (8, 6))]


@pytest.fixture(scope="module")
def target() -> Any:
    """Four layers, of which layer 2 adds nothing."""
    made = tiny_target(jax.random.key(5), vocab_size=11, num_layers=4)
    layers = list(made.params["layers"])
    layers[2] = layers[2] | {name: jnp.zeros_like(layers[2][name]) for name in ("o_proj", "down_proj")}
    return dataclasses.replace(made, params=made.params | {"layers": layers})


def test_agreement_is_that_of_the_laws_after_each_answer_token(target: Any) -> None:
    texts = AnsweredTexts(target, TEXTS)
    shares, same = [], []
    for prompt, reply in TEXTS:
        tokens = jnp.asarray([[*prompt, *reply]], jnp.int32)
        laws = []
        for kept in ((0, 1, 2, 3), (0, 3)):
            params = target.params | {"layers": [target.params["layers"][layer] for layer in kept]}
            config = dataclasses.replace(target.config, num_layers=len(kept))
            hidden = forward(params, config, tokens, KVCache.zeros(config, 1, 8), jnp.zeros(1, jnp.int32)).hidden
            laws.append(np.asarray(jax.nn.softmax(compute_logits(params, config, hidden) / 0.7))[0])
        places = slice(len(prompt) - 1, len(prompt) + len(reply) - 1)
        shares += np.minimum(*laws)[places].sum(axis=-1).tolist()
        same += (laws[0].argmax(-1) == laws[1].argmax(-1))[places].tolist()
    found = texts.agreement((0, 3), (0.7, 1.0))
    assert found["overlap"][0] == pytest.approx(np.mean(shares), abs=1e-5)
    assert found["top_1"] == pytest.approx(np.mean(same))
    whole = texts.agreement((0, 1, 2, 3), (1.0,))
    assert whole["top_1"] == 1.0
    assert whole["overlap"][0] == pytest.approx(1.0, abs=1e-5)


def test_a_layer_that_adds_nothing_goes_first(target: Any) -> None:
    texts = AnsweredTexts(target, TEXTS)
    kept = list(drop_layers(4, 2, texts))
    assert kept == [(0, 1, 3), (0, 3)]
    for number in (0, 3):
        with pytest.raises(ValueError, match=rf"`max_dropped` must be in \[1, 2\] for 4 layers; got {number}"):
            next(drop_layers(4, number, texts))


def test_answers_are_the_targets_own(chat_target: Any) -> None:
    questions = [Question("a", "chat", ("hello world",)), Question("b", "chat", ("the user",))]
    texts = answer(chat_target, questions, 6)
    assert texts.tokens.shape[0] == 2
    assert 0 < texts.places.sum() <= 12
    assert texts.agreement((0,), (1.0,))["top_1"] == 1.0
