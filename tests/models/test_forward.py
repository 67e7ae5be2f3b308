"""One forward for prefill, decoding and packed trees: all must agree with plain runs over whole texts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import (
    ForwardOutput,
    KVCache,
    ModelConfig,
    commit_path,
    compute_logits,
    forward,
    init_params,
    parameter_shapes,
)
from specjax.types import DraftTree

CONFIG = ModelConfig(
    vocab_size=23,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rope_theta=50.0,
    max_position_embeddings=64,
)
SLOTS = 24
# States are of order one to ten, each a sum of a few dozen float32 terms; a wrong mask or position costs 0.1.
TOLERANCE = 1e-4

jitted = jax.jit(forward, static_argnames=("config", "feature_layers", "depth"))


def random_params(seed: int, config: ModelConfig, scale: float = 0.3) -> Any:
    """As `init_params`, by NumPy: nothing to compile."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray((len(shape) == 1) + scale * generator.normal(size=shape), jnp.float32),
        parameter_shapes(config),
        is_leaf=lambda node: isinstance(node, tuple),
    )


@pytest.fixture(scope="module")
def params() -> Any:
    return random_params(5, CONFIG)


def tokens_of(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG.vocab_size, shape).astype(np.int32)


def run(params: Any, tokens: np.ndarray, cache: KVCache | None = None, start: Any = 0, **options: Any) -> ForwardOutput:
    if cache is None:
        cache = KVCache.zeros(CONFIG, tokens.shape[0], SLOTS)
    start = jnp.broadcast_to(jnp.asarray(start, jnp.int32), (tokens.shape[0],))
    return jitted(params, CONFIG, jnp.asarray(tokens), cache, start, **options)


def whole_text(params: Any, tokens: np.ndarray) -> ForwardOutput:
    """One row without any cache before it, padded to one shape so that it compiles once."""
    padded = np.zeros((1, SLOTS), np.int32)
    padded[0, : tokens.shape[-1]] = tokens.ravel()
    return run(params, padded, feature_layers=(0, 1))


def assert_close(actual: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("batch", [1, 3])
def test_one_token_at_a_time_equals_the_whole_text(params: Any, batch: int) -> None:
    tokens = tokens_of(1, batch, 9)
    whole = [whole_text(params, row) for row in tokens]
    cache = None
    for position in range(tokens.shape[1]):
        step = run(params, tokens[:, position : position + 1], cache, position, feature_layers=(0, 1))
        cache = step.cache
        for row in range(batch):
            assert_close(step.hidden[row, 0], whole[row].hidden[0, position])
            assert_close(step.features[row, 0], whole[row].features[0, position])
    assert cache is not None
    for row in range(batch):
        assert_close(cache.keys[1][row, :, :9], whole[row].cache.keys[1][0, :, :9])


def test_blocks_of_any_size_equal_the_whole_text(params: Any) -> None:
    tokens = tokens_of(2, 2, 11)
    whole = [whole_text(params, row) for row in tokens]
    cache, position = None, 0
    for size in (5, 1, 5):
        block = run(params, tokens[:, position : position + size], cache, position)
        for row in range(2):
            assert_close(block.hidden[row], whole[row].hidden[0, position : position + size])
        cache, position = block.cache, position + size


def test_rows_of_different_lengths_do_not_meet(params: Any) -> None:
    lengths = (3, 8, 5)
    texts = [tokens_of(10 + row, 1, length + 4) for row, length in enumerate(lengths)]
    # Right-padded with tokens, not zeros: what stands past a row's length must never be seen.
    prompts = tokens_of(3, 3, 8)
    for row, length in enumerate(lengths):
        prompts[row, :length] = texts[row][0, :length]
    cache = run(params, prompts).cache
    start = np.asarray(lengths, np.int32)
    for step in range(4):
        block = np.stack([text[0, length + step] for text, length in zip(texts, lengths, strict=True)])[:, None]
        output = run(params, block, cache, start + step)
        cache = output.cache
        for row, text in enumerate(texts):
            alone = whole_text(params, text)
            assert_close(output.hidden[row, 0], alone.hidden[0, lengths[row] + step])


def test_features_come_in_the_order_asked_for(params: Any) -> None:
    tokens = tokens_of(4, 2, 5)
    first, second = np.split(np.asarray(run(params, tokens, feature_layers=(0, 1)).features), 2, axis=-1)
    swapped = run(params, tokens, feature_layers=(1, 0, 1)).features
    np.testing.assert_array_equal(swapped, np.concatenate([second, first, second], axis=-1))
    assert run(params, tokens).features.shape == (2, 5, 0)


def test_case_h11_features_are_outputs_of_the_layers_named() -> None:
    """Layer i is built to output the constant i; the last one's output, normed, gives the logits."""
    config = dataclasses.replace(CONFIG, num_layers=5, attention_bias=True)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), random_params(0, config))
    generator = np.random.default_rng(1)
    for index, layer in enumerate(params["layers"]):
        layer["o_bias"] = np.full(config.hidden_size, min(index, 1), np.float32)
    params["final_norm"] = generator.normal(size=config.hidden_size).astype(np.float32)
    params["lm_head"] = generator.normal(size=(config.hidden_size, config.vocab_size)).astype(np.float32)
    params = jax.tree.map(jnp.asarray, params)
    tokens = jnp.asarray(tokens_of(5, 1, 4))
    cache, start = KVCache.zeros(config, 1, 6), jnp.zeros(1, jnp.int32)
    output = jitted(params, config, tokens, cache, start, feature_layers=(0, 2, 4))
    parts = np.split(np.asarray(output.features), 3, axis=-1)
    for part, constant in zip(parts, (0, 2, 4), strict=True):
        np.testing.assert_array_equal(part, constant)
    last = parts[2] / np.sqrt(np.mean(parts[2] ** 2, axis=-1, keepdims=True) + config.rms_norm_eps)
    by_hand = last * np.asarray(params["final_norm"]) @ np.asarray(params["lm_head"])
    assert_close(compute_logits(params, config, output.hidden), by_hand)


