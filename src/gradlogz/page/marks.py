"""Figures as plain data: two axes and the marks between them.

    Line  Ribbon  Points  Outlines  Heat      marks
    Figure                                    two axes and marks
    PointCloud                                an animation of tokens, with play and scrub

Colours are names of palette.py. The keys of a mark refer to the page's choices: the selected one is highlighted, and a
click on a mark selects its key.

Read next: rendering.py, where marks become traces.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, ClassVar, Literal

LONGEST = 36  # characters per line of an axis label
CROWD = 100  # points above which error bars are drawn fainter, because they overlap
LEVELS = 12  # distinct integers up to which a colour scale has one tick each

Numbers = Sequence[float | None] | Sequence[float] | Sequence[int]


@dataclass(frozen=True)
class Axis:
    """An axis with a name, a unit and a formula.

    range: both ends; None fits the marks.
    names: categories at 0, 1, 2, ...; empty for a numeric axis.
    """

    name: str
    unit: str
    formula: str = ""
    scale: Literal["linear", "log"] = "linear"
    range: tuple[float, float] | None = None
    names: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name, formula and unit; wrapped where they are longer than a figure is high."""
        unit = f"{self.formula}  [{self.unit}]" if self.formula else f"[{self.unit}]"
        if len(self.name) + len(unit) + 2 <= LONGEST:
            return f"{self.name}  {unit}"
        lines = (
            [*wrap(self.name, LONGEST), *wrap(unit, LONGEST)] if self.formula else wrap(f"{self.name}  {unit}", LONGEST)
        )
        return "\n".join(lines)


@dataclass(frozen=True)
class Line:
    """A curve; dashed for theory. A curve with a key is thin, and has no entry in the legend.

    text: hover text of each point; its coordinates by default.
    """

    name: str
    x: Numbers
    y: Numbers
    colour: str = "blue"
    dash: Literal["solid", "dash", "dot"] = "solid"
    key: str = ""
    text: Sequence[str] = ()

    def traces(self) -> list[dict[str, Any]]:
        """Traces for plotly."""
        width = 1.0 if self.key else 2 if self.dash == "solid" else 1.8
        line = {"color": f"@{self.colour}", "dash": self.dash, "width": width}
        rest: dict[str, Any] = {"text": list(self.text), "hoverinfo": "text"} if self.text else {}
        if self.key:
            rest |= {"customdata": [self.key] * len(self.x), "showlegend": False, "opacity": 0.5}
        return [_scatter(self.name, self.x, self.y, mode="lines", line=line, **rest)]


@dataclass(frozen=True)
class Ribbon:
    """The area between two curves; `legend`: whether it has an entry in the legend."""

    name: str
    x: Numbers
    low: Numbers
    high: Numbers
    colour: str = "blue"
    legend: bool = True

    def traces(self) -> list[dict[str, Any]]:
        """Traces for plotly: an invisible curve, and a second one filled down to it."""
        bare = {"mode": "lines", "line": {"width": 0, "color": f"@{self.colour}"}, "hoverinfo": "skip"}
        low = _scatter(f"{self.name}, low", self.x, self.low, showlegend=False, legendgroup=self.name, **bare)
        fill = {"fill": "tonexty", "fillcolor": f"@{self.colour}/0.16"}
        high = _scatter(self.name, self.x, self.high, legendgroup=self.name, **bare, **fill)
        return [low, high if self.legend else {**high, "showlegend": False}]


@dataclass(frozen=True)
class Points:
    """Single points.

    text: hover text of each point. low, high: ends of its error bar. keys: the choice it belongs to.
    """

    name: str
    x: Numbers
    y: Numbers
    colour: str = "blue"
    symbol: str = "circle"
    text: Sequence[str] = ()
    low: Numbers = ()
    high: Numbers = ()
    keys: Sequence[str] = ()
    size: int = 8

    def traces(self) -> list[dict[str, Any]]:
        """Traces for plotly."""
        marker = {"color": f"@{self.colour}", "symbol": self.symbol, "size": self.size}
        rest: dict[str, Any] = {"text": list(self.text), "hoverinfo": "text"} if self.text else {}
        if self.keys:
            rest["customdata"] = list(self.keys)
        if self.low and self.high:
            up = [_apart(end, at) for end, at in zip(self.high, self.y, strict=True)]
            down = [_apart(at, end) for end, at in zip(self.low, self.y, strict=True)]
            arms = {"color": f"@{self.colour}/{0.6 if len(self.x) <= CROWD else 0.3}", "thickness": 1.2, "width": 0}
            rest["error_y"] = {"type": "data", "symmetric": False, "array": up, "arrayminus": down, **arms}
        return [_scatter(self.name, self.x, self.y, mode="markers", marker=marker, **rest)]


