"""The rules against slow NumPy versions that were written from the papers' statements."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.testing.draft_trees import tree_of_widths
from specjax.testing.instances import edge_instances, random_instance
from specjax.testing.rules_numpy import closed_forms, single_draft, token_by_token, traversal
from specjax.testing.rules_numpy.latent_times import Drafted, TreeNoise, stop_by_latent_times, stop_by_second_time
from specjax.testing.rules_numpy.outcomes import Outcomes, first_iteration_law
from specjax.types import DRAW_DETERMINISTIC, DRAW_IID, DraftTree, Proposal
from specjax.verification import get_verifier
from specjax.verification.carry import log_path_ratio
from specjax.verification.enumerate import Enumerator
from specjax.verification.latent_times import Gaps, follow_winners, node_selections, propagate_times
from specjax.verification.multi_draft_block import node_log_ratio
from specjax.verification.spectr_gbv import accept_below_second
from specjax.verification.start_curve import start_curve
from specjax.verification.trees import chain_table, draft_row_table

GIVEN_DRAFTS = {
    "token": single_draft.token,
    "block": single_draft.block,
    "greedy_block": single_draft.greedy_block,
    "spectr": token_by_token.spectr,
    "recursive_rejection": token_by_token.recursive_rejection,
    "traversal": traversal.traversal,
}
CLOSED_FORMS = {"multi_draft_block": closed_forms.multi_draft_block, "spectr_gbv": closed_forms.spectr_gbv}
INSTANCES = [random_instance(2, 0), random_instance(2, 1, 0.3)]
INSTANCES += [edge_instances(2)[name] for name in ("equal", "zeros_in_draft", "zeros_in_target", "one_hot_draft")]


def largest_difference(one: Outcomes, other: Outcomes) -> float:
    return max(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


@pytest.mark.parametrize("name", [*GIVEN_DRAFTS, *CLOSED_FORMS])
def test_first_iteration_law_equals_the_numpy_rule(name: str) -> None:
    num_drafts = 2 if get_verifier(name).multi_draft else 1
    for instance in INSTANCES:
        if name in CLOSED_FORMS:
            expected = CLOSED_FORMS[name](instance, 2, num_drafts)
        else:
            expected = first_iteration_law(GIVEN_DRAFTS[name], instance, 2, num_drafts)
        found = Enumerator(get_verifier(name), DraftTree.chains(num_drafts, 2), instance).first_iteration_law()
        assert largest_difference(found, expected) <= 1e-12, instance.name


def test_one_chain_makes_the_greedy_and_the_block_rules_one_law() -> None:
    tree = DraftTree.chains(1, 2)
    for one, other in (("spectr_gbv", "greedy_block"), ("multi_draft_block", "block"), ("traversal", "block")):
        for instance in INSTANCES:
            laws = [Enumerator(get_verifier(name), tree, instance).first_iteration_law() for name in (one, other)]
            assert largest_difference(*laws) <= 1e-12


TREES = {
    "chains": DraftTree.chains(3, 3),
    "binary": tree_of_widths((2, 2)),
    "long": tree_of_widths((2, 1, 2)),
    "wide": tree_of_widths((3, 2)),
    "mixed": tree_of_widths((2, 2, 1), (DRAW_DETERMINISTIC, DRAW_IID, DRAW_DETERMINISTIC)),
}


@pytest.mark.parametrize(
    ("shape", "uncapped"), [*((shape, False) for shape in TREES), ("chains", True), ("mixed", True)]
)
def test_packed_recursion_equals_the_plain_one_on_the_same_noise(shape: str, uncapped: bool) -> None:
    tree = TREES[shape]
    kinds = node_selections(tree, "uncapped" if uncapped else "minimum")
    rng = np.random.default_rng(7)
    with jax.enable_x64(True):
        decide = jax.jit(lambda *arrays: _packed_stop(tree, kinds, *arrays))
        for trial in range(60):
            drafted, noise = _random_drafted(rng, tree, vocab_size=4, max_depth=tree.max_depth - trial % 2)
            expected = stop_by_latent_times(drafted, noise, uncapped)
            stop, overflowed, token = decide(*_as_arrays(drafted, noise))
            assert (int(stop), int(token) if overflowed else None) == expected


def test_spectr_gbv_stops_where_the_literal_algorithm_does() -> None:
    tree = DraftTree.chains(3, 3)
    chains = chain_table(tree, "spectr_gbv")
    kinds = node_selections(tree, "minimum")
    rng = np.random.default_rng(8)

    def packed(tokens: jax.Array, draft: jax.Array, target: jax.Array, max_depth: jax.Array, *noise: jax.Array):
        proposal, times = _packed_times(tree, kinds, tokens, draft, target, max_depth, *noise)
        log_z = log_path_ratio(proposal, target, jnp.zeros((), target.dtype))
        return accept_below_second(proposal, times, log_z)

    with jax.enable_x64(True):
        decide = jax.jit(packed)
        for trial in range(100):
            drafted, noise = _random_drafted(rng, tree, vocab_size=3, max_depth=3 - trial % 2)
            assert int(decide(*_as_arrays(drafted, noise))) == stop_by_second_time(drafted, chains, noise)


def _random_drafted(
    rng: np.random.Generator, tree: DraftTree, vocab_size: int, max_depth: int
) -> tuple[Drafted, TreeNoise]:
    def laws() -> np.ndarray:
        rows = rng.dirichlet(np.full(vocab_size, 0.6), size=tree.num_nodes)
        rows[rng.random(rows.shape) < 0.1] = 0
        rows[:, 0] += 1e-3
        return rows / rows.sum(axis=1, keepdims=True)

    draft, target = laws(), laws()
    tokens = np.zeros(tree.num_nodes, np.int32)
    child_token = np.zeros(tree.num_nodes, np.int32)
    node_token = np.zeros(tree.num_nodes, np.int32)
    for node, parent in enumerate(tree.parent):
        if parent >= 0:
            tokens[node] = rng.choice(vocab_size, p=draft[parent])
            gap = np.maximum(target[parent] - draft[parent], 0)
            child_token[node] = rng.choice(vocab_size, p=gap / gap.sum())
        node_token[node] = rng.choice(vocab_size, p=target[node])
    uniforms = rng.random((3, tree.num_nodes))
    noise = TreeNoise(uniforms[0], child_token, uniforms[1], node_token, uniforms[2])
    return Drafted(tree, tokens, draft, target, max_depth), noise


def _as_arrays(drafted: Drafted, noise: TreeNoise) -> tuple:
    with np.errstate(divide="ignore"):
        draft = np.log(drafted.draft)[list(drafted.tree.internal)]
        target = np.log(drafted.target)
    numbers = (noise.leaf, noise.child_token, noise.child_uniform, noise.node_token, noise.node_uniform)
    return drafted.tokens, draft, target, np.int32(drafted.max_depth), *numbers


def _packed_times(tree, kinds, tokens, draft, target, max_depth, leaf, child_token, child_uniform, node_token, uniform):
    proposal = Proposal(tokens=tokens, draft_log_laws=draft, max_depth=max_depth, tree=tree)
    parents = np.maximum(np.asarray(tree.parent, np.int32), 0)
    gap_ratio = draft[draft_row_table(tree)[parents], child_token] - target[parents, child_token]
    curves = {
        node: start_curve(draft[draft_row_table(tree)[node]], target[node], len(tree.children[node]))
        for node, kind in enumerate(kinds)
        if kind == "uncapped"
    }
    child_gaps = Gaps(child_token, jnp.minimum(gap_ratio, 0), child_uniform)
    node_gaps = Gaps(node_token, jnp.zeros_like(uniform), uniform)
    ratio = node_log_ratio(proposal, target)
    times = propagate_times(tree, kinds, max_depth, tokens, ratio, jnp.log(leaf), child_gaps, node_gaps, curves)
    return proposal, times


def _packed_stop(tree, kinds, tokens, draft, target, max_depth, *noise):
    _, times = _packed_times(tree, kinds, tokens, draft, target, max_depth, *noise)
    stop, overflowed = follow_winners(tree, max_depth, times)
    return stop, overflowed, times.gap_token[stop]
