"""Detections from a CSV or parquet file, or from columns.

    time      number, or ISO timestamp (converted to seconds)
    target    name of the target; optional if there is one target
    x, y, z   coordinates; empty or NaN if not detected; the column z is optional

The rows of each target are in order of time; targets may be interleaved. An invalid cell is reported with its row and
column. Conversion is by column and grouping by sorting, so that only invalid rows cost a Python loop.

Read next: run_tracking.py (the filter).
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
MISSING = ("", "na", "n/a", "null", "none", "-")  # "nan" is parsed by float
DELIMITERS = ",;\t"
LONGEST = 40  # characters of a cell in a message
Source = str | os.PathLike[str] | Mapping[str, Any]


class Bad(NamedTuple):
    """An invalid row: its number, the condition that it violates, and the cell."""

    row: int
    condition: str
    fact: str

    @property
    def problem(self) -> str:
        """The problem as a clause."""
        return f"{self.condition}, got {self.fact}"


class Detections(NamedTuple):
    """Detections in the order of the input.

    Attributes:
        label: times as in the input.
        time: times since the earliest.
        target: index of the target in `names`.
        names: names of the targets.
        position: coordinates; NaN if not detected.
        unit: unit of time: "s" for timestamps, else empty.
        bad: rows that were skipped.
        truth: true states of a scenario: positions, then velocities.
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
        """Names of the coordinates: "xy" or "xyz"."""
        return "xyz"[: self.position.shape[-1]]


class Columns(NamedTuple):
    """Cells by column, the number of each row, and the rows with a wrong number of cells."""

    cells: dict[str, Sequence[Any]]
    rows: Sequence[int]
    bad: list[Bad]


def read(source: Source, *, skip_bad: bool = False) -> Detections:
    """Read detections from a CSV or parquet file, or from columns; raise an error for the first invalid row.

    With skip_bad, invalid rows are skipped and counted; of rows out of order, as few as possible.
    """
    columns = columns_of(source) if isinstance(source, Mapping) else _file(Path(source))
    _check_columns(list(columns.cells))
    detections, bad_cells = _converted(columns)
    bad = list({b.row: b for b in reversed([*columns.bad, *bad_cells])}.values())  # one for each row
    if bad and not skip_bad:
        _refuse(min(bad))
    skipped = {b.row for b in bad}
    rows = list(columns.rows)
    if skipped:
        valid = [i for i, row in enumerate(rows) if row not in skipped]
        rows, detections = [rows[i] for i in valid], _subset(detections, valid)
    late = _out_of_order(detections, rows)
    if late and not skip_bad:
        _refuse(_first_out_of_order(detections, rows))
    if late:
        skipped = {b.row for b in late}
        detections = _subset(detections, [i for i, row in enumerate(rows) if row not in skipped])
    if not bool(detections.position.isfinite().any()):
        problem = f"detections has no coordinate in {len(detections.time)} rows ({len(bad) + len(late)} skipped)"
        raise InputValueError("track", "detections", problem, "Pass rows with a time and with numbers in x or y.")
    return detections._replace(time=detections.time - detections.time.min(), bad=sorted([*bad, *late]))


def _refuse(bad: Bad) -> None:
    remedy = "Correct the row, or skip invalid rows with skip_bad=True (--skip-bad)."
    raise InputValueError("track", "detections", bad.problem, remedy)


# Files --------------------------------------------------------------------------------------------------------------


def columns_of(source: Mapping[str, Any]) -> Columns:
    """Columns of a dictionary of arrays, tensors or lists of equal length; rows are numbered from 1."""
    cells = {_name(n): v.tolist() if hasattr(v, "tolist") else list(v) for n, v in source.items()}
    lengths = {len(v) for v in cells.values()}
    if len(lengths) > 1:
        problem = f"columns must have equal lengths, got {', '.join(map(str, sorted(lengths)))}"
        raise InputValueError("track", "columns", problem, "Pass one cell per row in each column.")
    return Columns(cells, range(1, max(lengths, default=0) + 1), [])


