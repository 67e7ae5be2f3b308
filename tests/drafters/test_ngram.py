"""Prompt lookup against a plain Python reference, and its state against a fresh run."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters.base import Drafter, begin
from specjax.drafters.ngram import NgramDrafter
from specjax.types import DraftTree

VOCAB = 5


def reference_draft(text: list[int], max_ngram: int, min_ngram: int, length: int) -> list[int]:
    """Longest n first, latest occurrence first; the copy may run into itself."""
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if len(text) > n and text[end - n : end] == text[-n:]:
                copy = list(text)
                for step in range(length):
                    copy.append(copy[end + step])
                return copy[len(text) :]
    return []


def state_of(drafter: NgramDrafter, texts: list[list[int]], max_length: int = 40, chunks: int = 1):
    """The state after feeding each row its text, in a number of portions."""
    tree = DraftTree.chains(1, 4)
    state = drafter.init_state(len(texts), max_length, tree)
    state = begin(drafter, None, state, jnp.asarray([text[0] for text in texts], jnp.int32))
    for chunk in range(chunks):
        parts = [np.array_split(np.asarray(text[1:], np.int32), chunks)[chunk] for text in texts]
        tokens = np.full((len(texts), 40), 99, np.int32)
        for row, part in enumerate(parts):
            tokens[row, : len(part)] = part
        state = drafter.extend(
            None,
            state,
            tokens=jnp.asarray(tokens),
            features=jnp.zeros((len(texts), 40, 0), jnp.float32),
            count=jnp.asarray([len(part) for part in parts], jnp.int32),
        )
    return state


def propose(drafter: NgramDrafter, state, texts: list[list[int]], length: int, max_depth: list[int] | None = None):
    depth = [length] * len(texts) if max_depth is None else max_depth
    proposal, _ = jax.jit(drafter.propose, static_argnames=("tree", "to_laws"))(
        jax.random.split(jax.random.key(0), len(texts)),
        None,
        state,
        last_token=jnp.asarray([text[-1] for text in texts], jnp.int32),
        tree=DraftTree.chains(1, length),
        max_depth=jnp.asarray(depth, jnp.int32),
        to_laws=jax.nn.log_softmax,
    )
    return proposal


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(3, 1), (1, 1), (2, 2), (4, 3)])
def test_drafts_equal_the_reference(max_ngram, min_ngram):
    generator = np.random.default_rng(1)
    texts = [generator.integers(0, VOCAB, generator.integers(1, 30)).tolist() for _ in range(60)]
    texts += [[1], [1, 1], [1, 2, 1], [1, 2, 3, 4], [0] * 20]
    drafter = NgramDrafter(VOCAB, max_ngram, min_ngram)
    proposal = propose(drafter, state_of(drafter, texts), texts, 4)
    found = 0
    for row, text in enumerate(texts):
        expected = reference_draft(text, max_ngram, min_ngram, 4)
        depth = int(proposal.max_depth[row])
        assert depth == len(expected), text
        assert proposal.tokens[row, 1 : 1 + depth].tolist() == expected, text
        assert int(proposal.tokens[row, 0]) == text[-1]
        found += bool(expected)
    assert found >= 3


def test_laws_are_one_hot_at_the_drafts():
    texts = [[1, 2, 3, 1, 2], [0, 1, 2, 3, 4]]
    drafter = NgramDrafter(VOCAB)
    proposal = propose(drafter, state_of(drafter, texts), texts, 3)
    laws = np.exp(np.asarray(proposal.draft_log_laws))
    np.testing.assert_array_equal(laws.sum(axis=-1), 1)
    np.testing.assert_array_equal(laws.argmax(axis=-1), proposal.tokens[:, 1:])
    np.testing.assert_array_equal(proposal.max_depth, [3, 0])


def test_the_depth_limit_of_a_row_is_kept():
    texts = [[1, 2, 3, 1, 2]] * 3
    drafter = NgramDrafter(VOCAB)
    proposal = propose(drafter, state_of(drafter, texts), texts, 3, max_depth=[0, 2, 3])
    np.testing.assert_array_equal(proposal.max_depth, [0, 2, 3])


def test_portions_do_not_change_the_state():
    generator = np.random.default_rng(2)
    texts = [generator.integers(0, VOCAB, length).tolist() for length in (1, 5, 17, 30)]
    drafter = NgramDrafter(VOCAB)
    at_once, in_parts = state_of(drafter, texts), state_of(drafter, texts, chunks=4)
    np.testing.assert_array_equal(at_once.count, [len(text) for text in texts])
    np.testing.assert_array_equal(at_once.count, in_parts.count)
    for row, text in enumerate(texts):
        assert at_once.history[row, : len(text)].tolist() == text
        assert in_parts.history[row, : len(text)].tolist() == text


def test_it_is_a_hashable_drafter():
    drafter = NgramDrafter(VOCAB)
    assert isinstance(drafter, Drafter)
    assert hash(drafter) == hash(NgramDrafter(VOCAB))
    assert drafter.deterministic
    assert drafter.feature_layers == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vocab_size": 0}, "`vocab_size` must be at least 1; got 0"),
        ({"vocab_size": 5, "min_ngram": 0}, "`min_ngram` must be at least 1"),
        ({"vocab_size": 5, "min_ngram": 4}, "at most `max_ngram`; got min_ngram 4 and max_ngram 3"),
    ],
)
def test_bad_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NgramDrafter(**settings)


def test_several_drafts_are_refused():
    with pytest.raises(ValueError, match="`num_drafts` must be 1"):
        NgramDrafter(VOCAB).init_state(1, 8, DraftTree.chains(2, 2))
