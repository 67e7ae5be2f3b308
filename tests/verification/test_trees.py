"""Packed trees: exact laws for i.i.d., top-k and mixed children, the accepted-mass formula, distinct siblings."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.testing.draft_trees import tree_of_widths
from specjax.testing.instances import Instance, Prefix, edge_instances, padded_vocabulary, random_instance
from specjax.testing.rules_numpy.token_by_token import recursive_rejection_distinct
from specjax.types import DRAW_DETERMINISTIC, DRAW_IID, DRAW_WITHOUT_REPLACEMENT, DraftTree
from specjax.verification import get_verifier
from specjax.verification.enumerate import Enumerator

SHAPES = {"binary": (2, 2), "wide": (3, 2), "long": (2, 1, 2)}
INSTANCES = {
    "random": random_instance(2, 0),
    "zeros": edge_instances(2)["zeros_in_target"],
    "scarce": edge_instances(2)["scarce"],
    "one_hot": edge_instances(2)["one_hot_target"],
}


def accepted_mass(instance: Instance, widths: tuple[int, ...]) -> float:
    """sum_v q_v (A_1 o .. o A_i)(1) over token sequences, A(r) = 1 - (1 - min(rho r, 1))^n."""

    def total(path: list[tuple[float, int]], prefix: Prefix, joint: float) -> float:
        if len(prefix) == len(widths):
            return 0.0
        mass = 0.0
        for token in range(instance.vocab_size):
            q = float(instance.target(prefix)[token])
            if q == 0:
                continue
            ratio = float(instance.draft(prefix)[token]) / q
            steps = [*path, (ratio, widths[len(prefix)])]
            time = 1.0
            for rho, count in reversed(steps):
                time = 1 - (1 - min(rho * time, 1.0)) ** count
            mass += joint * q * time + total(steps, (*prefix, token), joint * q)
        return mass

    return total([], (), 1.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("instance", INSTANCES)
def test_iid_trees_are_exact_and_accept_what_the_formula_says(shape: str, instance: str) -> None:
    widths, laws = SHAPES[shape], INSTANCES[instance]
    enumerator = Enumerator(get_verifier("multi_draft_block"), tree_of_widths(widths), laws)
    assert enumerator.law_error(len(widths) + 1) <= 1e-12
    assert enumerator.expected_accepted() == pytest.approx(accepted_mass(laws, widths), abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_uncapped_scores_are_exact_and_never_accept_less_at_any_node(shape: str) -> None:
    widths = SHAPES[shape]
    tree = tree_of_widths(widths)
    for laws in INSTANCES.values():
        minimum = Enumerator(get_verifier("multi_draft_block"), tree, laws)
        uncapped = Enumerator(get_verifier("multi_draft_block_uncapped"), tree, laws)
        assert uncapped.law_error(len(widths) + 1) <= 1e-12
        for prefix, mass in prefix_masses(minimum).items():
            assert prefix_masses(uncapped)[prefix] >= mass - 1e-12


def prefix_masses(enumerator: Enumerator) -> dict[Prefix, float]:
    """P(prefix accepted) for every prefix."""
    masses: dict[Prefix, float] = {}
    for emission in enumerator.iteration():
        for length in range(len(emission.accepted) + 1):
            prefix = emission.accepted[:length]
            masses[prefix] = masses.get(prefix, 0.0) + emission.probability
    return masses


def test_uncapped_scores_accept_more_where_a_token_is_scarce() -> None:
    # Once the first token's scores have ended, a gap-filled child competes where an uncapped one has gone.
    laws = Instance("scarce", 3, lambda _: np.array([0.5, 0.45, 0.05]), lambda _: np.array([0.05, 0.3, 0.65]))
    tree = DraftTree.chains(2, 1)
    capped = Enumerator(get_verifier("multi_draft_block"), tree, laws).expected_accepted()
    uncapped = Enumerator(get_verifier("multi_draft_block_uncapped"), tree, laws).expected_accepted()
    assert uncapped > capped + 1e-2


def test_uncapped_scores_accept_no_less_with_an_extreme_ratio() -> None:
    laws = Instance("extreme", 3, lambda _: np.array([0.5, 0.49, 0.01]), lambda _: np.array([0.01, 0.01, 0.98]))
    tree = DraftTree.chains(2, 1)
    capped = Enumerator(get_verifier("multi_draft_block"), tree, laws).expected_accepted()
    uncapped = Enumerator(get_verifier("multi_draft_block_uncapped"), tree, laws).expected_accepted()
    assert uncapped >= capped - 1e-15


@pytest.mark.parametrize(
    "draws", [(DRAW_DETERMINISTIC, DRAW_IID), (DRAW_IID, DRAW_DETERMINISTIC), (DRAW_DETERMINISTIC, DRAW_DETERMINISTIC)]
)
def test_top_k_children_mix_with_drawn_ones(draws: tuple[str, str]) -> None:
    tree = tree_of_widths((2, 2), draws)
    for name in ("multi_draft_block", "multi_draft_block_uncapped"):
        for laws in (random_instance(3, 1), padded_vocabulary(INSTANCES["zeros"], 3)):
            assert Enumerator(get_verifier(name), tree, laws).law_error(3) <= 1e-12


@pytest.mark.parametrize(
    ("shape", "draws"),
    [
        ("wide", (DRAW_DETERMINISTIC, DRAW_IID)),
        ("wide", (DRAW_IID, DRAW_DETERMINISTIC)),
        ("long", (DRAW_IID, DRAW_DETERMINISTIC, DRAW_IID)),
        ("long", (DRAW_DETERMINISTIC, DRAW_IID, DRAW_DETERMINISTIC)),
    ],
)
def test_top_k_levels_keep_wider_and_longer_trees_exact(shape: str, draws: tuple[str, ...]) -> None:
    tree = tree_of_widths(SHAPES[shape], draws)
    for name in ("multi_draft_block", "multi_draft_block_uncapped"):
        for laws in (random_instance(3, 1), padded_vocabulary(INSTANCES["zeros"], 3)):
            enumerator = Enumerator(get_verifier(name), tree, laws)
            assert enumerator.law_error(len(draws) + 1) <= 1e-12, name


def test_top_k_children_accept_the_whole_target_mass_of_the_tree() -> None:
    laws = random_instance(3, 2)
    tree = tree_of_widths((2, 1), (DRAW_DETERMINISTIC, DRAW_DETERMINISTIC))
    best = np.argsort(-laws.draft(()))[:2].tolist()
    expected = sum(laws.target(())[token] for token in best)
    for token in best:
        expected += laws.target(())[token] * laws.target((token,))[int(np.argmax(laws.draft((token,))))]
    found = Enumerator(get_verifier("multi_draft_block"), tree, laws).expected_accepted()
    assert found == pytest.approx(float(expected), abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_delayed_scores_are_exact_on_trees(shape: str) -> None:
    for laws in INSTANCES.values():
        enumerator = Enumerator(get_verifier("multi_draft_block_late"), tree_of_widths(SHAPES[shape]), laws)
        assert enumerator.law_error(len(SHAPES[shape]) + 1) <= 1e-12


@pytest.mark.parametrize("name", ["recursive_rejection", "spectr"])
def test_token_rules_are_exact_on_trees_with_equal_siblings(name: str) -> None:
    # Two i.i.d. siblings over two tokens are equal half of the time.
    for laws in (INSTANCES["random"], INSTANCES["zeros"]):
        assert Enumerator(get_verifier(name), tree_of_widths((2, 2)), laws).law_error(4) <= 1e-12


def test_siblings_without_replacement_are_exact() -> None:
    rule = get_verifier("recursive_rejection")
    for widths in ((2, 1), (3, 1)):
        tree = tree_of_widths(widths, (DRAW_WITHOUT_REPLACEMENT, DRAW_IID))
        assert Enumerator(rule, tree, random_instance(3, 3)).law_error(4) <= 1e-12
    tree = tree_of_widths((2, 2), (DRAW_IID, DRAW_WITHOUT_REPLACEMENT))
    assert Enumerator(rule, tree, random_instance(3, 4)).law_error(3) <= 1e-12


def test_siblings_without_replacement_equal_the_numpy_rule() -> None:
    laws = random_instance(3, 5)
    p, q = laws.draft(()), laws.target(())
    expected = np.zeros(3)
    for first in range(3):
        for second in range(3):
            if first != second:
                weight = p[first] * p[second] / (1 - p[first])
                for token, mass in recursive_rejection_distinct(p, q, [first, second]).items():
                    expected[token] += weight * mass
    np.testing.assert_allclose(expected, q, atol=1e-12)
    tree = tree_of_widths((2,), (DRAW_WITHOUT_REPLACEMENT,))
    law = Enumerator(get_verifier("recursive_rejection"), tree, laws).emitted_law(1)
    np.testing.assert_allclose([law[token,] for token in range(3)], expected, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "tree", "alternative"),
    [
        ("token", DraftTree.chains(2, 2), "multi_draft_block"),
        ("block", tree_of_widths((2, 1)), "multi_draft_block"),
        ("greedy_block", DraftTree.chains(3, 1), "multi_draft_block"),
        ("spectr_gbv", tree_of_widths((2, 2)), "multi_draft_block"),
        ("traversal", tree_of_widths((1, 2)), "multi_draft_block"),
        ("multi_draft_block", tree_of_widths((2,), (DRAW_WITHOUT_REPLACEMENT,)), "recursive_rejection"),
        ("spectr", tree_of_widths((2,), (DRAW_WITHOUT_REPLACEMENT,)), "recursive_rejection"),
        ("recursive_rejection", tree_of_widths((2,), (DRAW_DETERMINISTIC,)), "multi_draft_block"),
    ],
)
def test_unusable_trees_are_refused_with_an_alternative(name: str, tree: DraftTree, alternative: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}'.*{alternative}"):
        get_verifier(name).check_tree(tree)
