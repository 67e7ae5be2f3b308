"""Charts are well-formed SVG that shows the numbers it was given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from eval.charts import Bar, Line, Stack, bar_chart, line_chart, number, stacked_chart, ticks

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.25, 0.5, 0.75, 1.0]),
        (0.0, 1.24, [0.0, 0.5, 1.0, 1.5]),
        (1.0, 360.0, [0.0, 100.0, 200.0, 300.0, 400.0]),
        (2.0, 2.0, [2.0, 2.5]),
        (0.0, 0.0, [0.0, 0.25]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == expected


def test_ticks_refuse_what_has_no_order() -> None:
    with pytest.raises(ValueError, match="finite and ordered"):
        ticks(1.0, 0.0)
    with pytest.raises(ValueError, match="finite and ordered"):
        ticks(0.0, float("nan"))


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (1.5, "1.5"), (0.25, "0.25"), (12345.0, "12.3k"), (2.5e6, "2.5M"), (0.0002, "0.0002")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text


def test_line_chart_skips_numbers_that_are_none() -> None:
    nan = float("nan")
    svg = line_chart(
        [Line("a<b", [(0.0, 1.0), (1.0, nan), (2.0, 3.0)], "#123456", markers=True)], title='say "x"', x_label="step"
    )
    root = ElementTree.fromstring(svg)
    assert root.attrib["aria-label"] == 'say "x"'
    assert len(root.findall(f"{SVG}circle")) == 2
    assert root.find(f"{SVG}circle/{SVG}title").text == "a<b: 1 at 0"  # pyright: ignore[reportOptionalMemberAccess]


def test_line_chart_of_one_point_and_of_none() -> None:
    ElementTree.fromstring(line_chart([Line("a", [(3.0, 2.0)], "red")], title="t", x_label="x"))
    assert line_chart([Line("a", [], "red")], title="t", x_label="x") == ""


def test_bar_lengths_are_proportional_to_values() -> None:
    svg = bar_chart(
        [Bar("one", 1.0, "#111", low=0.9, high=1.1, marker=1.05), Bar("two", 2.0, "#222")], title="t", reference=1.0
    )
    root = ElementTree.fromstring(svg)
    first, second = (float(rect.attrib["width"]) for rect in root.findall(f"{SVG}rect"))
    assert second == pytest.approx(2 * first, abs=0.2)
    assert "predicted 1.05" in svg
    assert bar_chart([], title="t") == ""


def test_everything_lies_inside_the_drawing() -> None:
    svg = bar_chart([Bar("a long label of a system", 1.0, "#111", high=1.4, low=0.7, marker=1.5)], title="t", unit="x")
    root = ElementTree.fromstring(svg)
    width = float(root.attrib["viewBox"].split()[2])
    for text in root.findall(f"{SVG}text"):
        assert 0 <= float(text.attrib["x"]) <= width - 20


def test_stack_adds_its_parts() -> None:
    svg = stacked_chart(
        [Stack("step", [("a", 2.0, "#111"), ("b", 3.0, "#222")]), Stack("empty", [])], title="t", unit="ms"
    )
    assert "5 ms" in svg
    assert re.search(r"a: 2 ms\s+\(40 %\)", svg)
    ElementTree.fromstring(svg)
    assert stacked_chart([], title="t", unit="ms") == ""
