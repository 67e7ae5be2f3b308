"""Which tokens a reduced head keeps: by hand, at the borders, and the coverage-latency utility against brute force."""

from __future__ import annotations

import numpy as np
import pytest

from specjax.heads.vocabulary import choose_size, count_tokens, coverage, select_ids


def test_counts_are_of_every_id():
    np.testing.assert_array_equal(count_tokens(np.array([[1, 1], [3, 0]]), 5), [1, 2, 0, 1, 0])
    np.testing.assert_array_equal(count_tokens(np.zeros(0, np.int32), 2), [0, 0])
    with pytest.raises(ValueError, match=r"`tokens` must be in \[0, 3\); got 1 to 3"):
        count_tokens(np.array([1, 3]), 3)


def test_the_most_frequent_ids_in_ascending_order():
    np.testing.assert_array_equal(select_ids(np.array([0, 5, 1, 9, 5]), 3), [1, 3, 4])


def test_case_h4_fewer_tokens_than_places():
    """Five distinct tokens seen, eight wanted: eight unique ids, filled up from the lowest, always the same."""
    counts = np.zeros(12, np.int64)
    counts[[11, 3, 5, 7, 9]] = [1, 4, 2, 9, 2]
    for _ in range(2):
        ids = select_ids(counts, 8)
        np.testing.assert_array_equal(ids, [0, 1, 2, 3, 5, 7, 9, 11])
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(select_ids(counts, 1), [7])
    np.testing.assert_array_equal(select_ids(counts, 12), np.arange(12))
    for size in (13, 0):
        with pytest.raises(ValueError, match=rf"`size` of a draft vocabulary must be in \[1, 12\]; got {size}"):
            select_ids(counts, size)


def test_case_h8_padded_rows_are_never_kept_or_counted():
    """Model of 16 rows, tokenizer of 13: ids 13 to 15 are no tokens even if something counted them."""
    counts = np.zeros(16, np.int64)
    counts[[13, 14, 15]] = 100
    counts[[2, 4]] = 1
    np.testing.assert_array_equal(select_ids(counts, 3, num_valid_tokens=13), [0, 2, 4])
    np.testing.assert_array_equal(select_ids(counts, 3, num_valid_tokens=13, forced=[14, 5]), [2, 4, 5])
    with pytest.raises(ValueError, match=r"must be in \[1, 13\]; got 14"):
        select_ids(counts, 14, num_valid_tokens=13)


def test_forced_ids_take_the_place_of_the_rarest():
    counts = np.array([9, 8, 7, 6, 0])
    np.testing.assert_array_equal(select_ids(counts, 3, forced=[4]), [0, 1, 4])
    np.testing.assert_array_equal(select_ids(counts, 3, forced=[4, 4, 0]), [0, 1, 4])
    with pytest.raises(ValueError, match="must hold its 3 forced ids; got 2"):
        select_ids(counts, 2, forced=[2, 3, 4])


def test_coverage_is_a_share_of_occurrences():
    counts = np.array([6, 3, 1, 0])
    assert coverage(counts, np.array([0, 2])) == pytest.approx(0.7)
    assert coverage(np.zeros(4, np.int64), np.array([0])) == 0


@pytest.mark.parametrize(("alpha", "least_coverage"), [(0.5, 0.0), (0.9, 0.0), (0.2, 0.0), (0.5, 0.97), (0.0, 0.5)])
def test_the_size_with_the_highest_utility(alpha, least_coverage):
    counts = (1000 / np.arange(1, 201) ** 1.2).astype(np.int64)
    chosen = choose_size(
        counts, backbone_flops=5000, flops_per_id=100, alpha=alpha, least_coverage=least_coverage, smallest=5
    )
    best = None
    for size in range(5, 201):
        covered = np.sort(counts)[::-1][:size].sum() / counts.sum()
        saved = 1 - (5000 + 100 * size) / (5000 + 100 * 200)
        utility = alpha * covered + (1 - alpha) * saved
        if covered >= least_coverage and (best is None or utility > best[0] + 1e-15):
            best = (utility, size, covered, saved)
    assert best is not None
    assert chosen.size == best[1]
    np.testing.assert_allclose([chosen.utility, chosen.coverage, chosen.reduction], [best[0], best[2], best[3]])


def test_size_choices_that_cannot_be_met_are_named():
    counts = np.array([5, 3, 2])
    fixed = {"backbone_flops": 10, "flops_per_id": 1}
    for arguments, message in (
        ({"alpha": 1.1}, r"`alpha` must be in \[0, 1\]; got 1.1"),
        ({"least_coverage": 0.9, "largest": 2}, "must be at most what 2 ids cover, 0.800000; got 0.9"),
        ({"smallest": 4}, r"`smallest` must be in \[1, largest = 3\]; got 4"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_size(counts, **fixed, **arguments)
    with pytest.raises(ValueError, match="at least one occurrence"):
        choose_size(np.zeros(3, np.int64), **fixed)