@dataclass(frozen=True)
class Outlines:
    """Closed curves with a light filling, such as covariance ellipses; each is a pair of coordinates x and y."""

    name: str
    curves: Sequence[tuple[Numbers, Numbers]]
    colour: str = "blue"

    def traces(self) -> list[dict[str, Any]]:
        """Traces for plotly: one line with gaps."""
        x = [at for each, _ in self.curves for at in (*each, *each[:1], None)][:-1]
        y = [at for _, each in self.curves for at in (*each, *each[:1], None)][:-1]
        look = {"line": {"width": 1, "color": f"@{self.colour}"}, "fillcolor": f"@{self.colour}/0.1"}
        return [_scatter(self.name, x, y, mode="lines", fill="toself", hoverinfo="skip", **look)]


@dataclass(frozen=True)
class Heat:
    """A heat map of numbers or categories; values[row][column], rows along y.

    hover: hover text of each cell. keys: the choice each cell belongs to.
    categories: names and colours of the values 0, 1, 2, ...; empty for a numeric colour scale.
    range: limits of the colour scale; values beyond a limit have its colour.
    """

    name: str
    x: Numbers
    y: Numbers
    values: Sequence[Sequence[float | int | None]]
    hover: Sequence[Sequence[str]]
    categories: tuple[tuple[str, str], ...] = ()
    keys: Sequence[Sequence[str]] = ()
    range: tuple[float, float] | None = None

    def traces(self) -> list[dict[str, Any]]:
        """Traces for plotly."""
        rows, title = [list(row) for row in self.values], "\n".join(wrap(self.name, LONGEST))
        trace: dict[str, Any] = {
            "type": "heatmap", "name": self.name, "x": list(self.x), "y": list(self.y), "z": rows,
            "text": [list(row) for row in self.hover], "hoverinfo": "text", "xgap": 1, "ygap": 1,
            "colorbar": {"title": {"text": title, "side": "right"}, "thickness": 12, "outlinewidth": 0},
        }  # fmt: skip
        if self.keys:
            trace["customdata"] = [list(row) for row in self.keys]
        if not self.categories:
            ends = {} if self.range is None else {"zmin": self.range[0], "zmax": self.range[1]}
            numbers = {value for row in self.values for value in row if value is not None}
            if len(numbers) <= LEVELS and all(isinstance(value, int) for value in numbers):
                trace["colorbar"]["dtick"] = 1  # counts are integers
            return [{**trace, "colorscale": "Cividis", **ends}]
        count = len(self.categories)
        steps = [[end, f"@{colour}"] for i, (_, colour) in enumerate(self.categories) for end in _ends(i, count)]
        bar = {**trace["colorbar"], "tickvals": list(range(count)), "ticktext": [name for name, _ in self.categories]}
        return [{**trace, "zmin": -0.5, "zmax": count - 0.5, "colorscale": steps, "colorbar": bar}]


Mark = Line | Ribbon | Points | Outlines | Heat


@dataclass(frozen=True)
class Figure:
    """Marks between two axes.

    name: unique on its page; part of the name of exported files.
    wide: full width of the page. equal: equal scales on both axes.
    """

    kind: ClassVar[str] = "figure"
    name: str
    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]
    caption: str = ""
    wide: bool = False
    equal: bool = False


@dataclass(frozen=True)
class PointCloud:
    """An animation of tokens in two or three dimensions.

    frames: the coordinates of each token at each time; three-dimensional clouds can be rotated.
    groups: cluster of each token, which sets its colour.
    """

    kind: ClassVar[str] = "cloud"
    name: str
    title: str
    axes: tuple[Axis, ...]
    times: Sequence[int]
    frames: Sequence[Sequence[Sequence[float]]]
    groups: Sequence[int]
    caption: str = ""
    equal: bool = True
    wide: bool = False


def _scatter(name: str, x: Numbers, y: Numbers, **rest: Any) -> dict[str, Any]:
    return {"type": "scatter", "name": name, "x": list(x), "y": list(y), **rest}


def _apart(high: float | None, low: float | None) -> float | None:
    """Length of an error bar, to three digits: finer than the screen resolution."""
    return None if high is None or low is None else float(f"{high - low:.3g}")


def _ends(index: int, count: int) -> tuple[float, float]:
    return index / count, (index + 1) / count
