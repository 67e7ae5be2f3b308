"""Options as users write them, and back."""

from __future__ import annotations

import pytest

from specjax.heads import HeadOption, format_options, parse_options

OPTIONS = (
    HeadOption("rows", 0, ""),
    HeadOption("alpha", 0.5, ""),
    HeadOption("trained", False, ""),
    HeadOption("ranks", (), ""),
)


def test_every_type_is_read_and_written_again():
    values = parse_options("rows=8, alpha=1,trained=true,ranks=96:72", OPTIONS)
    assert values == {"rows": 8, "alpha": 1.0, "trained": True, "ranks": (96, 72)}
    assert [type(value) for value in values.values()] == [int, float, bool, tuple]
    text = format_options(tuple(values.items()))
    assert text == "rows=8,alpha=1.0,trained=true,ranks=96:72"
    assert parse_options(text, OPTIONS) == values
    assert parse_options("", OPTIONS) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rows", "must be written as name=value,name=value; got 'rows'"),
        ("rows=", "must be written as name=value"),
        ("rows=1,rows=2", "must be given once each; got `rows` twice"),
        ("rows=x", "`rows` must be a whole number; got 'x'"),
        ("alpha=x", "`alpha` must be a number; got 'x'"),
        ("trained=yes", "`trained` must be true or false; got 'yes'"),
        ("ranks=8:x", "`ranks` must be whole numbers with colons; got '8:x'"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        parse_options(text, OPTIONS)