@pytest.mark.parametrize("layer", [-1, 2])
def test_case_h11_layers_that_do_not_exist_are_refused(params: Any, layer: int) -> None:
    with pytest.raises(ValueError, match=rf"`feature_layers` must be in \[0, 2\); got {layer}"):
        run(params, tokens_of(6, 1, 2), feature_layers=(0, layer))


def test_case_h8_padded_rows_get_no_probability() -> None:
    config = dataclasses.replace(CONFIG, vocab_size=16, num_valid_tokens=13)
    params = random_params(3, config)
    # The padded columns are made the largest of all.
    params["lm_head"] = params["lm_head"].at[:, 13:].set(100.0)
    hidden = jnp.abs(jax.random.normal(jax.random.key(4), (2, 3, config.hidden_size)))
    logits = compute_logits(params, config, hidden)
    assert logits.shape == (2, 3, 16)
    assert bool(jnp.all(logits[..., 13:] == -jnp.inf))
    assert_close(logits[..., :13], hidden @ params["lm_head"][:, :13])
    assert int(jnp.max(jnp.argmax(logits, axis=-1))) < 13
    np.testing.assert_allclose(jnp.sum(jax.nn.softmax(logits)[..., :13], axis=-1), 1.0, rtol=1e-6)


TREES = {
    "chain": DraftTree.chains(1, 4),
    "three chains": DraftTree.chains(3, 2),
    "bushy": DraftTree((-1, 0, 0, 1, 1, 2, 3, 5, 5)),
}


def path_to(tree: DraftTree, node: int) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, tree.parent[path[0]])
    return path


