"""Balanced groups: every token once, equal sizes, and rows that point the same way together."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.heads.clustering import balanced_groups


@pytest.mark.parametrize(("num_tokens", "num_groups"), [(24, 4), (25, 4), (7, 7), (9, 1)])
def test_every_token_is_in_one_group_and_groups_are_even(num_tokens, num_groups):
    rows = np.random.default_rng(0).standard_normal((num_tokens, 5)).astype(np.float32)
    groups = balanced_groups(rows, num_groups)
    assert groups.shape == (num_groups, -(-num_tokens // num_groups))
    assert sorted(groups[groups < num_tokens].tolist()) == list(range(num_tokens))
    np.testing.assert_array_equal(groups, balanced_groups(rows, num_groups))
    for group in groups:
        members = group[group < num_tokens]
        assert np.all(np.diff(members) > 0)


def test_directions_that_are_apart_are_found_whatever_their_length():
    generator = np.random.default_rng(1)
    owner = np.tile(np.arange(3), 8)
    rows = np.eye(6)[owner] * generator.uniform(0.1, 10, (24, 1)) + 0.01 * generator.standard_normal((24, 6))
    groups = balanced_groups(rows.astype(np.float32), 3)
    assert all(len(set(owner[group])) == 1 for group in groups)


def test_impossible_numbers_of_groups_are_named():
    with pytest.raises(ValueError, match=r"`num_groups` must be in \[1, 3\]; got 4"):
        balanced_groups(np.ones((3, 2), np.float32), 4)
