"""Numbers as a report writes them."""

from __future__ import annotations

from typing import Any


def decimal(value: int | float | None, digits: int = 2) -> str:
    """A number with fixed digits; a dash for none."""
    return "-" if value is None else f"{value:.{digits}f}"


def times(value: int | float | None) -> str:
    """A factor."""
    return "-" if value is None else f"{value:.2f}x"


def percent(value: int | float | None) -> str:
    """A share."""
    return "-" if value is None else f"{100 * value:.0f} %"


def interval(estimate: dict[str, Any] | None) -> str:
    """The ends of an estimate in brackets, with a space before; nothing when there are none."""
    if not estimate or estimate.get("low") is None:
        return ""
    return f" [{estimate['low']:.2f}, {estimate['high']:.2f}]"


def compact(value: Any) -> str:
    """A JSON value on one line."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {compact(part)}" for name, part in value.items())
    if isinstance(value, list):
        return " ".join(str(part) for part in value)
    return str(value)


def short(digest: str | None) -> str:
    """The start of a digest, enough to tell two apart; the result files hold all of it."""
    return digest[:16] if digest else "-"