@pytest.mark.parametrize("name", sorted(TREES))
def test_packed_tree_equals_its_chains_run_apart(params: Any, name: str) -> None:
    tree = TREES[name]
    starts = np.asarray([4, 7, 6], np.int32)
    prompts = tokens_of(7, 3, 8)
    nodes = tokens_of(8, 3, tree.num_nodes)
    cache = run(params, prompts).cache
    packed = run(params, nodes, cache, starts, tree_mask=tree.ancestor_mask, depth=tree.depth, feature_layers=(0, 1))
    leaves = [node for node, children in enumerate(tree.children) if not children]
    for leaf in leaves:
        path = path_to(tree, leaf)
        for row, start in enumerate(starts):
            text = np.concatenate([prompts[row, :start], nodes[row, path]])[None]
            alone = whole_text(params, text)
            assert_close(packed.hidden[row, path], alone.hidden[0, start : text.size])
            assert_close(packed.features[row, path], alone.features[0, start : text.size])


def test_a_tree_run_depth_by_depth_equals_the_packed_tree(params: Any) -> None:
    tree = TREES["three chains"]
    starts = np.asarray([4, 7, 6], np.int32)
    nodes = tokens_of(8, 3, tree.num_nodes)
    cache = run(params, tokens_of(7, 3, 8)).cache
    packed = run(params, nodes, cache, starts, tree_mask=tree.ancestor_mask, depth=tree.depth)
    for part in (slice(0, 1), slice(1, 4), slice(4, 7)):
        options = {"tree_mask": tree.ancestor_mask[part], "depth": tree.depth[part]}
        offset = jnp.int32(part.start)
        output = run(params, nodes[:, part], cache, starts, block_offset=offset, **options)
        cache = output.cache
        assert_close(output.hidden, packed.hidden[:, part])
    for row, start in enumerate(starts):
        end = start + tree.num_nodes
        assert_close(cache.values[1][row, :, :end], packed.cache.values[1][row, :, :end])


@pytest.mark.parametrize("name", sorted(TREES))
def test_committed_path_equals_a_fresh_prefill(params: Any, name: str) -> None:
    tree = TREES[name]
    starts = np.asarray([4, 7, 6], np.int32)
    prompts = tokens_of(9, 3, 8)
    nodes = tokens_of(11, 3, tree.num_nodes)
    deepest = max(range(tree.num_nodes), key=lambda node: (tree.depth[node], node))
    # A full path, one that stops early, and nothing but the root.
    accepted = [path_to(tree, deepest), path_to(tree, deepest)[:2], [0]]
    path = np.full((3, tree.max_depth + 1), -1, np.int32)
    for row, taken in enumerate(accepted):
        path[row, : len(taken)] = taken
    cache = run(params, prompts).cache
    packed = run(params, nodes, cache, starts, tree_mask=tree.ancestor_mask, depth=tree.depth, feature_layers=(0, 1))
    committed = jax.jit(commit_path, static_argnames="tree")(
        packed.cache, jnp.asarray(starts), jnp.asarray(path), tree=tree
    )
    following = tokens_of(12, 3, 1)
    after = run(params, following, committed, starts + np.asarray([len(taken) for taken in accepted], np.int32))
    for row, start in enumerate(starts):
        text = np.concatenate([prompts[row, :start], nodes[row, accepted[row]], following[row]])[None]
        fresh = whole_text(params, text)
        for moved, expected in ((after.cache.keys, fresh.cache.keys), (after.cache.values, fresh.cache.values)):
            for layer in range(CONFIG.num_layers):
                assert_close(moved[layer][row, :, : text.shape[1]], expected[layer][0, :, : text.shape[1]])
        assert_close(after.hidden[row, 0], fresh.hidden[0, text.size - 1])


def test_nothing_is_moved_for_one_chain(params: Any) -> None:
    cache = KVCache.zeros(CONFIG, 2, SLOTS)
    path = jnp.asarray([[0, 1, -1], [0, -1, -1]])
    assert commit_path(cache, jnp.asarray([2, 3]), path, tree=DraftTree.chains(1, 2)) is cache


def test_committing_touches_no_other_slot(params: Any) -> None:
    generator = np.random.default_rng(14)
    shape = (2, CONFIG.num_kv_heads, SLOTS, CONFIG.head_dim)
    arrays = tuple(jnp.asarray(generator.normal(size=shape), jnp.float32) for _ in range(2))
    cache = KVCache(keys=arrays, values=arrays[::-1])
    moved = commit_path(cache, jnp.asarray([5, 9]), jnp.asarray([[0, 2, 5], [0, 3, -1]]))
    for before, after in zip(cache.keys + cache.values, moved.keys + moved.values, strict=True):
        expected = np.array(before)
        expected[0, :, 6], expected[0, :, 7] = before[0, :, 7], before[0, :, 10]
        expected[1, :, 10] = before[1, :, 12]
        np.testing.assert_array_equal(after, expected)


