"""What a page is made of: plain data, nothing drawn yet.

    Page
      verdict             what was found, in a sentence, with chips and groups
      choices             what a reader may choose, of which every table and figure then speaks
      sections            each a heading that folds
        Text  Facts  VerdictBanner  Table  Figure  PointCloud, and Views, which show some of them at a time
      reproduce           version, seed, command line
      references          what is cited

Every string is text, never markup: it is escaped where it is put in.

Read next: marks.py (figures), rendering.py (how it becomes HTML).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .marks import Figure, PointCloud

Status = Literal["agrees", "departs", "undecided", "silent"]


@dataclass(frozen=True)
class Chip:
    """A word in a coloured frame; its colour is that of a status, or one named."""

    label: str
    status: Status | None = None
    colour: str = "grey"


@dataclass(frozen=True)
class Link:
    """Words that lead to the section of that name."""

    label: str
    to: str


Cell = str | float | int | bool | Chip | Link | None


@dataclass(frozen=True)
class Text:
    """Paragraphs; those under a title fold away, and lines are kept as they are broken."""

    kind: ClassVar[str] = "text"
    paragraphs: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Facts:
    """Names and what they are, one line each."""

    kind: ClassVar[str] = "facts"
    rows: Mapping[str, str]


@dataclass(frozen=True)
class Group:
    """What shares a chip: names that lead to sections, each with a sentence."""

    chip: Chip
    entries: tuple[tuple[Link, str], ...]


@dataclass(frozen=True)
class VerdictBanner:
    """What was found, in a sentence, and what stands beside it; groups tell it one by one."""

    kind: ClassVar[str] = "verdict"
    sentence: str
    chips: tuple[Chip, ...] = ()
    notes: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()


@dataclass(frozen=True)
class Column:
    """The head of a column: a name, its unit, and the formula."""

    name: str
    unit: str = ""
    formula: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; the reader sorts them and takes them along.

    keys: of each row; those of another choice than the reader's are left out.
    shown: how many rows there are before the reader asks for all.
    wide: whether it takes the whole width. stacked: whether rows become lists on a narrow screen.
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
    """Parts that are shown together, under a name."""

    label: str
    parts: tuple[Text | Table | Figure, ...]


@dataclass(frozen=True)
class Views:
    """One view at a time; the reader picks it by its label, from a list that is headed by `title`."""

    kind: ClassVar[str] = "views"
    name: str
    title: str
    views: tuple[View, ...]
    wide: bool = True


Part = Text | Facts | VerdictBanner | Table | Figure | PointCloud | Views


@dataclass(frozen=True)
class Section:
    """A heading, and parts below it, which fold away.

    name: what links lead to. chips: beside the heading.
    """

    title: str
    parts: tuple[Part, ...]
    folded: bool = False
    name: str = ""
    chips: tuple[Chip, ...] = ()


@dataclass(frozen=True)
class Choice:
    """Something to choose, a head say; `within` is the key of the whole that it is part of.

    What has the key of a part goes with the whole, and what has that of the whole with each part; an empty key goes
    with all.
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
    """A whole page.

    name: of the files that a reader takes from it; made of letters, digits and hyphens whatever is given.
    data: what the whole page is made from, offered as JSON; a table of the page stands for its columns and rows.
    chosen: what the choices are called, "head" say.
    """

    name: str
    title: str
    subtitle: str
    verdict: VerdictBanner
    sections: tuple[Section, ...]
    methods: tuple[str, ...] = ()
    reproduce: Mapping[str, str] = field(default_factory=dict)
    references: tuple[Reference, ...] = ()
    data: Any = None
    made_by: str = "gradlogz"
    choices: tuple[Choice, ...] = ()
    chosen: str = "choice"
