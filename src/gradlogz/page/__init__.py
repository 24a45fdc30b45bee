"""The one look of all HTML pages: plain data in, one offline file out.

Page        title, verdict, sections, and how to make it again
Section     a heading that folds, and parts: Text, Facts, VerdictBanner, Table, Figure, PointCloud, Views
Figure      axes with units and formulas, and marks: Line, Ribbon, Points, Outlines, Heat
Choice      what a reader may choose, so that every part speaks of it
render      a page as HTML; write puts a file in its place whole or not at all
drawn       one figure, for a notebook

A leaf: it knows neither torch nor the rest of the package.
"""

from .marks import Axis, Figure, Heat, Line, Mark, Outlines, PointCloud, Points, Ribbon
from .parts import (
    Cell,
    Chip,
    Choice,
    Column,
    Facts,
    Group,
    Link,
    Page,
    Part,
    Reference,
    Section,
    Table,
    Text,
    VerdictBanner,
    View,
    Views,
)
from .rendering import as_json, drawn, render
from .writing import missing, replaced, write

__all__ = [
    "Page",
    "Section",
    "Choice",
    "Part",
    "Text",
    "Facts",
    "Chip",
    "Group",
    "VerdictBanner",
    "Table",
    "Column",
    "Cell",
    "Link",
    "Views",
    "View",
    "Figure",
    "PointCloud",
    "Axis",
    "Mark",
    "Line",
    "Ribbon",
    "Points",
    "Outlines",
    "Heat",
    "Reference",
    "render",
    "drawn",
    "as_json",
    "missing",
    "replaced",
    "write",
]
