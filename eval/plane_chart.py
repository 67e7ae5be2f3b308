"""The acceptance-cost plane as an SVG picture: heads as points, lines of equal speed as the cost law draws them."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from eval.charts import number, ticks
from specjax import cost

# Distinct for readers with the usual colour deficiencies (Okabe and Ito).
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#7f7f7f", "#b3a100", "#444444")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X")
_INK, _GRID, _AXIS = "#1d2430", "#b9c0ca", "#c9ced6"
# Fixed, so that the same measurements give the same file, and text stays text.
_STYLE: Any = {"svg.hashsalt": "plane", "svg.fonttype": "none", "font.size": 9, "font.family": "sans-serif"}
_NUM_LEVELS = 7


def iso_speed_up(level: float, kappa: float, nus: Sequence[float]) -> list[tuple[float, float]]:
    """Points (nu, rho_tau) at which a head is `level` times as fast as the full one.

    Args:
        level: token rate relative to the full head's; 1 is the break-even line.
        kappa: of the cycle with the full head.
        nus: where to take points.
    """
    return [(nu, cost.rho_tau_for(rho_tps=level, nu=nu, kappa=kappa)) for nu in nus]


def levels(kappa: float, x_range: tuple[float, float], y_range: tuple[float, float]) -> list[float]:
    """Round levels whose lines cross the plane, the break-even line at 1 not among them."""
    slowest = cost.rho_tps(rho_tau=y_range[0], nu=x_range[1], kappa=kappa)
    fastest = cost.rho_tps(rho_tau=y_range[1], nu=x_range[0], kappa=kappa)
    return [level for level in ticks(slowest, fastest, _NUM_LEVELS) if slowest < level < fastest and level != 1.0]


def plane_svg(result: Mapping[str, Any]) -> str:
    """Draws one panel for each draft length (columns), temperature and batch size (rows).

    Args:
        result: as `plane.json` holds it.

    Returns:
        The picture.
    """
    # Imported here: other commands do without a plotting library.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings = result["settings"]
    lengths = settings["draft_lengths"]
    rows = [(t, batch) for t in settings["temperatures"] for batch in settings["batches"]]
    styles = _styles(result["heads"])
    with rc_context(_STYLE):
        figure = Figure(figsize=(3.1 * len(lengths) + 2.6, 2.7 * len(rows) + 0.7), layout="constrained")
        panels = figure.subplots(len(rows), len(lengths), squeeze=False)
        for row, (temperature, batch) in enumerate(rows):
            for column, length in enumerate(lengths):
                chosen = [
                    point
                    for point in result["points"]
                    if (point["temperature"], point["batch"], point["draft_length"]) == (temperature, batch, length)
                ]
                _draw_panel(panels[row][column], chosen, styles)
                panels[row][column].set_title(f"L = {length}, {batch} row(s), temperature {temperature:g}", fontsize=9)
        handles, labels = panels[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=8)
        buffer = io.StringIO()
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Title": f"Draft heads on {result['target']['name']}"}
        )
    return buffer.getvalue()


def _styles(heads: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, str]]:
    """Colour by kind, marker by size within it."""
    kinds = list(dict.fromkeys(head["kind"] for head in heads))
    seen: dict[str, int] = {}
    styles = {}
    for head in heads:
        place = seen.get(head["kind"], 0)
        seen[head["kind"]] = place + 1
        styles[head["name"]] = (
            _COLORS[kinds.index(head["kind"]) % len(_COLORS)],
            _MARKERS[place % len(_MARKERS)],
        )
    return styles


def _draw_panel(panel: Any, points: Sequence[Mapping[str, Any]], styles: Mapping[str, tuple[str, str]]) -> None:
    shown = [point for point in points if point["nu"] is not None and point["rho_tau"]["value"] is not None]
    ends = [point["rho_tau"][name] for point in shown for name in ("low", "high")]
    kappa = next((point["kappa"] for point in points if point["kappa"] is not None), None)
    x_range = (0.0, max([1.05, *(1.05 * point["nu"] for point in shown)]))
    low = min([0.9, *(end for end in ends if end is not None)])
    high = max([1.02, *(end for end in ends if end is not None)])
    y_range = (max(low - 0.03, 0.01), high + 0.03)
    if kappa is not None:
        for level in levels(kappa, x_range, y_range):
            _draw_line(panel, level, kappa, x_range, y_range, color=_GRID, style="--", width=0.8)
        _draw_line(panel, 1.0, kappa, x_range, y_range, color=_INK, style="-", width=1.2)
        panel.plot([], [], color=_INK, linewidth=1.2, label="break-even")
        panel.plot([], [], color=_GRID, linewidth=0.8, linestyle="--", label="equal speed-up over full")
    for point in shown:
        color, marker = styles[point["head"]]
        rho = point["rho_tau"]
        reach = [[rho["value"] - rho["low"]], [rho["high"] - rho["value"]]] if rho["low"] is not None else None
        panel.errorbar(
            [point["nu"]],
            [rho["value"]],
            yerr=reach,
            color=color,
            marker=marker,
            markersize=5,
            linewidth=1,
            capsize=2,
            linestyle="none",
            label=point["head"],
        )
    panel.set_xlim(*x_range)
    panel.set_ylim(*y_range)
    panel.set_xlabel("nu: head's time over the full head's")
    panel.set_ylabel("rho_tau (full head: 1)")
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        panel.spines[side].set_color(_AXIS)


def _draw_line(
    panel: Any,
    level: float,
    kappa: float,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    *,
    color: str,
    style: str,
    width: float,
) -> None:
    (x_first, y_first), (x_last, y_last) = iso_speed_up(level, kappa, x_range)
    panel.plot([x_first, x_last], [y_first, y_last], color=color, linestyle=style, linewidth=width, zorder=1)
    # The label sits where the line leaves the plane: on the right, or at the upper edge.
    at = x_last if y_last <= y_range[1] else x_first + (x_last - x_first) * (y_range[1] - y_first) / (y_last - y_first)
    height = min(y_last, y_range[1])
    if y_range[0] < height:
        panel.text(at, height, f"{number(level)}x", fontsize=7, color=_INK, ha="right", va="top", zorder=2)
