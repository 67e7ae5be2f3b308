"""A language model as a drafter: its trees come from its own laws, and its state is always that of a fresh run."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding.laws import LawParams, to_log_laws
from specjax.drafters.base import Drafter, begin
from specjax.drafters.language_model import LanguageModelDrafter, keep_layers
from specjax.drafters.tree_levels import TreeLevels
from specjax.models import KVCache, compute_logits, forward
from specjax.testing.tiny_models import TinyTarget, tiny_target
from specjax.types import DRAW_DETERMINISTIC, DraftTree

VOCAB = 11
LONGEST = 24
PROMPTS = [(3, 1, 4, 1, 5), (2,), (7, 1, 8, 2, 8, 1, 8)]
TREES = {
    "chain": DraftTree.chains(1, 4),
    "one token": DraftTree.chains(1, 1),
    "three chains": DraftTree.chains(3, 3),
    "four drafts of one token": DraftTree.chains(4, 1),
    # Depths of width 2, 3, 1, 1: padding, siblings, leaves at several depths.
    "irregular": DraftTree((-1, 0, 0, 1, 1, 2, 2, 2, 4, 8)),
    # Children that stand far behind their parents, and in another order than by depth.
    "depth first": DraftTree((-1, 0, 1, 2, 0, 4, 4)),
}


@functools.cache
def model() -> TinyTarget:
    return tiny_target(jax.random.key(2), vocab_size=VOCAB, num_layers=3, sharpness=1.5)


@functools.cache
def drafter() -> LanguageModelDrafter:
    return LanguageModelDrafter(model().config)


def law_params(batch: int, temperature: float = 1.0) -> LawParams:
    return LawParams(
        temperature=jnp.full(batch, temperature, jnp.float32),
        top_k=jnp.zeros(batch, jnp.int32),
        top_p=jnp.ones(batch, jnp.float32),
        min_p=jnp.zeros(batch, jnp.float32),
    )


@functools.partial(jax.jit, static_argnames="tree")
def propose(rng_keys, state, laws, max_depth, *, tree):
    return drafter().propose(
        rng_keys,
        model().params,
        state,
        last_token=state.pending,
        tree=tree,
        max_depth=max_depth,
        to_laws=lambda logits: to_log_laws(logits, laws),
    )


@jax.jit
def extend(state, tokens, count):
    features = jnp.zeros((*tokens.shape, 0), jnp.float32)
    return drafter().extend(model().params, state, tokens=tokens, features=features, count=count)


def prefilled(texts, tree: DraftTree):
    """The state after some texts, fed in one piece."""
    tokens = np.zeros((len(texts), LONGEST), np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    state = drafter().init_state(len(texts), LONGEST + tree.num_nodes, tree)
    state = begin(drafter(), model().params, state, jnp.asarray(tokens[:, 0]))
    return extend(state, jnp.asarray(tokens[:, 1:]), jnp.asarray([len(text) - 1 for text in texts], jnp.int32))


@jax.jit
def run_text(tokens):
    cache = KVCache.zeros(model().config, 1, tokens.shape[1])
    output = forward(model().params, model().config, tokens, cache, jnp.zeros(1, jnp.int32))
    return jax.nn.log_softmax(compute_logits(model().params, model().config, output.hidden)[0])


def law_after(text) -> np.ndarray:
    """The model's law after a text, from one run without a cache."""
    tokens = np.zeros((1, LONGEST + 8), np.int32)
    tokens[0, : len(text)] = text
    return np.asarray(run_text(tokens))[len(text) - 1]


def assert_same_state(actual, expected, lengths, *, atol: float = 1e-4) -> None:
    for field in ("length", "pending"):
        np.testing.assert_array_equal(getattr(actual, field), getattr(expected, field))
    np.testing.assert_allclose(actual.hidden, expected.hidden, atol=atol)
    for mine, fresh in zip(jax.tree.leaves(actual.cache), jax.tree.leaves(expected.cache), strict=True):
        for row, length in enumerate(lengths):
            np.testing.assert_allclose(mine[row, :, :length], fresh[row, :, :length], atol=atol)


# The irregular tree has all that the others have: chains, siblings, and an order of its own.
OFTEN = "irregular"


