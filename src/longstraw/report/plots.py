"""Curves as inline SVG that follow the page's colours and fonts, light and dark.

matplotlib draws with stand-in colours, which are then replaced by the page's CSS variables; titles, legends and
explanations belong to the page, where they wrap on a narrow screen. Nothing is fetched when the page is read.
"""

from __future__ import annotations

import html
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

NUM_COLOURS = 9  # of CSS variables --series-0 to --series-8
REST_COLOUR = NUM_COLOURS - 1  # grey
NUM_BARS = 60  # more steps than this are drawn as areas
ROUND_STEPS = [1, 2, 5, 10]  # of tick labels
FONT_POINTS = 10.5
WIDTH_INCHES, HEIGHT_INCHES = 4.6, 2.35  # close to a phone's width, so that text keeps its size there

_TEXT, _GRID, _AXIS = "#010201", "#010202", "#010203"
_STAND_INS = {_TEXT: "--muted", _GRID: "--grid", _AXIS: "--axis"} | {
    f"#0103{index:02x}": f"--series-{index}" for index in range(NUM_COLOURS)
}


@dataclass(frozen=True)
class Line:
    """One curve over steps. NaN is a gap. `low` and `high` bound a shaded band, both or neither."""

    label: str
    steps: Sequence[int]
    values: Sequence[float]
    colour: int = 0  # of --series-{colour}
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def line_chart(lines: Sequence[Line], *, chart_id: str, description: str, from_zero: bool = False) -> str:
    """An SVG of curves over optimizer steps; single points get a marker.

    `from_zero` starts the vertical axis at 0, unless a value lies below.
    """
    figure, axes = _new_figure()
    for line in lines:
        if line.low is not None and line.high is not None:
            axes.fill_between(line.steps, line.low, line.high, color=_colour(line.colour), alpha=0.16, linewidth=0)
        marker = "o" if _needs_markers(line) else ""
        axes.plot(line.steps, line.values, color=_colour(line.colour), linewidth=1.8, marker=marker, markersize=4.5)
    if from_zero and not any(value < 0 for line in lines for value in line.values):
        highest = axes.get_ylim()[1] if any(value > 0 for line in lines for value in line.values) else 1.0
        axes.set_ylim(0.0, highest)
    _finish_axes(axes, lines[0].steps if len(lines) == 1 else [step for line in lines for step in line.steps])
    return _to_svg(figure, chart_id, description)


def stacked_chart(steps: Sequence[int], parts: Sequence[Line], *, chart_id: str, description: str) -> str:
    """An SVG of parts stacked on one another for every step; NaN counts as 0."""
    figure, axes = _new_figure()
    bottom = [0.0] * len(steps)
    for part in parts:
        heights = [value if math.isfinite(value) else 0.0 for value in part.values]
        top = [low + height for low, height in zip(bottom, heights, strict=True)]
        if len(steps) > NUM_BARS:
            axes.fill_between(steps, bottom, top, color=_colour(part.colour), linewidth=0)
        else:
            axes.bar(steps, heights, bottom=bottom, color=_colour(part.colour), width=0.72, linewidth=0)
        bottom = top
    axes.set_ylim(bottom=0.0)
    _finish_axes(axes, steps)
    return _to_svg(figure, chart_id, description)


def _colour(index: int) -> str:
    return f"#0103{index % NUM_COLOURS:02x}"


def _needs_markers(line: Line) -> bool:
    """Few points, or a point between two gaps, which a line alone would not show."""
    present = [math.isfinite(value) for value in line.values]
    if sum(present) <= 12:
        return True
    padded = [False, *present, False]
    return any(padded[i] and not padded[i - 1] and not padded[i + 1] for i in range(1, len(padded) - 1))


def _new_figure() -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    figure.patch.set_alpha(0.0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0.0)
    return figure, axes


def _finish_axes(axes: Axes, steps: Sequence[int]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True, steps=ROUND_STEPS))
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND_STEPS))
    low, high = axes.get_ylim()
    if max(abs(low), abs(high)) >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    else:
        axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 5), useOffset=False)
    if steps and min(steps) == max(steps):
        axes.set_xlim(steps[0] - 1, steps[0] + 1)
        axes.set_xticks([steps[0]])
    axes.set_xlabel("step", color=_TEXT, fontsize=FONT_POINTS)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_TEXT, labelsize=FONT_POINTS, length=0)
    axes.yaxis.get_offset_text().set(color=_TEXT, fontsize=FONT_POINTS)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_AXIS)


def _to_svg(figure: Figure, chart_id: str, description: str) -> str:
    """The figure as an `<svg>` element whose ids are its own among the charts of a page."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart_id}):
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Creator": None, "Date": None, "Format": None, "Type": None}
        )
    svg = buffer.getvalue()
    opening, body = svg[svg.index("<svg") :].split(">", 1)
    opening = re.sub(r'\b(width|height)="[^"]*"', "", opening)  # the page sets the size
    opening = opening.replace("<svg", f'<svg role="img" aria-label="{html.escape(description)}"')
    body = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{chart_id}-', f"{opening}>{body}")
    svg = svg.replace("url(#", f"url(#{chart_id}-").replace('href="#', f'href="#{chart_id}-')
    for stand_in, variable in _STAND_INS.items():
        svg = svg.replace(stand_in, f"var({variable})")
    return svg
