"""The one look of all HTML pages: plain data in, one offline file out.

Page        title, verdict, sections, and how to reproduce it
Section     a heading that folds, and parts: Text, Facts, VerdictBanner, Table, Figure, PointCloud, Views
Figure      axes with units and formulas, and marks: Line, Ribbon, Points, Outlines, Heat
Choice      an item that the reader can select to filter every part
render      a page as HTML
drawn       one figure, for a notebook

A leaf: it imports neither torch nor the rest of the package.
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
from .required_packages import missing

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
]
