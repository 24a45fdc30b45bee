"""A page as HTML: template, style sheet, script and plotly in one file.

The page fetches nothing from the network; its content security policy forbids it. The template escapes all strings. The
data and the source of plotly are compressed and base64-encoded, so that they cannot close their script element and the
file is a third as large. The script decompresses plotly when a figure comes near the window.

Read next: template.html, style.css, behaviour.js.
"""

import base64
import html
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .marks import Axis, Figure, PointCloud
from .palette import DARK, LIGHT, STATUSES, TONES
from .parts import Chip, Link, Page, Part, Table, Views

HERE = Path(__file__).parent
SHORT, LONG = 24, 60  # characters of a cell
RANGE = re.compile(r"(?<=\d)–(?=\d)")
EQUATION = re.compile(r"(?<=\w) = (?=[−\d])")
TICKS = 24  # category names that fit on an axis
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "pentagon", "hexagon", "bowtie")


def render(page: Page) -> str:
    """The page as one HTML file. Needs jinja2 and plotly, the extra [report]."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=glued,
    )
    environment.filters["extent"] = extent
    environment.filters["number"] = number
    environment.filters["slug"] = slug
    return environment.get_template("template.html").render(
        page=page,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        behaviour=Markup((HERE / "behaviour.js").read_text(encoding="utf-8")),
        plotly=Markup(_plotly()),
        data=Markup(packed(_block(page))),
        light=LIGHT,
        dark=DARK,
        statuses=STATUSES,
    )


def drawn(figure: Figure) -> Any:
    """A figure as a plotly figure in the light theme, for notebooks. Needs plotly, the extra [report]."""
    import plotly.graph_objects

    data = _figure(figure)
    layout = {
        "title": {"text": figure.title}, "template": "plotly_white", "hovermode": "closest", **data["layout"],
    }  # fmt: skip
    resolved = _resolved({"data": data["traces"], "layout": layout})
    return plotly.graph_objects.Figure(resolved["data"], resolved["layout"])


def _resolved(value: Any, key: str = "") -> Any:
    """Replace colour names by colours and escape text that plotly would read as markup, as behaviour.js does."""
    if isinstance(value, str):
        named = re.fullmatch(r"@([a-z]+)(?:/([\d.]+))?", value) if "color" in key else None
        if named is not None:
            parts = ",".join(str(int(LIGHT[named[1]][i : i + 2], 16)) for i in (1, 3, 5))
            return f"rgba({parts},{named[2] or 1})"
        return html.escape(value, quote=False).replace("\n", "<br>") if key in ("name", "text", "ticktext") else value
    if isinstance(value, Mapping):
        return {name: _resolved(item, name) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_resolved(item, key) for item in value]
    return value


def packed(text: str) -> str:
    """Compressed text in base64, safe inside a script element."""
    return base64.b64encode(zlib.compress(text.encode("utf-8", "backslashreplace"), 9)).decode()


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs())


def plain(value: Any) -> Any:
    """Reduce data to numbers, strings, lists and dictionaries; six digits, None for infinities and NaN."""
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    return str(value)


def as_json(value: Any) -> str:
    """Plain data as indented JSON."""
    return json.dumps(plain(value), ensure_ascii=False, indent=1, allow_nan=False)


def number(value: Any) -> str:
    """Text of a cell: four significant digits, a dash for None and NaN."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def extent(text: str) -> str:
    """Class of a cell by its length: short text stays on one line, long text wraps within a readable width."""
    return "short" if len(text) <= SHORT else "long" if len(text) > LONG else ""


def glued(value: Any) -> Any:
    """Text without line breaks inside "95 %", "9–10" and "τ = 0"; other values are unchanged."""
    if type(value) is not str:  # markup is ready
        return value
    return RANGE.sub("\u2060–\u2060", EQUATION.sub("\u00a0=\u00a0", value.replace(" %", "\u00a0%")))


