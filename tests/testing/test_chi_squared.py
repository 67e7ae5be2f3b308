"""The chi-squared helper against scipy, its level, its power and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from specjax.testing.chi_squared import assert_follows_law, assert_same_law, chi_squared_test, two_sample_test


def test_without_merging_it_is_pearsons_test():
    counts, law = np.array([210, 290, 500]), np.array([0.2, 0.3, 0.5])
    result = chi_squared_test(counts, law)
    expected = scipy.stats.chisquare(counts, law * 1000)
    assert result.statistic == pytest.approx(expected.statistic)
    assert result.p_value == pytest.approx(expected.pvalue, rel=1e-4)
    assert (result.degrees, result.num_draws) == (2, 1000)


@pytest.mark.parametrize("degrees", [3, 50, 342])
@pytest.mark.parametrize("tail", [1e-3, 1e-6, 1e-9])
def test_far_tails_are_accurate(degrees, tail):
    """float32 must not blur the tail that decides at false alarms of 1e-6."""
    cells = degrees + 1
    law = np.full(cells, 1 / cells)
    wanted = scipy.stats.chi2.isf(tail, degrees)
    # Two cells off by x each give the statistic 2 x^2 / expected.
    num_draws = 10**9 // cells * cells
    shift = round((wanted * num_draws / cells / 2) ** 0.5)
    counts = np.full(cells, num_draws // cells)
    counts[0] += shift
    counts[1] -= shift
    assert chi_squared_test(counts, law).p_value == pytest.approx(tail, rel=0.05)


def test_rare_cells_are_merged_by_their_law():
    law = np.array([0.001, 0.002, 0.003, 0.494, 0.5])
    result = chi_squared_test(np.array([0, 1, 5, 494, 500]), law)
    assert result.degrees == 2


def test_the_level_holds():
    # 2,000 right samples: p-values below 0.01 number about 20; 45 is 5.6 sigma (literal seed).
    generator = np.random.default_rng(11)
    law = generator.dirichlet(np.full(60, 0.3))
    alarms = sum(chi_squared_test(generator.multinomial(3000, law), law).p_value < 0.01 for _ in range(2000))
    assert alarms < 45


def test_wrong_laws_are_found():
    generator = np.random.default_rng(1)
    law = np.array([0.45, 0.35, 0.2])
    wrong = np.array([0.477, 0.322, 0.201])
    with pytest.raises(AssertionError, match="do not follow the law"):
        assert_follows_law(generator.multinomial(40_000, wrong), law)
    assert_follows_law(generator.multinomial(40_000, law), law)


def test_an_impossible_draw_fails():
    assert chi_squared_test(np.array([999, 1]), np.array([1.0, 0.0])).p_value == 0
    assert chi_squared_test(np.array([1000, 0]), np.array([1.0, 0.0])).p_value == 1


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="`law` must sum to 1"):
        chi_squared_test(np.array([1, 2]), np.array([0.5, 0.4]))
    with pytest.raises(ValueError, match="must be at least 0"):
        chi_squared_test(np.array([1, -2]), np.array([0.5, 0.5]))


def test_two_samples_without_merging_are_a_contingency_table():
    first, second = np.array([210, 290, 500, 0]), np.array([110, 160, 230, 0])
    result = two_sample_test(first, second)
    expected = scipy.stats.chi2_contingency(np.stack((first, second))[:, :3], correction=False)
    assert result.statistic == pytest.approx(expected.statistic)
    assert result.p_value == pytest.approx(expected.pvalue, rel=1e-4)
    assert (result.degrees, result.num_draws) == (2, 1500)
    assert two_sample_test(second, first).statistic == pytest.approx(expected.statistic)


def test_the_level_of_two_samples_holds():
    # As above; sets of unequal size and many rare cells.
    generator = np.random.default_rng(12)
    law = generator.dirichlet(np.full(60, 0.3))
    alarms = sum(
        two_sample_test(generator.multinomial(3000, law), generator.multinomial(1000, law)).p_value < 0.01
        for _ in range(2000)
    )
    assert alarms < 45


def test_two_different_laws_are_found():
    generator = np.random.default_rng(2)
    law, wrong = np.array([0.45, 0.35, 0.2]), np.array([0.477, 0.322, 0.201])
    right = generator.multinomial(40_000, law)
    with pytest.raises(AssertionError, match="come from different laws"):
        assert_same_law(right, generator.multinomial(40_000, wrong))
    assert_same_law(right, generator.multinomial(40_000, law))


def test_faulty_samples_are_refused():
    with pytest.raises(ValueError, match="counts must be at least 0; got -1"):
        two_sample_test(np.array([1, 2]), np.array([3, -1]))
    with pytest.raises(ValueError, match="both sets must have at least one draw; got 3 and 0"):
        two_sample_test(np.array([1, 2]), np.array([0, 0]))