def trees(*names: str) -> list:
    """Trees by name; all but one only in long runs."""
    return [pytest.param(TREES[name], id=name, marks=() if name == OFTEN else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("tree", trees(*TREES))
def test_every_law_is_the_models_own_after_the_path(tree):
    state = prefilled(PROMPTS, tree)
    keys = jax.random.split(jax.random.key(5), len(PROMPTS))
    proposal, _ = propose(keys, state, law_params(len(PROMPTS)), jnp.full(len(PROMPTS), 9, jnp.int32), tree=tree)
    assert isinstance(drafter(), Drafter)
    assert proposal.draft_log_laws.shape == (len(PROMPTS), len(tree.internal), VOCAB)
    np.testing.assert_array_equal(proposal.max_depth, tree.max_depth)
    tokens = np.asarray(proposal.tokens)
    for row, prompt in enumerate(PROMPTS):
        assert tokens[row, 0] == prompt[-1]
        for place, node in enumerate(tree.internal):
            path = [n for n in range(1, tree.num_nodes) if tree.ancestor_mask[node, n]]
            text = (*prompt, *tokens[row, path])
            np.testing.assert_allclose(proposal.draft_log_laws[row, place], law_after(text), atol=1e-4)


@pytest.mark.parametrize("tree", trees("three chains", "irregular"))
def test_children_are_independent_draws_from_their_parents_laws(tree):
    """False alarms: 1e-6 a comparison by a bound on the deviation of a frequency (Hoeffding), seeds are literal."""
    count = 4000
    state = jax.tree.map(lambda leaf: jnp.repeat(leaf, count, axis=0), prefilled(PROMPTS[:1], tree))
    keys = jax.random.split(jax.random.key(7), count)
    proposal, _ = propose(keys, state, law_params(count), jnp.full(count, 9, jnp.int32), tree=tree)
    tokens = np.asarray(proposal.tokens)
    bound = np.sqrt(np.log(2 / 1e-6) / (2 * count))
    first, second = tree.children[0][:2]
    law = np.exp(law_after(PROMPTS[0]))
    for node in (first, second):
        frequency = np.bincount(tokens[:, node], minlength=VOCAB) / count
        assert np.abs(frequency - law).max() < bound
    # Independent: the siblings agree as often as two draws do.
    assert abs((tokens[:, first] == tokens[:, second]).mean() - (law**2).sum()) < bound
    # Deeper nodes: average of their parents' laws.
    for child in (tree.num_nodes - 1, tree.num_nodes - 2):
        parents = np.asarray(proposal.draft_log_laws)[:, tree.internal.index(tree.parent[child])]
        frequency = np.bincount(tokens[:, child], minlength=VOCAB) / count
        assert np.abs(frequency - np.exp(parents).mean(axis=0)).max() < 2 * bound


def test_drafts_at_temperature_zero_are_greedy_and_one_hot():
    tree = TREES["three chains"]
    state = prefilled(PROMPTS, tree)
    keys = jax.random.split(jax.random.key(1), len(PROMPTS))
    proposal, _ = propose(keys, state, law_params(3, temperature=0.0), jnp.full(3, 9, jnp.int32), tree=tree)
    tokens, laws = np.asarray(proposal.tokens), np.asarray(proposal.draft_log_laws)
    assert ((laws == 0).sum(axis=-1) == 1).all()
    for row, prompt in enumerate(PROMPTS):
        text = list(prompt)
        for depth in range(1, 4):
            best = int(law_after(text).argmax())
            assert set(tokens[row, 1 + (depth - 1) * 3 : 1 + depth * 3]) == {best}
            text.append(best)


def test_case_l1_drafts_come_with_the_truncated_laws_that_they_were_drawn_from():
    tree = TREES["three chains"]
    laws = dataclasses.replace(law_params(3, temperature=0.8), top_k=jnp.full(3, 2, jnp.int32))
    proposal, _ = propose(
        jax.random.split(jax.random.key(3), 3), prefilled(PROMPTS, tree), laws, jnp.full(3, 9, jnp.int32), tree=tree
    )
    declared, tokens = np.exp(np.asarray(proposal.draft_log_laws)), np.asarray(proposal.tokens)
    assert ((declared > 0).sum(axis=-1) == 2).all()
    np.testing.assert_allclose(declared.sum(axis=-1), 1, rtol=1e-5)
    for row in range(3):
        for place, node in enumerate(tree.internal):
            assert all(declared[row, place, tokens[row, child]] > 0 for child in tree.children[node])


@pytest.mark.parametrize("accepted", [(0, 0, 0), (3, 1, 2), (2, 3, 0)])
def test_case_k2_state_after_any_acceptance_is_that_of_a_fresh_prefill(accepted):
    """Drafts leave nothing behind: accepted ones and the token after them are fed as text."""
    tree = TREES["three chains"]
    texts = [list(prompt) for prompt in PROMPTS]
    state = prefilled(texts, tree)
    for step in range(3):
        keys = jax.random.split(jax.random.key(step), len(texts))
        proposal, state = propose(keys, state, law_params(3), jnp.full(3, 9, jnp.int32), tree=tree)
        counts = [(number + step) % 4 + 1 for number in accepted]
        committed = np.zeros((len(texts), 4), np.int32)
        for row, (text, count) in enumerate(zip(texts, counts, strict=True)):
            chain = np.asarray(proposal.tokens)[row, 1 + step % 3 :: 3][: count - 1]
            committed[row, :count] = [*chain, (row + step) % VOCAB]
            text += committed[row, :count].tolist()
        state = extend(state, committed, jnp.asarray(counts, jnp.int32))
        assert_same_state(state, prefilled(texts, tree), [len(text) for text in texts])


def test_a_prompt_may_be_fed_in_pieces_and_no_tokens_change_nothing():
    tree = TREES["chain"]
    whole = prefilled(PROMPTS, tree)
    state = prefilled([prompt[:1] for prompt in PROMPTS], tree)
    for start in (1, 4):
        piece = np.zeros((3, 3), np.int32)
        counts = [len(prompt[start : start + 3]) for prompt in PROMPTS]
        for row, prompt in enumerate(PROMPTS):
            piece[row, : counts[row]] = prompt[start : start + 3]
        state = extend(state, piece, jnp.asarray(counts, jnp.int32))
    lengths = [len(prompt) for prompt in PROMPTS]
    assert_same_state(state, whole, lengths)
    assert_same_state(extend(state, np.full((3, 3), 9, np.int32), jnp.zeros(3, jnp.int32)), whole, lengths)


def test_the_last_slots_of_the_cache_are_enough():
    """A text of the greatest length, extended by a whole block: nothing is written over earlier entries."""
    tree = TREES["irregular"]
    text = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, LONGEST - 1)]
    state = prefilled([text], tree)
    _, state = propose(jax.random.split(jax.random.key(1)), *doubled(state), tree=tree)
    state = extend(state, np.full((2, tree.max_depth + 1), 5, np.int32), jnp.ones(2, jnp.int32))
    assert_same_state(state, prefilled([[*text, 5]] * 2, tree), [LONGEST] * 2)


