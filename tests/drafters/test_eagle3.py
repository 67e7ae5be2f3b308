"""EAGLE-3 decoding: the cache after any acceptance equals a fresh prefill; trees, positions, limits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafters import eagle3
from specjax.drafters.base import Drafter
from specjax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from specjax.drafters.eagle3_init import init_drafter
from specjax.drafters.eagle3_layer import compute_logits, default_feature_layers, num_params, parameter_shapes
from specjax.heads import HeadConfig, HeadSource, get_head, head_kinds
from specjax.models import ModelConfig, init_params
from specjax.testing.eagle3_numpy import Eagle3Reference
from specjax.types import DraftTree

TARGET = ModelConfig(
    vocab_size=32, hidden_size=8, intermediate_size=16, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=4
)
VOCAB = TARGET.vocab_size
WIDTH = 3 * TARGET.hidden_size
SLOTS = 40
CHAIN = DraftTree.chains(1, 3)
CHAINS = DraftTree.chains(3, 3)


@pytest.fixture(scope="module")
def config():
    return Eagle3Config.for_target(TARGET, rank=3)


@pytest.fixture(scope="module")
def params(config):
    target_params = init_params(jax.random.key(5), TARGET, scale=0.3)
    drafter_params = init_drafter(
        jax.random.key(6), config, target_params, TARGET, head_init="random", warm_start=False
    )
    # Larger matrices than a fresh model's, so that the laws are far from flat and from one another.
    drafter_params = jax.tree.map(lambda leaf: leaf * jnp.float32(2.0) if leaf.ndim == 2 else leaf, drafter_params)
    return {**drafter_params, "embed_tokens": target_params["embed_tokens"]}


extend = jax.jit(Eagle3Drafter.extend, static_argnums=0)
propose = jax.jit(Eagle3Drafter.propose, static_argnums=0, static_argnames=("tree", "to_laws"))


def soft_laws(logits):
    return jax.nn.log_softmax(logits, axis=-1)


def greedy_laws(logits):
    return jnp.where(jnp.arange(VOCAB) == jnp.argmax(logits, axis=-1)[..., None], jnp.float32(0), -jnp.inf)


def row_keys(number, batch):
    return jax.random.split(jax.random.key(number), batch)


def text_and_features(generator, batch, length):
    tokens = jnp.asarray(generator.integers(0, VOCAB, (batch, length)), jnp.int32)
    return tokens, jnp.asarray(generator.standard_normal((batch, length, WIDTH)), jnp.float32)


def prefill(drafter, params, tokens, features, lengths, tree):
    """A fresh state that was fed the first `lengths` entries: token t + 1 with features of position t."""
    state = drafter.init_state(tokens.shape[0], SLOTS, tree)
    count = jnp.asarray(lengths, jnp.int32)
    return extend(drafter, params, state, tokens=tokens[:, 1:], features=features[:, :-1], count=count)


def run_propose(drafter, params, state, last_token, tree, to_laws, number=0):
    proposal, _ = propose(
        drafter,
        row_keys(number, last_token.shape[0]),
        params,
        state,
        last_token=last_token,
        tree=tree,
        max_depth=jnp.full(last_token.shape, 3, jnp.int32),
        to_laws=to_laws,
    )
    return proposal


def assert_same_memory(state, fresh):
    """Equal committed entries; scratch slots may hold anything."""
    np.testing.assert_array_equal(state.length, fresh.length)
    np.testing.assert_allclose(state.hidden, fresh.hidden, rtol=2e-5, atol=2e-5)
    for row, length in enumerate(np.asarray(fresh.length)):
        for name in ("keys", "values"):
            ours, theirs = getattr(state, name)[row, :, :length], getattr(fresh, name)[row, :, :length]
            np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)


def test_it_is_a_drafter(config):
    drafter = Eagle3Drafter(config)
    assert isinstance(drafter, Drafter)
    assert hash(drafter) == hash(Eagle3Drafter(Eagle3Config.for_target(TARGET, rank=3)))
    assert drafter.feature_layers == (1, 1, 1)


@pytest.mark.parametrize("tree", [CHAIN, CHAINS], ids=["chain", "chains"])
def test_case_k2_k3_state_after_acceptance_equals_a_fresh_prefill(config, params, tree):
    """Five steps of random acceptance, full ones included, rows of different lengths."""
    generator = np.random.default_rng(11)
    drafter = Eagle3Drafter(config)
    tokens, features = text_and_features(generator, 3, 30)
    lengths = np.array([4, 1, 7])
    state = prefill(drafter, params, tokens, features, lengths, tree)
    acceptances = [np.array([3, 0, 1]), np.array([3, 3, 3]), *generator.integers(0, 4, (3, 3))]
    rows = np.arange(3)
    for number, accepted in enumerate(acceptances):
        _, state = propose(
            drafter,
            row_keys(number, 3),
            params,
            state,
            last_token=tokens[rows, lengths],
            tree=tree,
            max_depth=jnp.full(3, 3, jnp.int32),
            to_laws=soft_laws,
        )
        # The text goes on with other tokens than were drafted: only committed ones may leave a trace.
        steps = lengths[:, None] + np.arange(4)
        fed = {"tokens": tokens[rows[:, None], steps + 1], "features": features[rows[:, None], steps]}
        state = extend(drafter, params, state, count=jnp.asarray(accepted + 1, jnp.int32), **fed)
        lengths = lengths + accepted + 1
        fresh = prefill(drafter, params, tokens, features, lengths, tree)
        assert_same_memory(state, fresh)
        ours, theirs = (run_propose(drafter, params, s, tokens[rows, lengths], tree, soft_laws) for s in (state, fresh))
        np.testing.assert_allclose(ours.draft_log_laws, theirs.draft_log_laws, rtol=5e-5, atol=5e-5)


def test_a_row_that_is_fed_nothing_keeps_its_state(config, params):
    drafter = Eagle3Drafter(config)
    tokens, features = text_and_features(np.random.default_rng(1), 3, 30)
    state = prefill(drafter, params, tokens, features, [5, 3, 0], CHAIN)
    fed = {"tokens": tokens[:, :4], "features": features[:, :4]}
    assert_same_memory(extend(drafter, params, state, count=jnp.zeros(3, jnp.int32), **fed), state)


def test_prefill_in_pieces_equals_prefill_at_once(config, params):
    drafter = Eagle3Drafter(config)
    tokens, features = text_and_features(np.random.default_rng(2), 3, 30)
    whole = prefill(drafter, params, tokens, features, [10, 10, 10], CHAIN)
    state = drafter.init_state(3, SLOTS, CHAIN)
    for start, count in ((0, 4), (4, 1), (5, 4), (9, 1)):
        fed = {"tokens": tokens[:, start + 1 : start + 5], "features": features[:, start : start + 4]}
        state = extend(drafter, params, state, count=jnp.full(3, count, jnp.int32), **fed)
    assert_same_memory(state, whole)


def test_case_k1_positions_are_contiguous(config, params, monkeypatch):
    """The positions given to the rotary embedding in prefill, drafting and feeding, for every number accepted."""
    seen = []
    original = eagle3.rope_tables

    def recording(positions, frequencies):
        jax.debug.callback(lambda p: seen.append(np.asarray(p)[0].tolist()), positions, ordered=True)
        return original(positions, frequencies)

    monkeypatch.setattr(eagle3, "rope_tables", recording)
    extend = jax.jit(Eagle3Drafter.extend, static_argnums=0)
    propose = jax.jit(Eagle3Drafter.propose, static_argnums=0, static_argnames=("tree", "to_laws"))
    drafter = Eagle3Drafter(config)
    tokens, features = text_and_features(np.random.default_rng(3), 1, 30)
    state = drafter.init_state(1, SLOTS, CHAIN)
    length = 0
    for accepted in (3, 0, 1, 2, 3):
        fed = {
            "tokens": tokens[:, length + 1 : length + 5],
            "features": features[:, length : length + 4],
            "count": jnp.asarray([accepted + 1], jnp.int32),
        }
        state = extend(drafter, params, state, **fed)
        jax.effects_barrier()
        assert seen.pop() == list(range(length, length + 4))
        length += accepted + 1
        _, state = propose(
            drafter,
            row_keys(0, 1),
            params,
            state,
            last_token=tokens[:, length],
            tree=CHAIN,
            max_depth=jnp.asarray([3], jnp.int32),
            to_laws=soft_laws,
        )
        jax.effects_barrier()
        assert seen == [[length], [length + 1]]
        seen.clear()


def test_case_k8_shorter_context_than_the_text_is_an_error(config):
    short = Eagle3Config.for_target(TARGET, rank=3, max_position_embeddings=8)
    tree = DraftTree.chains(1, 3)
    with pytest.raises(ValueError, match=r"`max_position_embeddings` .* longest text \(28 tokens\); got 8"):
        Eagle3Drafter(short).init_state(1, 32, tree)
    Eagle3Drafter(short).init_state(1, 8 + tree.num_nodes, tree)
    assert config.max_position_embeddings == TARGET.max_position_embeddings


@pytest.mark.parametrize(
    "tree",
    [CHAIN, CHAINS, DraftTree((-1, 0, 0, 1, 1, 2, 3))],
    ids=["chain", "chains", "tree"],
)
def test_every_law_is_that_of_its_own_path(config, params, tree):
    """Each internal node's law equals the plain NumPy EAGLE-3 along the node's path."""
    drafter = Eagle3Drafter(config)
    tokens, features = text_and_features(np.random.default_rng(4), 3, 30)
    lengths = np.array([9, 5, 1])
    state = prefill(drafter, params, tokens, features, lengths, tree)
    proposal = run_propose(drafter, params, state, tokens[np.arange(3), lengths], tree, soft_laws, number=7)
    for row, length in enumerate(lengths.tolist()):
        reference = Eagle3Reference(config, params)
        for entry in range(length):
            state_in = reference.combine(np.asarray(features[row, entry]))
            output = reference.add(state_in, int(tokens[row, entry + 1]), entry, range(entry))
        outputs, entries = {0: output}, {}
        for node in tree.internal:
            if node > 0:
                parent = tree.parent[node]
                ancestors = [entries[other] for other in entries if tree.ancestor_mask[node, other]]
                entries[node] = len(reference.keys)
                outputs[node] = reference.add(
                    reference.fed_back(outputs[parent]),
                    int(proposal.tokens[row, node]),
                    length + tree.depth[node] - 1,
                    [*range(length), *ancestors],
                )
            logits = reference.logits(outputs[node])
            law = logits - np.log(np.sum(np.exp(logits)))
            np.testing.assert_allclose(
                proposal.draft_log_laws[row, tree.internal.index(node)], law, rtol=5e-5, atol=5e-5
            )


def two_token_laws(logits):
    kept = logits >= jnp.sort(logits, axis=-1)[..., -2:-1]
    return jax.nn.log_softmax(jnp.where(kept, logits * jnp.float32(0.2), -jnp.inf), axis=-1)


@pytest.mark.parametrize("laws", [greedy_laws, two_token_laws])
def test_tokens_are_drawn_from_the_reported_laws(config, params, laws):
    """Greedy laws give their argmax; truncated laws never give a token outside their support."""
    drafter = Eagle3Drafter(config)
    tokens, features = text_and_features(np.random.default_rng(5), 3, 30)
    state = prefill(drafter, params, tokens, features, [9, 5, 1], CHAINS)
    seen = set()
    for number in range(20):
        proposal = run_propose(drafter, params, state, tokens[:, 9], CHAINS, laws, number)
        for child in range(1, CHAINS.num_nodes):
            law = proposal.draft_log_laws[:, CHAINS.internal.index(CHAINS.parent[child])]
            chosen = jnp.take_along_axis(law, proposal.tokens[:, child : child + 1], axis=1)
            assert np.all(np.isfinite(chosen))
        seen.add(tuple(np.asarray(proposal.tokens[0])))
    assert (len(seen) == 1) == (laws is greedy_laws)


def test_drafts_do_not_depend_on_neighbours(config, params):
    drafter = Eagle3Drafter(config)
    tokens, features = text_and_features(np.random.default_rng(6), 3, 30)
    state = prefill(drafter, params, tokens, features, [6, 6, 6], CHAINS)
    together = run_propose(drafter, params, state, tokens[:, 6], CHAINS, soft_laws)
    others = np.array([2, 1, 0])
    swapped = jax.tree.map(lambda leaf: leaf[others], state)
    keys = row_keys(0, 3).at[0].set(jax.random.key(77))
    apart, _ = propose(
        drafter,
        keys,
        params,
        swapped,
        last_token=tokens[others, 6],
        tree=CHAINS,
        max_depth=jnp.full(3, 3, jnp.int32),
        to_laws=soft_laws,
    )
    np.testing.assert_array_equal(together.tokens[1], apart.tokens[1])
    chains = [tuple(np.asarray(together.tokens[0])[1 + chain :: 3]) for chain in range(3)]
    assert len(set(chains)) > 1


def warm_laws(logits):
    return jax.nn.log_softmax(logits * jnp.float32(0.3), axis=-1)


def test_siblings_are_independent_draws_from_the_law(config, params):
    """Chi-squared over 20,000 keys, 31 degrees of freedom.

    A literal key, so the outcome is fixed; over keys the false-alarm rate at 90 is below 1e-6.
    """
    drafter = Eagle3Drafter(config)
    tree = DraftTree.chains(2, 1)
    draws = 20_000
    tokens, features = text_and_features(np.random.default_rng(7), 3, 30)
    state = prefill(drafter, params, tokens, features, [4, 4, 4], tree)
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf[:1], draws, axis=0), state)
    # The caches play no part in a tree of depth one.
    many = dataclasses.replace(many, keys=many.keys[:, :, :0], values=many.values[:, :, :0])
    proposal = run_propose(drafter, params, many, jnp.repeat(tokens[:1, 4], draws), tree, warm_laws, number=123)
    expected = draws * np.exp(np.asarray(proposal.draft_log_laws[0, 0], np.float64))
    assert expected.min() > 5
    for child in (1, 2):
        counts = np.bincount(np.asarray(proposal.tokens[:, child]), minlength=VOCAB)
        assert np.sum((counts - expected) ** 2 / expected) < 90
    pairs = np.mean(np.asarray(proposal.tokens[:, 1]) == np.asarray(proposal.tokens[:, 2]))
    probability = np.sum((expected / draws) ** 2)
    # Five standard deviations: two siblings agree as often as independent draws do.
    assert abs(pairs - probability) < 5 * np.sqrt(probability * (1 - probability) / draws)


def test_depth_limits(config, params):
    drafter = Eagle3Drafter(config)
    tokens, features = text_and_features(np.random.default_rng(8), 3, 30)
    state = prefill(drafter, params, tokens, features, [0, 4, 4], CHAIN)
    proposal, _ = propose(
        drafter,
        row_keys(0, 3),
        params,
        state,
        last_token=tokens[:, 0],
        tree=CHAIN,
        max_depth=jnp.asarray([3, 2, 9], jnp.int32),
        to_laws=soft_laws,
    )
    np.testing.assert_array_equal(proposal.max_depth, [0, 2, 3])
    assert np.all(np.isfinite(proposal.draft_log_laws))


def test_case_k14_a_tree_without_drafts(config, params):
    drafter = Eagle3Drafter(config)
    tree = DraftTree.chains(1, 0)
    tokens, features = text_and_features(np.random.default_rng(9), 3, 30)
    state = prefill(drafter, params, tokens, features, [3, 2, 1], tree)
    proposal = run_propose(drafter, params, state, tokens[:, 3], tree, soft_laws)
    np.testing.assert_array_equal(proposal.tokens, tokens[:, 3:4])
    assert proposal.draft_log_laws.shape == (3, 0, VOCAB)
    np.testing.assert_array_equal(proposal.max_depth, [0, 0, 0])


def test_case_h8_padded_ids_are_never_drafted(params):
    padded = Eagle3Config.for_target(TARGET, rank=3, num_valid_tokens=20)
    logits = compute_logits(params, padded, jnp.ones((2, 8), jnp.float32))
    assert np.all(np.isneginf(logits[:, 20:]))
    assert np.all(np.isfinite(logits[:, :20]))


@pytest.mark.parametrize("kind", [kind for kind in head_kinds() if "timing only" not in kind])
def test_case_h8_no_head_drafts_a_padded_id(params, kind):
    options = {"candidates": 6} if "candidates" in {option.name for option in get_head(kind).options} else {}
    padded = Eagle3Config.for_target(TARGET, head_kind=kind, head_options=options, num_valid_tokens=20)
    head = get_head(kind)
    weight = np.random.default_rng(4).standard_normal((padded.hidden_size, VOCAB)).astype(np.float32)
    # Rows of padded ids point where the states do: a head that looked at them would choose them before all others.
    weight[:, 20:] = 9.0
    counts = np.where(np.arange(VOCAB) < 20, 5, 0)
    source = HeadSource(weight=weight, method="svd", answer_counts=counts, corpus_counts=counts, num_valid_tokens=20)
    config = dataclasses.replace(padded, head=head.fit(padded.head, source))
    states = 1.0 + jax.random.uniform(jax.random.key(3), (2, 5, 8))
    head_params = head.start(jax.random.key(1), config.head, source)
    if "router" in head_params:
        of_padded_ids = np.all(np.asarray(head_params["ids"]) >= 20, axis=1)
        assert of_padded_ids.sum() >= 8
        head_params |= {name: jnp.ones_like(head_params[name]) for name in ("router", "hidden") if name in head_params}
        head_params["router"] *= jnp.where(of_padded_ids, 9.0, 1.0)
    logits = compute_logits({**params, "head": head_params}, config, states)
    assert np.all(np.isneginf(logits[..., 20:]))
    assert np.all(np.isfinite(logits).any(axis=-1)), "nothing is left to draft"


def test_only_independent_draws_are_supported(config):
    with pytest.raises(ValueError, match="`draws` of the tree must be 'iid'"):
        Eagle3Drafter(config).init_state(1, 32, DraftTree.chains(2, 2, "without_replacement"))


def test_parameter_count_of_the_smollm2_drafter():
    target = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
    )
    config = Eagle3Config.for_target(target)
    shapes = jax.tree.leaves(parameter_shapes(config), is_leaf=lambda node: isinstance(node, tuple))
    assert num_params(config) == sum(int(np.prod(shape)) for shape in shapes) + 72 * (576 + 49152)
    assert config.feature_layers == (1, 14, 26)


def test_feature_layers_of_shallow_targets_are_in_range_and_order():
    for num_layers in range(1, 40):
        layers = default_feature_layers(num_layers)
        assert list(layers) == sorted(layers)
        assert layers[0] >= 0
        assert layers[2] < num_layers


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"num_heads": 3}, "`num_kv_heads` must divide `num_heads`; got 2 and 3"),
        ({"intermediate_size": 0}, "`intermediate_size` must be a positive integer; got 0"),
        ({"feature_layers": (1, 2)}, r"`feature_layers` must be three layers, low to high; got \(1, 2\)"),
        ({"head": HeadConfig("full", 4, 32)}, "`head.hidden_size` must be 8; got 4"),
        ({"num_valid_tokens": 33}, r"`num_valid_tokens` must be in \[1, vocab_size = 32\]; got 33"),
        ({"norm_before_fc": True, "fc_norm": True}, "must not both be true"),
    ],
)
def test_impossible_configurations_are_named(overrides, message):
    with pytest.raises(ValueError, match=message):
        Eagle3Config.for_target(TARGET, **overrides)
