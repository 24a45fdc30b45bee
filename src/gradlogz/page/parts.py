"""The parts of a page, as plain data.

    Page
      verdict             the result in a sentence, with chips and groups
      choices             items that the reader can select to filter every table and figure
      sections            headings that fold
        Text  Facts  VerdictBanner  Table  Figure  PointCloud, and Views, which show one group of them at a time
      reproduce           version, seed, command line
      references          cited works

Every string is text, never markup: the template escapes it.

Read next: marks.py (figures), rendering.py (the HTML).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .marks import Figure, PointCloud

Status = Literal["agrees", "departs", "inconclusive", "silent"]


@dataclass(frozen=True)
class Chip:
    """A label in a coloured frame; the colour is that of its status, or `colour` if it has none."""

    label: str
    status: Status | None = None
    colour: str = "grey"


@dataclass(frozen=True)
class Link:
    """A link to the section named `to`."""

    label: str
    to: str


Cell = str | float | int | bool | Chip | Link | None


@dataclass(frozen=True)
class Text:
    """Paragraphs; with a title they are folded below it, and their line breaks are kept."""

    kind: ClassVar[str] = "text"
    paragraphs: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and their values, one line each."""

    kind: ClassVar[str] = "facts"
    rows: Mapping[str, str]


@dataclass(frozen=True)
class Group:
    """Links that share a chip, each with a sentence."""

    chip: Chip
    entries: tuple[tuple[Link, str], ...]


@dataclass(frozen=True)
class VerdictBanner:
    """The result in a sentence, with chips, notes, and groups of links to the sections."""

    kind: ClassVar[str] = "verdict"
    sentence: str
    chips: tuple[Chip, ...] = ()
    notes: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Column:
    """The head of a column: name, unit and formula."""

    name: str
    unit: str = ""
    formula: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns, which the reader can sort and download.

    keys: the choice each row belongs to; rows of other choices are hidden.
    shown: number of rows before the reader expands the table.
    wide: full width of the page. stacked: each row becomes a list on a narrow screen.
    """

    kind: ClassVar[str] = "table"
    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""
    keys: tuple[str, ...] = ()
    shown: int = 1000
    wide: bool = True
    stacked: bool = False


@dataclass(frozen=True)
class View:
    """Parts that are shown together, under a label."""

    label: str
    parts: tuple[Text | Table | Figure, ...]


@dataclass(frozen=True)
class Views:
    """Alternative views, one shown at a time; the reader picks it from a list headed by `title`."""

    kind: ClassVar[str] = "views"
    name: str
    title: str
    views: tuple[View, ...]
    wide: bool = True


Part = Text | Facts | VerdictBanner | Table | Figure | PointCloud | Views


@dataclass(frozen=True)
class Section:
    """A heading, and parts that fold below it.

    name: target of links. chips: labels after the heading.
    """

    title: str
    parts: tuple[Part, ...]
    folded: bool = False
    name: str = ""
    chips: tuple[Chip, ...] = ()


@dataclass(frozen=True)
class Choice:
    """An item that the reader can select, such as a head; `within` is the key of the group it belongs to.

    Selecting a group also selects its members, and selecting a member also selects what is keyed by its group. An empty
    key matches every selection.
    """

    key: str
    label: str
    within: str = ""


@dataclass(frozen=True)
class Reference:
    """A cited work."""

    key: str
    text: str
    address: str = ""


@dataclass(frozen=True)
class Page:
    """A page.

    name: prefix of the names of downloaded files; reduced to letters, digits and hyphens.
    guide: terms and their explanations for "How to read this page", folded below the verdict; empty for none.
    data: the data behind the page, offered as JSON; a table in it stands for its columns and rows.
    chosen: name of the choices, such as "head".
    """

    name: str
    title: str
    subtitle: str
    verdict: VerdictBanner
    sections: tuple[Section, ...]
    guide: Mapping[str, str] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    reproduce: Mapping[str, str] = field(default_factory=dict)
    references: tuple[Reference, ...] = ()
    data: Any = None
    made_by: str = "gradlogz"
    choices: tuple[Choice, ...] = ()
    chosen: str = "choice"
