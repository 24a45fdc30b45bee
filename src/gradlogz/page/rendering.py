"""A page as HTML: one template, one style sheet, one script, and plotly's, all in one file.

Nothing is fetched when it is opened, and a policy in its head forbids it. Strings are escaped by the template; numbers
and names for the script go into a block of JSON in which no character can end it.

Read next: template.html, style.css, behaviour.js.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from .marks import Axis, Cloud, Figure
from .palette import DARK, LIGHT, STATUSES, TONES
from .parts import Chip, Page, Table

HERE = Path(__file__).parent
SYMBOLS = ("circle", "square", "diamond", "cross", "triangle-up", "star", "x", "pentagon", "hexagon", "bowtie")


def render(page: Page) -> str:
    """The page as one HTML file. Needs jinja2 and plotly, the extra [report]."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup
    from plotly.offline import get_plotlyjs

    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = number
    environment.filters["slug"] = slug
    return environment.get_template("template.html").render(
        page=page,
        style=Markup((HERE / "style.css").read_text(encoding="utf-8")),
        behaviour=Markup((HERE / "behaviour.js").read_text(encoding="utf-8")),
        plotly=Markup(get_plotlyjs().replace("</script", "<\\/script")),
        data=Markup(block(_for_script(page))),
        light=LIGHT,
        dark=DARK,
        statuses=STATUSES,
    )


def block(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(plain(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


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


def _for_script(page: Page) -> dict[str, Any]:
    parts = [part for section in page.sections for part in section.parts]
    return {
        "name": slug(page.name),
        "data": page.data,
        "palettes": {"light": LIGHT, "dark": DARK},
        "tones": TONES,
        "symbols": SYMBOLS,
        "figures": {
            slug(part.name): _cloud(part) if isinstance(part, Cloud) else _figure(part)
            for part in parts
            if isinstance(part, Figure | Cloud)
        },
        "tables": {slug(part.name): _table(part) for part in parts if isinstance(part, Table)},
    }


def _figure(figure: Figure) -> dict[str, Any]:
    traces = [trace for mark in figure.marks for trace in mark.traces()]
    seen = {key: [v for trace in traces if trace["type"] == "scatter" for v in trace[key]] for key in ("x", "y")}
    layout = {"xaxis": _axis(figure.x, seen["x"]), "yaxis": _axis(figure.y, seen["y"])}
    return {"title": figure.title, "traces": traces, "layout": layout}


def _axis(axis: Axis, values: Sequence[float | None]) -> dict[str, Any]:
    found: dict[str, Any] = {"title": {"text": axis.label}, "type": axis.scale}
    if axis.range is not None:
        found["range"] = [math.log10(end) for end in axis.range] if axis.scale == "log" else list(axis.range)
    if axis.names:
        found |= {"tickvals": list(range(len(axis.names))), "ticktext": list(axis.names)}
    if axis.scale == "log":
        found |= {"exponentformat": "power", "dtick": 1 if _decades(axis, values) > 1.5 else "D2"}
    return found


def _decades(axis: Axis, values: Sequence[float | None]) -> float:
    """How many powers of ten a logarithmic axis spans: over few, the numbers between them are labelled too."""
    positive = axis.range or [v for v in values if v is not None and 0 < v < math.inf]
    return math.log10(max(positive) / min(positive)) if positive else 0.0


def _cloud(cloud: Cloud) -> dict[str, Any]:
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
    rows = [[cell.label if isinstance(cell, Chip) else cell for cell in row] for row in table.rows]
    return {"columns": heads, "rows": rows}
