"""Detections from a file or from columns: who was seen where and when, each bad cell named.

    time      a number, or an ISO timestamp, in which case times are seconds
    target    any name; there is one target where there is no such column
    x, y, z   numbers; empty or NaN where nothing was seen of a coordinate, and z may be left out altogether

Rows of a target stand in the order of time; targets may be interleaved. Columns are converted one at a time, rows are
grouped by sorting: nothing here looks at rows one by one but what is wrong with them.

Read next: run_tracking.py (what is done with them).
"""

import csv
import math
import os
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .._errors import InputValueError, MissingPackageError
from .._typing import Float, Int, Tensor

COLUMNS = ("time", "target", "x", "y", "z")
MISSING = ("", "na", "n/a", "null", "none", "-")  # float reads nan itself
DELIMITERS = ",;\t"
LONGEST = 40  # letters of a cell that a message shows
Source = str | os.PathLike[str] | Mapping[str, Any]


class Bad(NamedTuple):
    """A row that cannot be used: where, what must hold, and what it holds."""

    row: int
    condition: str
    fact: str


class Detections(NamedTuple):
    """What was read; rows in their order.

    Attributes:
        label: times as they were given.
        time: in numbers, from the earliest on.
        target: of each row, the place of its name in `names`.
        position: NaN where nothing was seen.
        unit: "s" where times were timestamps.
        bad: rows that were left out.
        truth: the states behind them, of a scenario: positions, then velocities.
    """

    label: list[Any]
    time: Float[Tensor, "n"]
    target: Int[Tensor, "n"]
    names: list[str]
    position: Float[Tensor, "n d"]
    unit: str
    bad: list[Bad]
    truth: Float[Tensor, "n e"] | None = None

    @property
    def axes(self) -> str:
        """The names of the coordinates."""
        return "xyz"[: self.position.shape[-1]]


class Columns(NamedTuple):
    """Cells by column, and the number of the row of each; rows without the right number of cells are bad."""

    cells: dict[str, Sequence[Any]]
    rows: Sequence[int]
    bad: list[Bad]


def read(source: Source, *, skip_bad: bool = False) -> Detections:
    """Detections from a CSV or parquet file, or from columns; a sentence for the first row that is wrong.

    With skip_bad rows that are wrong are left out and counted; of times that go back, as few as can be.
    """
    given = columns_of(source) if isinstance(source, Mapping) else _file(Path(source))
    _check_columns(list(given.cells))
    found, wrong_cells = _converted(given)
    bad = list({b.row: b for b in reversed([*given.bad, *wrong_cells])}.values())  # one of each row
    if bad and not skip_bad:
        _refuse(min(bad))
    wrong = {b.row for b in bad}
    rows = list(given.rows)
    if wrong:
        kept = [i for i, row in enumerate(rows) if row not in wrong]
        rows, found = [rows[i] for i in kept], _taken(found, kept)
    late = _out_of_order(found, rows)
    if late and not skip_bad:
        _refuse(_first_back(found, rows))
    if late:
        wrong = {b.row for b in late}
        found = _taken(found, [i for i, row in enumerate(rows) if row not in wrong])
    if not bool(found.position.isfinite().any()):
        fact = f"{len(found.time)} rows, {len(bad) + len(late)} bad ones left out"
        remedy = "A row has a time, and numbers in x and y."
        raise InputValueError("track", "detections", f"there must be a detection, got {fact}", remedy)
    return found._replace(time=found.time - found.time.min(), bad=sorted([*bad, *late]))


def _refuse(bad: Bad) -> None:
    remedy = "Mend it, or leave bad rows out with --skip-bad."
    raise InputValueError("track", "detections", f"{bad.condition}, got {bad.fact}", remedy)


# Files --------------------------------------------------------------------------------------------------------------


def columns_of(source: Mapping[str, Any]) -> Columns:
    """Columns of a dictionary, of arrays, tensors or lists of one length; rows count from 1."""
    cells = {_name(n): v.tolist() if hasattr(v, "tolist") else list(v) for n, v in source.items()}
    lengths = {len(v) for v in cells.values()}
    if len(lengths) > 1:
        fact = f"lengths {', '.join(map(str, sorted(lengths)))}"
        raise InputValueError(
            "track", "columns", f"columns must be of one length, got {fact}", "A row has a cell in each."
        )
    return Columns(cells, range(1, max(lengths, default=0) + 1), [])


