"""The page around a report: style sheet, cards, legends, tables. One file, no scripts, nothing from a network."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

# Told apart by people with the common colour weaknesses as well; grey is always plain decoding.
PALETTE = ("#2563c9", "#d9730d", "#12855f", "#8b49c1", "#b8284f", "#0e7c9b")
GREY = "#8a93a0"
AMBER = "#c79a16"
PART_COLORS = {
    "target forward": "#5b6b82",
    "drafter backbone": "#2563c9",
    "draft head": "#d9730d",
    "drafter extension": "#7fa8e6",
    "laws and verification": "#12855f",
    "host": "#c9ced6",
}

_STYLE = """
:root{color-scheme:light;--ink:#1d2430;--soft:#5a6372;--line:#e1e5eb;--back:#f5f6f8;--card:#fff;--accent:#2563c9}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Helvetica Neue",Arial,sans-serif;-webkit-text-size-adjust:100%}
main{max-width:1040px;margin:0 auto;padding:28px 18px 48px}
h1{font-size:25px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:18px;margin:34px 0 10px;letter-spacing:-.005em}
h3{font-size:14px;margin:0 0 8px}
p{margin:0 0 10px}
.soft{color:var(--soft)}
.small{font-size:13px}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(152px,1fr));gap:10px;margin:20px 0 0}
.figure,.card{background:var(--card);border:1px solid var(--line);border-radius:10px}
.figure{padding:12px 14px}
.figure b{display:block;font-size:25px;line-height:1.2;font-weight:650;letter-spacing:-.02em}
.figure span{color:var(--soft);font-size:12.5px;line-height:1.35;display:block}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:12px;align-items:start}
.card{padding:14px 16px}
.card svg{display:block;width:100%;height:auto;font-family:inherit}
.legend{display:flex;flex-wrap:wrap;gap:3px 14px;margin:0 0 6px;font-size:12.5px;color:var(--soft)}
.legend i{display:inline-block;width:16px;height:0;border-top:3px solid;margin-right:5px;vertical-align:3px}
.legend i.dashed{border-top-style:dashed}
.legend i.box{width:11px;height:11px;border:0;border-radius:2px;vertical-align:-1px}
.note{font-size:12.5px;color:var(--soft);margin:8px 0 0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:13px;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:5px 10px 5px 0;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}
th{font-weight:600;color:var(--soft)}
tr:last-child td{border-bottom:0}
table.names td{text-align:left;white-space:normal;overflow-wrap:anywhere}
table.names td:first-child{color:var(--soft);white-space:nowrap;vertical-align:top}
.sample{white-space:pre-wrap;overflow-wrap:anywhere;font-size:14px;line-height:1.65}
.sample span,.key{border-radius:3px;padding:1px 0;-webkit-box-decoration-break:clone;box-decoration-break:clone}
.key{padding:1px 6px;font-size:12.5px}
.accepted{background:#d5f0dd;color:#0c4a2c}
.recovered{background:#fde3cf;color:#7a3304}
.bonus{background:#dbe7fb;color:#173f86}
.target{background:none;color:inherit}
.prompt{border-left:3px solid var(--line);padding-left:10px;margin:0 0 10px;white-space:pre-wrap;
overflow-wrap:anywhere;color:var(--soft);font-size:13.5px}
.missing{background:#fff8e6;border:1px solid #ecd9a5;border-radius:10px;padding:10px 14px;font-size:13.5px;
margin:18px 0 0}
.missing ul{margin:4px 0 0;padding-left:20px}
details summary{cursor:pointer;font-weight:600;font-size:14px}
details[open] summary{margin-bottom:8px}
@media(max-width:480px){main{padding:18px 12px 36px}h1{font-size:21px}.card{padding:12px}.figure b{font-size:21px}
.figures{grid-template-columns:repeat(2,1fr)}}
"""


def page(title: str, body: Iterable[str]) -> str:
    """A complete HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n"
        + "\n".join(part for part in body if part)
        + "\n</main></body></html>\n"
    )


def figure(value: str, caption: str) -> str:
    """A headline figure."""
    return f'<div class="figure"><b>{html.escape(value)}</b><span>{html.escape(caption)}</span></div>'


def card(heading: str, content: str, *, legend: str = "", note: str = "") -> str:
    """A box with a heading; nothing when it has no content."""
    if not content:
        return ""
    note = f'<p class="note">{html.escape(note)}</p>' if note else ""
    return f'<div class="card"><h3>{html.escape(heading)}</h3>{legend}{content}{note}</div>'


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """A legend of (name, colour, style), style being "", "dashed" or "box"."""
    items = []
    for name, color, style in entries:
        paint = f"background:{color}" if style == "box" else f"border-color:{color}"
        items.append(f'<span><i class="{style}" style="{paint}"></i>{html.escape(name)}</span>')
    return f'<div class="legend">{"".join(items)}</div>'


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of numbers that scrolls sideways on a narrow screen; nothing without rows."""
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    if not body:
        return ""
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def names_table(pairs: Iterable[tuple[str, str]]) -> str:
    """A table of names and values; nothing without pairs."""
    body = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(value)}</td></tr>" for name, value in pairs)
    return f'<table class="names">{body}</table>' if body else ""


def section(heading: str, cards: Sequence[str]) -> str:
    """A heading and its cards; nothing when all are empty."""
    cards = [content for content in cards if content]
    if not cards:
        return ""
    return f'<h2>{html.escape(heading)}</h2><div class="charts">{"".join(cards)}</div>'
