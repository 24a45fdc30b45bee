"""What a page is made of: plain data, nothing drawn yet.

    Page
      verdict             what was found, in a sentence, with chips
      sections            each a heading that folds
        Text  Facts  Verdict  Table  Figure  Cloud
      reproduce           version, seed, command line
      references          what is cited

Every string is text, never markup: it is escaped where it is put in.

Read next: marks.py (figures), rendering.py (how it becomes HTML).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from .marks import Cloud, Figure

Status = Literal["agrees", "departs", "undecided", "silent"]


@dataclass(frozen=True)
class Chip:
    """A word in a coloured frame; its colour is that of a status, or one named."""

    label: str
    status: Status | None = None
    colour: str = "grey"


Cell = str | float | int | bool | Chip | None


@dataclass(frozen=True)
class Text:
    """Paragraphs."""

    kind: ClassVar[str] = "text"
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Facts:
    """Names and what they are, one line each."""

    kind: ClassVar[str] = "facts"
    rows: Mapping[str, str]


@dataclass(frozen=True)
class Verdict:
    """What was found, in a sentence, and what stands beside it."""

    kind: ClassVar[str] = "verdict"
    sentence: str
    chips: tuple[Chip, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Column:
    """The head of a column: a name, its unit, and the formula."""

    name: str
    unit: str = ""
    formula: str = ""


@dataclass(frozen=True)
class Table:
    """Rows of cells under columns; the reader sorts them and takes them along."""

    kind: ClassVar[str] = "table"
    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    caption: str = ""


Part = Text | Facts | Verdict | Table | Figure | Cloud


@dataclass(frozen=True)
class Section:
    """A heading, and parts below it, which fold away."""

    title: str
    parts: tuple[Part, ...]
    folded: bool = False


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
    data: what the whole page is made from, offered as JSON.
    """

    name: str
    title: str
    subtitle: str
    verdict: Verdict
    sections: tuple[Section, ...]
    methods: tuple[str, ...] = ()
    reproduce: Mapping[str, str] = field(default_factory=dict)
    references: tuple[Reference, ...] = ()
    data: Any = None
    made_by: str = "gradlogz"