def _file(path: Path) -> Columns:
    """The columns of a file; rows of CSV count from its head, which is row 1."""
    try:
        return _parquet(path) if path.suffix == ".parquet" else _csv(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        fact = error.strerror if isinstance(error, OSError) else "what is no text in UTF-8"
        remedy = "Pass a file of columns time, target, x, y, as CSV or with the suffix .parquet."
        raise InputValueError(
            "track", "detections", f"{path} must be a file that can be read, got {fact}", remedy
        ) from None


def _csv(path: Path) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        delimiter = max(DELIMITERS, key=head.count)
        file.seek(0)
        reader = csv.reader(file, delimiter=delimiter)
        rows = list(reader)
    if not rows or "\0" in head:
        fact, remedy = "none" if not rows else "zeros, as in a binary file", "Its head says time,target,x,y."
        raise InputValueError("track", "detections", f"{path} must have rows of text, got {fact}", remedy)
    names = [_name(cell) for cell in rows[0]]
    twice = [name for i, name in enumerate(names) if name in names[:i]]
    if twice:
        raise InputValueError(
            "track", "columns", f"columns must have different names, got {twice[0]!r} twice", "Rename one."
        )
    width = len(names)
    numbers = [i for i, cells in enumerate(rows[1:], 2) if cells]  # empty lines are no rows
    body = [cells for cells in rows[1:] if cells]
    bad: list[Bad] = []
    if any(len(cells) != width for cells in body):
        for i, cells in zip(numbers, body, strict=True):
            if len(cells) != width:
                bad.append(Bad(i, f"row {i} must have {width} cells", f"{len(cells)}"))
        numbers = [i for i, cells in zip(numbers, body, strict=True) if len(cells) == width]
        body = [cells for cells in body if len(cells) == width]
    columns: list[Sequence[Any]] = list(zip(*body, strict=True)) if body else [()] * width
    return Columns(dict(zip(names, columns, strict=True)), numbers, bad)


def _parquet(path: Path) -> Columns:
    try:
        import polars
    except ImportError:
        remedy = "Install it with: pip install 'gradlogz[tables]', or pass CSV."
        raise MissingPackageError(
            "track", "polars", "polars must be installed to read parquet, got no polars", remedy
        ) from None
    with path.open("rb") as file:
        try:
            frame = polars.read_parquet(file)
        except polars.exceptions.PolarsError:
            remedy = "Write it again, or pass CSV."
            raise InputValueError(
                "track", "detections", f"{path} must be parquet, got another format", remedy
            ) from None
    return columns_of({name: frame[name].to_list() for name in frame.columns})


def _name(cell: Any) -> str:
    return str(cell).strip().lower()


def _check_columns(names: list[str]) -> None:
    missing = [name for name in ("time", "x", "y") if name not in names]
    unknown = [name for name in names if name not in COLUMNS]
    if missing or unknown:
        condition = f"columns must be {', '.join(COLUMNS[:-1])} and perhaps z"
        fact = f"no {missing[0]!r}" if missing else f"{_shown(unknown[0])} too"
        remedy = "Its first row names them; target may be left out." if missing else "Leave it out."
        raise InputValueError("track", "columns", f"{condition}, got {fact}", remedy)


# Cells --------------------------------------------------------------------------------------------------------------


def _converted(given: Columns) -> tuple[Detections, list[Bad]]:
    """Numbers of cells; NaN is nothing, and infinity what is no number."""
    cells, rows, bad = given.cells, given.rows, []

    def refuse(name: str, wrong: Tensor, condition: str) -> None:
        for i in wrong.nonzero().flatten().tolist():
            bad.append(Bad(rows[i], f"row {rows[i]}, column {name}, must {condition}", _shown(cells[name][i])))

    position = []
    for axis in "xyz":
        if axis in cells:
            numbers = _numbers(cells[axis])
            refuse(axis, numbers.isinf(), "hold a number or nothing")
            position.append(numbers)
    time, unit = _times(cells["time"])
    refuse("time", ~time.isfinite(), "hold a number or an ISO timestamp")
    named = ["" if cell is None else str(cell).strip() for cell in cells.get("target", ["1"] * len(rows))]
    places: dict[str, int] = {}
    target = torch.tensor([places.setdefault(name, len(places)) for name in named], dtype=torch.long)
    refuse("target", target == places.get("", -1), "name a target")
    found = Detections(list(cells["time"]), time, target, list(places), torch.stack(position, -1), unit, [])
    return found, bad


def _numbers(cells: Sequence[Any]) -> Tensor:
    try:
        values = list(map(float, cells))
    except (ValueError, TypeError, OverflowError):
        values = list(map(_number, cells))
    return torch.tensor(values, dtype=torch.float64)


def _number(cell: Any) -> float:
    if cell is None or (isinstance(cell, str) and cell.strip().lower() in MISSING):
        return math.nan
    try:
        return float(cell)
    except (ValueError, TypeError, OverflowError):
        return math.inf


def _times(cells: Sequence[Any]) -> tuple[Tensor, str]:
    """Times in numbers, and their unit: what the first of them is, all are."""
    first = next((cell for cell in cells if not math.isnan(_number(cell))), None)
    if first is None or math.isfinite(_number(first)) or math.isinf(_moment(first)):
        return _numbers(cells), ""
    return torch.tensor(list(map(_moment, cells)), dtype=torch.float64), "s"


def _moment(cell: Any) -> float:
    """Seconds of a timestamp; without a zone it is universal time."""
    try:
        at = cell if isinstance(cell, datetime) else datetime.fromisoformat(str(cell).strip())
    except ValueError:
        return math.inf
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _shown(cell: Any) -> str:
    text = repr(cell)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


# Order --------------------------------------------------------------------------------------------------------------


def grouped(target: Int[Tensor, "n"]) -> tuple[Int[Tensor, "n"], Int[Tensor, "b"], Int[Tensor, "b"]]:
    """Rows target by target, in their order; where each target begins among them, and how many rows it has."""
    order = target.sort(stable=True).indices
    lengths = target.bincount()
    return order, lengths.cumsum(0) - lengths, lengths


def _taken(found: Detections, kept: list[int]) -> Detections:
    """Some rows, and of the targets those that have any."""
    at = torch.tensor(kept, dtype=torch.long)
    left, target = found.target[at].unique(return_inverse=True)
    return found._replace(
        label=[found.label[i] for i in kept],
        time=found.time[at],
        target=target,
        names=[found.names[i] for i in left.tolist()],
        position=found.position[at],
    )


def _first_back(found: Detections, rows: list[int]) -> Bad:
    """The first row that is not later than the one before of its target."""
    order = grouped(found.target)[0]
    after = order[1:][_back(found, order)]
    at = int(after.min())
    before = int(order[int((order == at).nonzero()) - 1])
    condition = f"row {rows[at]}, column time, must be later than row {rows[before]} of its target"
    return Bad(rows[at], condition, f"{_shown(found.label[at])} after {_shown(found.label[before])}")


def _out_of_order(found: Detections, rows: list[int]) -> list[Bad]:
    """As few rows as can be, without which times rise in every target."""
    order, starts, lengths = grouped(found.target)
    bad = []
    for who in found.target[order][1:][_back(found, order)].unique().tolist():
        own = order[int(starts[who]) : int(starts[who] + lengths[who])]
        kept = set(_longest_rise(found.time[own].tolist()))
        for at in (int(own[i]) for i in range(len(own)) if i not in kept):
            condition = f"row {rows[at]}, column time, must be in the order of the times of its target"
            bad.append(Bad(rows[at], condition, _shown(found.label[at])))
    return bad


def _back(found: Detections, order: Tensor) -> Tensor:
    """Which steps from one row to the next of the same target are not forward."""
    return (found.time[order].diff() <= 0) & (found.target[order].diff() == 0)


def _longest_rise(values: list[float]) -> list[int]:
    """The places of a longest sequence of values that rises, from the last on; of equal values the first stays."""
    ends: list[float] = []
    places: list[int] = []
    after: dict[int, int] = {}
    for i in reversed(range(len(values))):
        at = bisect_left(ends, -values[i])
        if at:
            after[i] = places[at - 1]
        ends[at : at + 1] = [-values[i]]
        places[at : at + 1] = [i]
    found = [places[-1]]
    while found[-1] in after:
        found.append(after[found[-1]])
    return found