def doubled(state):
    """A batch of two equal rows, its laws and depths."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, 2, axis=0), state), law_params(2), jnp.full(2, 9, jnp.int32)


def test_chains_need_no_padding():
    for num_drafts, length in ((1, 4), (3, 3), (7, 12)):
        levels = TreeLevels(DraftTree.chains(num_drafts, length))
        assert (levels.num_levels, levels.width) == (length - 1, num_drafts)
        assert levels.is_regular
    irregular = TreeLevels(TREES["irregular"])
    assert (irregular.num_levels, irregular.width, irregular.is_regular) == (3, 2, False)
    assert TreeLevels(DraftTree.chains(4, 1)).num_slots == 0


def test_kept_layers_are_the_same_arrays():
    config, params = keep_layers(model().config, model().params, (0, 2))
    assert config.num_layers == 2
    assert [id(layer) for layer in params["layers"]] == [id(model().params["layers"][i]) for i in (0, 2)]
    assert all(params[name] is model().params[name] for name in ("embed_tokens", "final_norm", "lm_head"))
    config, params = keep_layers(model().config, model().params, range(3))
    assert config == model().config
    tokens = jnp.asarray([PROMPTS[0]], jnp.int32)
    cache, start = KVCache.zeros(config, 1, 8), jnp.zeros(1, jnp.int32)
    np.testing.assert_array_equal(
        forward(params, config, tokens, cache, start).hidden,
        forward(model().params, model().config, tokens, cache, start).hidden,
    )


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((), "`layers` must keep at least one layer; got none"),
        ((0, 3), r"`layers` must be in \[0, 3\), the model's layers; got \[0, 3\]"),
        ((-1, 0), r"`layers` must be in \[0, 3\)"),
        ((1, 0), r"`layers` must be ascending, each layer once; got \[1, 0\]"),
        ((1, 1), "each layer once"),
    ],
)
def test_layers_that_cannot_be_kept_are_named(layers, message):
    with pytest.raises(ValueError, match=message):
        keep_layers(model().config, model().params, layers)


def test_trees_that_are_not_drawn_independently_are_refused():
    with pytest.raises(ValueError, match="`draws` of the tree must be 'iid'"):
        drafter().init_state(1, 16, DraftTree.chains(1, 2, DRAW_DETERMINISTIC))
