"""Stop tokens inside a block, stop strings across tokens, and text that is held back while it may become one."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specjax.decoding.stopping import StopStrings, count_until_stop

EOS = 9


@pytest.mark.parametrize(
    ("tokens", "count", "stop_ids", "expected", "stopped"),
    [
        ([1, 2, 3, 4], 4, [EOS], 4, False),
        ([1, 2, EOS, 4], 4, [EOS], 3, True),
        ([EOS, EOS, EOS, EOS], 4, [EOS], 1, True),
        ([1, 2, EOS, 4], 2, [EOS], 2, False),  # behind what is committed
        ([1, 2, 3, EOS], 4, [EOS], 4, True),  # as bonus token
        ([1, 2, 3, 4], 4, [7, 3, 8], 3, True),
        ([1, 0, 3, 4], 4, [-1, -1, -1], 4, False),
        ([1, 0, 3, 4], 4, [0, -1, -1], 2, True),
        ([1, 2, 3, 4], 0, [1], 0, False),
    ],
)
def test_count_until_stop(tokens, count, stop_ids, expected, stopped):
    counts, flags = count_until_stop(jnp.asarray([tokens]), jnp.asarray([count]), jnp.asarray([stop_ids]))
    assert (int(counts[0]), bool(flags[0])) == (expected, stopped)


def test_rows_have_their_own_stop_tokens():
    tokens = jnp.asarray([[1, 2, 3]] * 3)
    counts, flags = count_until_stop(tokens, jnp.asarray([3, 3, 2]), jnp.asarray([[2, -1], [3, 1], [3, -1]]))
    np.testing.assert_array_equal(counts, [2, 1, 2])
    np.testing.assert_array_equal(flags, [True, True, False])


def feed(strings: tuple[str, ...], pieces: list[str]) -> tuple[list[str], StopStrings, int]:
    """Pushes pieces until one completes a stop string; the released text, the watcher and the pieces used."""
    watcher, released = StopStrings(strings), []
    for index, piece in enumerate(pieces):
        found = watcher.push(piece)
        last = found or index == len(pieces) - 1
        released.append(watcher.release(last=last))
        if found:
            return released, watcher, index + 1
    return released, watcher, len(pieces)


@pytest.mark.parametrize(
    ("strings", "pieces", "text", "used"),
    [
        (("ab",), ["xa", "bz", "q"], "x", 2),
        (("ab",), ["xa", "a", "b"], "xa", 3),
        (("aab",), ["a", "a", "a", "b"], "a", 4),
        (("ab", "xa"), ["xab"], "", 1),
        (("zz",), ["a", "b"], "ab", 2),
        (("ab",), ["a"], "a", 1),
        (("stop", "top"), ["a st", "op b"], "a ", 2),
        ((), ["a", "b"], "ab", 2),
        (("é!",), ["caf", "é", "!"], "caf", 3),
    ],
)
def test_case_s4_stop_strings_cut_the_text(strings, pieces, text, used):
    released, watcher, num_used = feed(strings, pieces)
    assert watcher.text == text
    assert "".join(released) == text
    assert num_used == used


def test_text_that_may_become_a_stop_string_is_held_back():
    watcher = StopStrings(("</end>",))
    watcher.push("hi </e")
    assert watcher.release() == "hi "
    watcher.push("x")
    assert watcher.release() == "</ex"
    watcher.push("<")
    assert watcher.release() == ""
    assert watcher.release(last=True) == "<"


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_released_text_is_the_text_before_the_earliest_stop_string(pieces, strings):
    strings = tuple(strings)
    released, watcher, used = feed(strings, pieces)
    assert "".join(released) == watcher.text
    # The reference looks at the whole text after every piece.
    for end in range(len(pieces) + 1):
        text = "".join(pieces[:end])
        places = [text.find(string) for string in strings if string in text]
        if places:
            assert used == end
            assert watcher.text == text[: min(places)]
            return
    assert watcher.text == "".join(pieces)
    assert not watcher.found