def slug(name: str) -> str:
    """A name reduced to letters, digits and hyphens, for files and element ids."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "page"


def _block(page: Page) -> str:
    return json.dumps(plain(_for_script(page)), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _for_script(page: Page) -> dict[str, Any]:
    parts = [part for section in page.sections for part in _leaves(section.parts)]
    texts: dict[str, int] = {}
    data = page.data
    if isinstance(data, Mapping):
        data = {name: {"@table": slug(v.name)} if isinstance(v, Table) else v for name, v in data.items()}
    return {
        "name": slug(page.name),
        "data": data,
        "palettes": {"light": LIGHT, "dark": DARK},
        "tones": TONES,
        "symbols": SYMBOLS,
        "figures": {
            slug(part.name): _cloud(part) if isinstance(part, PointCloud) else _indexed(_figure(part), texts)
            for part in parts
            if isinstance(part, Figure | PointCloud)
        },
        "tables": {slug(part.name): _table(part) for part in parts if isinstance(part, Table)},
        "choices": {choice.key: {"label": choice.label, "within": choice.within} for choice in page.choices},
        "texts": list(texts),
    }


def _indexed(figure: dict[str, Any], texts: dict[str, int]) -> dict[str, Any]:
    """Replace the hover texts of a figure by indices into `texts`: figures of the same heads share them."""

    def index_of(text: Any) -> Any:
        return texts.setdefault(text, len(texts)) if isinstance(text, str) else [index_of(each) for each in text]

    traces = [{**t, "text": index_of(t["text"])} if "text" in t else t for t in figure["traces"]]
    return {**figure, "traces": traces}


def _leaves(parts: Sequence[Part]) -> list[Part]:
    """All parts, with views replaced by the parts in them."""
    return [
        leaf
        for part in parts
        for leaf in (_leaves([p for view in part.views for p in view.parts]) if isinstance(part, Views) else [part])
    ]


def _figure(figure: Figure) -> dict[str, Any]:
    traces = [trace for mark in figure.marks for trace in mark.traces()]
    values = {key: [v for trace in traces if trace["type"] == "scatter" for v in trace[key]] for key in ("x", "y")}
    layout = {"xaxis": _axis(figure.x, values["x"]), "yaxis": _axis(figure.y, values["y"])}
    if figure.equal:
        layout["xaxis"] |= {"constrain": "domain"}  # limits fit the marks; the plot becomes narrower instead
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
    return {"title": figure.title, "traces": traces, "layout": layout}


def _axis(axis: Axis, values: Sequence[float | None]) -> dict[str, Any]:
    layout: dict[str, Any] = {"title": {"text": axis.label}, "type": axis.scale}
    if axis.range is not None:
        layout["range"] = [math.log10(end) for end in axis.range] if axis.scale == "log" else list(axis.range)
    if axis.names:
        step = math.ceil(len(axis.names) / TICKS)
        layout |= {"tickvals": list(range(0, len(axis.names), step)), "ticktext": list(axis.names[::step])}
    if axis.scale == "log":
        layout |= {"exponentformat": "power", "dtick": 1 if _decades(axis, values) > 1.5 else "D2"}
    return layout


def _decades(axis: Axis, values: Sequence[float | None]) -> float:
    """Number of powers of ten that a logarithmic axis spans; short axes also have labels between the powers."""
    positive = axis.range or [v for v in values if v is not None and 0 < v < math.inf]
    return math.log10(max(positive) / min(positive)) if positive else 0.0


def _cloud(cloud: PointCloud) -> dict[str, Any]:
    return {
        "title": cloud.title,
        "labels": [axis.label for axis in cloud.axes],
        "names": [axis.name for axis in cloud.axes],
        "times": cloud.times,
        "frames": [[[_short(c) for c in token] for token in frame] for frame in cloud.frames],
        "groups": cloud.groups,
        "equal": cloud.equal,
    }


def _short(value: float) -> float:
    """Round to four digits: finer than the screen resolution, in a third of the bytes."""
    return float(f"{value:.4g}")


def _table(table: Table) -> dict[str, Any]:
    heads = [f"{c.name} [{c.unit}]" if c.unit else c.name for c in table.columns]
    rows = [[cell.label if isinstance(cell, Chip | Link) else cell for cell in row] for row in table.rows]
    cells = [cell for row in table.rows for cell in row]
    tones = {c.label: STATUSES[c.status] if c.status else c.colour for c in cells if isinstance(c, Chip)}
    links = {c.label: slug(c.to) for c in cells if isinstance(c, Link)}
    # Columns with few distinct strings hold indices, and each string is stored once.
    coded = {}
    for i, column in enumerate(zip(*rows, strict=True)):
        names = list(dict.fromkeys(column))
        if len(rows) > table.shown and 4 * len(names) < len(rows) and all(isinstance(name, str) for name in names):
            coded[i] = names
            at = {name: place for place, name in enumerate(names)}
            for row in rows:
                row[i] = at[row[i]]
    return {
        "columns": heads, "rows": rows, "keys": table.keys, "shown": table.shown, "tones": tones, "links": links,
        "coded": coded,
    }  # fmt: skip