def test_last_slot_of_the_cache_can_be_used(params: Any) -> None:
    tokens = tokens_of(15, 1, SLOTS)
    whole = whole_text(params, tokens)
    tail = run(params, tokens[:, -1:], whole.cache, SLOTS - 1, feature_layers=(0, 1))
    assert_close(tail.hidden[:, 0], whole.hidden[:, -1])


def test_bfloat16_stays_near_float32(params: Any) -> None:
    tokens = tokens_of(16, 2, 5)
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    cache = KVCache.zeros(CONFIG, 2, SLOTS, jnp.bfloat16)
    start = jnp.zeros(2, jnp.int32)
    output = jitted(low, CONFIG, jnp.asarray(tokens), cache, start, feature_layers=(1,))
    assert output.hidden.dtype == output.features.dtype == output.cache.keys[0].dtype == jnp.bfloat16
    logits = compute_logits(low, CONFIG, output.hidden)
    assert logits.dtype == jnp.float32
    # The same rounded weights in float32: what remains is rounding of activations, 8 bits a layer.
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), low)
    reference = compute_logits(wide, CONFIG, run(wide, tokens).hidden)
    assert float(jnp.sqrt(jnp.mean((logits - reference) ** 2)) / jnp.std(reference)) < 0.03
    step = jitted(low, CONFIG, jnp.asarray(tokens[:, :1]), output.cache, start)
    np.testing.assert_allclose(
        step.hidden[:, 0].astype(jnp.float32), output.hidden[:, 0].astype(jnp.float32), atol=0.06
    )


def test_single_query_of_one_row_in_bfloat16(params: Any) -> None:
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    tokens, start = jnp.asarray(tokens_of(17, 1, 6)), jnp.zeros(1, jnp.int32)
    whole = jitted(low, CONFIG, tokens, KVCache.zeros(CONFIG, 1, SLOTS, jnp.bfloat16), start)
    step = jitted(low, CONFIG, tokens[:, 5:], whole.cache, start + 5)
    np.testing.assert_allclose(step.hidden[:, 0].astype(jnp.float32), whole.hidden[:, 5].astype(jnp.float32), atol=0.06)


def test_what_does_not_fit_is_refused(params: Any) -> None:
    cache = KVCache.zeros(CONFIG, 2, 4)
    with pytest.raises(ValueError, match=r"must fit into the cache \(4 slots\); got 5 columns"):
        run(params, tokens_of(18, 2, 5), cache)
    with pytest.raises(ValueError, match="must have the cache's 2 rows; got 3"):
        run(params, tokens_of(18, 3, 2), cache)
    with pytest.raises(ValueError, match="`tree_mask` must come with `depth`"):
        run(params, tokens_of(18, 2, 2), cache, tree_mask=np.tril(np.ones((2, 2), bool)))
    with pytest.raises(ValueError, match="the cache must have 2 layers; got 3"):
        run(params, tokens_of(18, 2, 2), KVCache.zeros((3, 2, 8), 2, 4))
    with pytest.raises(ValueError, match="`max_length` must be at least 1; got 0"):
        KVCache.zeros(CONFIG, 1, 0)


def test_initial_parameters_have_the_shapes_of_the_table() -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True, attention_bias=True)
    params = init_params(jax.random.key(0), config, jnp.bfloat16, scale=0.5)
    assert jax.tree.map(lambda leaf: leaf.shape, params) == parameter_shapes(config)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert bool(jnp.all(params["layers"][1]["post_attention_norm"] == 1))
    assert 0.4 < float(jnp.std(params["lm_head"].astype(jnp.float32))) < 0.6
    np.testing.assert_array_equal(params["lm_head"], params["embed_tokens"].T)
