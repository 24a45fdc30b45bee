"""A page as HTML: one template, one style sheet, one script, and plotly's, all in one file.

Nothing is fetched when it is opened, and a policy in its head forbids it. Strings are escaped by the template. Numbers
and names for the script, and plotly's own, go into blocks of letters in which no character can end them: compressed,
they are a third of the page that they would be, and plotly is unpacked when a figure comes near.

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
TICKS = 24  # names that an axis has room for
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "pentagon", "hexagon", "bowtie")


def render(page: Page) -> str:
    """The page as one HTML file. Needs jinja2 and plotly, the extra [report]."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
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
    """One figure as plotly's own, in light, for notebooks. Needs plotly, the extra [report]."""
    import plotly.graph_objects

    found = _figure(figure)
    layout = {
        "title": {"text": figure.title}, "template": "plotly_white", "hovermode": "closest", **found["layout"],
    }  # fmt: skip
    dressed = _dressed({"data": found["traces"], "layout": layout})
    return plotly.graph_objects.Figure(dressed["data"], dressed["layout"])


def _dressed(value: Any, key: str = "") -> Any:
    """Colours in place of their names, and text without what plotly reads as markup, as behaviour.js does."""
    if isinstance(value, str):
        named = re.fullmatch(r"@([a-z]+)(?:/([\d.]+))?", value) if "color" in key else None
        if named is not None:
            parts = ",".join(str(int(LIGHT[named[1]][i : i + 2], 16)) for i in (1, 3, 5))
            return f"rgba({parts},{named[2] or 1})"
        return html.escape(value, quote=False).replace("\n", "<br>") if key in ("name", "text", "ticktext") else value
    if isinstance(value, Mapping):
        return {name: _dressed(item, name) for name, item in value.items()}
    if isinstance(value, Sequence):
        return [_dressed(item, key) for item in value]
    return value


def packed(text: str) -> str:
    """Text as letters that may stand inside a script element, smaller than it was."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


@cache
def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs())


def plain(value: Any) -> Any:
    """Numbers, strings, lists and dictionaries alone; six digits, and nothing for what is not finite."""
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
    """Plain data as JSON, one line for each number or name."""
    return json.dumps(plain(value), ensure_ascii=False, indent=1, allow_nan=False)


def number(value: Any) -> str:
    """A cell as text: four digits of a number, a dash for none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def slug(name: str) -> str:
    """A name of letters, digits and hyphens, as files and elements may have it."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "page"


def _block(page: Page) -> str:
    return json.dumps(plain(_for_script(page)), ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _for_script(page: Page) -> dict[str, Any]:
    parts = [part for section in page.sections for part in _leaves(section.parts)]
    words: dict[str, int] = {}
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
            slug(part.name): _cloud(part) if isinstance(part, PointCloud) else _numbered(_figure(part), words)
            for part in parts
            if isinstance(part, Figure | PointCloud)
        },
        "tables": {slug(part.name): _table(part) for part in parts if isinstance(part, Table)},
        "choices": {choice.key: {"label": choice.label, "within": choice.within} for choice in page.choices},
        "words": list(words),
    }


def _numbered(figure: dict[str, Any], words: dict[str, int]) -> dict[str, Any]:
    """The figure with numbers for what is said of its marks: two figures of the same heads say the same."""

    def number_of(text: Any) -> Any:
        return words.setdefault(text, len(words)) if isinstance(text, str) else [number_of(each) for each in text]

    traces = [{**t, "text": number_of(t["text"])} if "text" in t else t for t in figure["traces"]]
    return {**figure, "traces": traces}


def _leaves(parts: Sequence[Part]) -> list[Part]:
    """The parts, those of views among them."""
    return [
        leaf
        for part in parts
        for leaf in (_leaves([p for view in part.views for p in view.parts]) if isinstance(part, Views) else [part])
    ]


def _figure(figure: Figure) -> dict[str, Any]:
    traces = [trace for mark in figure.marks for trace in mark.traces()]
    seen = {key: [v for trace in traces if trace["type"] == "scatter" for v in trace[key]] for key in ("x", "y")}
    layout = {"xaxis": _axis(figure.x, seen["x"]), "yaxis": _axis(figure.y, seen["y"])}
    if figure.equal:
        layout["yaxis"] |= {"scaleanchor": "x", "constrain": "domain"}
    return {"title": figure.title, "traces": traces, "layout": layout}


def _axis(axis: Axis, values: Sequence[float | None]) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": axis.label}, "type": axis.scale}
    if axis.range is not None:
        found["range"] = [math.log10(end) for end in axis.range] if axis.scale == "log" else list(axis.range)
    if axis.names:
        step = math.ceil(len(axis.names) / TICKS)
        found |= {"tickvals": list(range(0, len(axis.names), step)), "ticktext": list(axis.names[::step])}
    if axis.scale == "log":
        found |= {"exponentformat": "power", "dtick": 1 if _decades(axis, values) > 1.5 else "D2"}
    return found


def _decades(axis: Axis, values: Sequence[float | None]) -> float:
    """How many powers of ten a logarithmic axis spans: over few, the numbers between them are labelled too."""
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
    """Four digits: more than a screen has places, in a third of the file."""
    return float(f"{value:.4g}")


def _table(table: Table) -> dict[str, Any]:
    heads = [f"{c.name} [{c.unit}]" if c.unit else c.name for c in table.columns]
    rows = [[cell.label if isinstance(cell, Chip | Link) else cell for cell in row] for row in table.rows]
    cells = [cell for row in table.rows for cell in row]
    tones = {c.label: STATUSES[c.status] if c.status else c.colour for c in cells if isinstance(c, Chip)}
    links = {c.label: slug(c.to) for c in cells if isinstance(c, Link)}
    # Columns of few words, in many rows: each word once, and its number in the rows.
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