def _file(path: Path) -> Columns:
    """Columns of a file; the header of a CSV file is row 1."""
    try:
        return _parquet(path) if path.suffix == ".parquet" else _csv(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        remedy = "Pass a CSV or .parquet file with the columns time, target, x, y."
        raise InputValueError("track", "detections", f"{path} cannot be read: {reason}", remedy) from None


def _csv(path: Path) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline()
        delimiter = max(DELIMITERS, key=head.count)
        file.seek(0)
        reader = csv.reader(file, delimiter=delimiter)
        rows = list(reader)
    if not rows or "\0" in head:
        problem = f"{path} is {'a binary file' if rows else 'empty'}"
        raise InputValueError("track", "detections", problem, "Pass a CSV file with the header time,target,x,y.")
    names = [_name(cell) for cell in rows[0]]
    repeated = [name for i, name in enumerate(names) if name in names[:i]]
    if repeated:
        raise InputValueError("track", "columns", f"the column {repeated[0]!r} occurs twice", "Rename or drop one.")
    width = len(names)
    numbers = [i for i, cells in enumerate(rows[1:], 2) if cells]  # empty lines are ignored
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
        remedy = "Install it with pip install 'gradlogz[tables]', or pass a CSV file."
        problem = "polars, which reads parquet files, is not installed"
        raise MissingPackageError("track", "polars", problem, remedy) from None
    with path.open("rb") as file:
        try:
            frame = polars.read_parquet(file)
        except polars.exceptions.PolarsError:
            problem, remedy = f"{path} is not a valid parquet file", "Write the file again, or pass a CSV file."
            raise InputValueError("track", "detections", problem, remedy) from None
    return columns_of({name: frame[name].to_list() for name in frame.columns})


def _name(cell: Any) -> str:
    return str(cell).strip().lower()


def _check_columns(names: list[str]) -> None:
    missing = [name for name in ("time", "x", "y") if name not in names]
    unknown = [name for name in names if name not in COLUMNS]
    if missing or unknown:
        problem = f"the column {missing[0]!r} is missing" if missing else f"unknown column {_shown(unknown[0])}"
        remedy = "Pass the columns time, x, y, and optionally target and z."
        raise InputValueError("track", "columns", problem, remedy)


# Cells --------------------------------------------------------------------------------------------------------------


def _converted(columns: Columns) -> tuple[Detections, list[Bad]]:
    """Cells as numbers, NaN if missing, and the invalid rows; infinity marks a cell that is not a number."""
    cells, rows, bad = columns.cells, columns.rows, []

    def reject(name: str, invalid: Tensor, condition: str) -> None:
        for i in invalid.nonzero().flatten().tolist():
            bad.append(Bad(rows[i], f"row {rows[i]}, column {name} must {condition}", _shown(cells[name][i])))

    position = []
    for axis in "xyz":
        if axis in cells:
            numbers = _numbers(cells[axis])
            reject(axis, numbers.isinf(), "be a number or empty")
            position.append(numbers)
    time, unit = _times(cells["time"])
    reject("time", ~time.isfinite(), "be a number or an ISO timestamp")
    names = ["" if cell is None else str(cell).strip() for cell in cells.get("target", ["1"] * len(rows))]
    index: dict[str, int] = {}
    target = torch.tensor([index.setdefault(name, len(index)) for name in names], dtype=torch.long)
    reject("target", target == index.get("", -1), "be the name of a target")
    return Detections(list(cells["time"]), time, target, list(index), torch.stack(position, -1), unit, []), bad


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
    """Times as numbers, and their unit; the first cell decides between numbers and timestamps."""
    first = next((cell for cell in cells if not math.isnan(_number(cell))), None)
    if first is None or math.isfinite(_number(first)) or math.isinf(_moment(first)):
        return _numbers(cells), ""
    return torch.tensor(list(map(_moment, cells)), dtype=torch.float64), "s"


def _moment(cell: Any) -> float:
    """Seconds of a timestamp, UTC without a time zone; infinity if it cannot be parsed."""
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
    """Rows grouped by target in their order, the first position of each target, and its number of rows."""
    order = target.sort(stable=True).indices
    lengths = target.bincount()
    return order, lengths.cumsum(0) - lengths, lengths


def _subset(detections: Detections, rows: list[int]) -> Detections:
    """Some rows, with the targets that they contain."""
    at = torch.tensor(rows, dtype=torch.long)
    remaining, target = detections.target[at].unique(return_inverse=True)
    return detections._replace(
        label=[detections.label[i] for i in rows],
        time=detections.time[at],
        target=target,
        names=[detections.names[i] for i in remaining.tolist()],
        position=detections.position[at],
    )


def _first_out_of_order(detections: Detections, rows: list[int]) -> Bad:
    """The first row that is not later than the previous row of its target."""
    order = grouped(detections.target)[0]
    after = order[1:][_steps_back(detections, order)]
    at = int(after.min())
    before = int(order[int((order == at).nonzero()) - 1])
    condition = f"row {rows[at]}, column time must be later than row {rows[before]} of the same target"
    return Bad(rows[at], condition, f"{_shown(detections.label[at])} after {_shown(detections.label[before])}")


def _out_of_order(detections: Detections, rows: list[int]) -> list[Bad]:
    """The smallest set of rows without which times increase in every target."""
    order, starts, lengths = grouped(detections.target)
    bad = []
    for target in detections.target[order][1:][_steps_back(detections, order)].unique().tolist():
        members = order[int(starts[target]) : int(starts[target] + lengths[target])]
        increasing = set(_longest_increasing(detections.time[members].tolist()))
        for at in (int(members[i]) for i in range(len(members)) if i not in increasing):
            condition = f"row {rows[at]}, column time must be in order with the other times of the target"
            bad.append(Bad(rows[at], condition, _shown(detections.label[at])))
    return bad


def _steps_back(detections: Detections, order: Tensor) -> Tensor:
    """Steps between consecutive rows of a target in which time does not increase."""
    return (detections.time[order].diff() <= 0) & (detections.target[order].diff() == 0)


def _longest_increasing(values: list[float]) -> list[int]:
    """Indices of a longest increasing subsequence; of equal values the first is taken."""
    ends: list[float] = []
    places: list[int] = []
    after: dict[int, int] = {}
    for i in reversed(range(len(values))):
        at = bisect_left(ends, -values[i])
        if at:
            after[i] = places[at - 1]
        ends[at : at + 1] = [-values[i]]
        places[at : at + 1] = [i]
    indices = [places[-1]]
    while indices[-1] in after:
        indices.append(after[indices[-1]])
    return indices
