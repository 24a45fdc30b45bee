"""The one look of all HTML pages: plain data in, one offline file out.

Page        title, verdict, sections, and how to make it again
Section     a heading that folds, and parts: Text, Facts, Verdict, Table, Figure, Cloud
Figure      axes with units and formulas, and marks: Line, Band, Points, Heat
render      a page as HTML; write puts a file in its place whole or not at all

A leaf: it knows neither torch nor the rest of the package.
"""

from .marks import Axis, Band, Cloud, Figure, Heat, Line, Mark, Points
from .parts import Cell, Chip, Column, Facts, Page, Part, Reference, Section, Table, Text, Verdict
from .rendering import as_json, render
from .writing import write

__all__ = [
    "Page",
    "Section",
    "Part",
    "Text",
    "Facts",
    "Chip",
    "Verdict",
    "Table",
    "Column",
    "Cell",
    "Figure",
    "Cloud",
    "Axis",
    "Mark",
    "Line",
    "Band",
    "Points",
    "Heat",
    "Reference",
    "render",
    "as_json",
    "write",
]
