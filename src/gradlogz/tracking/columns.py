"""Columns of cells from files, dictionaries, data frames and data sets.

    CSV          separated by commas, semicolons, tabs, bars or blanks; decimal commas where commas do not separate
    parquet      read by polars
    others       mappings of columns, DataFrames of pandas and polars, xarray.Dataset, structured arrays of NumPy

Read next: column_roles.py (which column is what), detections.py (cells as numbers).
"""

import csv
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import InputTypeError, InputValueError, MissingPackageError
from .._parquet import UnreadableTableError, read_parquet
from .column_roles import name_of, shown

DELIMITERS = ",;\t|"
LONGEST_HEAD = 2**20  # characters
HEADER = "Pass a CSV file with the header time,target,x,y."
Source = Any  # a path, a mapping of columns, a DataFrame of pandas or polars, an xarray.Dataset, a structured array


class Bad(NamedTuple):
    """An invalid row: its number, the condition that it violates, and the cell."""

    row: int
    condition: str
    fact: str

    @property
    def problem(self) -> str:
        """The problem as a clause."""
        return f"{self.condition}, got {self.fact}"


class Columns(NamedTuple):
    """Cells by column, the number of each row, and the rows with a wrong number of cells.

    decimal_comma: whether a comma in a number separates its decimals.
    """

    cells: dict[str, Sequence[Any]]
    rows: Sequence[int]
    bad: list[Bad]
    decimal_comma: bool = False


def columns_of(source: Any) -> Columns:
    """Columns of a path, a mapping, a data frame, a data set or a structured array; rows are numbered from 1."""
    if isinstance(source, str | os.PathLike):
        return _file(Path(source))
    if hasattr(source, "to_dataframe"):  # xarray
        source = source.to_dataframe().reset_index()
    if hasattr(source, "columns"):
        _check_names([name_of(name) for name in source.columns])
        index: Any = getattr(source, "index", None)
        levels = enumerate(getattr(index, "names", ()))  # of pandas; a column goes before a level of its name
        named = {name: index.get_level_values(i) for i, name in levels if name is not None}
        source = {**named, **{name: source[name] for name in source.columns}}
    elif getattr(getattr(source, "dtype", None), "names", None):
        source = {name: source[name] for name in source.dtype.names}
    if not isinstance(source, Mapping):
        problem = f"detections must be a path, a dictionary of columns or a data frame, got {type(source).__name__}"
        raise InputTypeError("track", "detections", problem, 'Pass {"time": [...], "x": [...], "y": [...]}.')
    _check_names([name_of(name) for name in source])
    cells: dict[str, Sequence[Any]] = {name_of(name): _cells(values) for name, values in source.items()}
    lengths = {len(values) for values in cells.values()}
    if len(lengths) > 1:
        problem = f"columns must have equal lengths, got {', '.join(map(str, sorted(lengths)))}"
        raise InputValueError("track", "columns", problem, "Pass one cell per row in each column.")
    return Columns(cells, range(1, max(lengths, default=0) + 1), [])


def _check_names(names: Sequence[str]) -> None:
    """Raise an error if two columns have one name, but for capitals and blanks."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        problem = f"the column {shown(repeated[0])!r} occurs twice"
        raise InputValueError("track", "columns", problem, "Rename or drop one.")


def _cells(values: Any) -> list[Any]:
    """Cells of a column; times of NumPy become datetimes, since nanoseconds would become integers."""
    if type(values).__module__ == "numpy" and values.dtype.kind == "M":
        values = values.astype("datetime64[us]")
    for method in ("tolist", "to_list"):
        if hasattr(values, method):
            cells: list[Any] = getattr(values, method)()
            return cells
    return list(values)


def _file(path: Path) -> Columns:
    """Columns of a file; the header of a CSV file is row 1."""
    try:
        return _parquet(path) if path.suffix == ".parquet" else _csv(path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reasons = {OSError: getattr(error, "strerror", ""), csv.Error: str(error)}
        reason = next((text for kind, text in reasons.items() if isinstance(error, kind)), "it is not UTF-8 text")
        remedy = "Pass a CSV or .parquet file with the columns time, target, x, y."
        if isinstance(error, UnicodeDecodeError):
            remedy = "Save it as UTF-8, or as .parquet."
        raise InputValueError("track", "detections", f"{path} cannot be read: {reason}", remedy) from None


def _csv(path: Path) -> Columns:
    with path.open(encoding="utf-8-sig", newline="") as file:
        head = file.readline(LONGEST_HEAD)
        if "\0" in head or len(head) == LONGEST_HEAD:  # before all of it is read
            problem = f"{path} is a binary file, or has a first line of a million characters"
            raise InputValueError("track", "detections", problem, HEADER)
        declared = head.strip().lower().removeprefix("sep=") if head.lower().startswith("sep=") else ""
        if declared:  # a line that Excel writes
            head = file.readline()
        delimiter = declared or max(DELIMITERS, key=head.count)
        blanks = not declared and head.count(delimiter) == 0
        file.seek(0)
        rows = [line.split() for line in file] if blanks else list(csv.reader(file, delimiter=delimiter))
    first = 2 if declared else 1
    rows = rows[first - 1 :]
    if not rows:
        raise InputValueError("track", "detections", f"{path} is empty", HEADER)
    names = [name_of(cell) for cell in rows[0]]
    _check_names(names)
    width = len(names)
    numbered = [(i, cells) for i, cells in enumerate(rows[1:], first + 1) if cells]  # empty lines are ignored
    bad = [Bad(i, f"row {i} must have {width} cells", f"{len(cells)}") for i, cells in numbered if len(cells) != width]
    if bad:
        numbered = [(i, cells) for i, cells in numbered if len(cells) == width]
    columns: list[Sequence[Any]] = list(zip(*(cells for _, cells in numbered), strict=True)) or [()] * width
    numbers = [i for i, _ in numbered]
    return Columns(dict(zip(names, columns, strict=True)), numbers, bad, blanks or delimiter != ",")


def _parquet(path: Path) -> Columns:
    try:
        import polars
    except ImportError:
        remedy = "Install it with pip install 'gradlogz[tables]', or pass a CSV file."
        problem = "polars, which reads parquet files, is not installed"
        raise MissingPackageError("track", "polars", problem, remedy) from None
    path.open("rb").close()  # whether it can be read at all
    remedy = "Write the file again, or pass a CSV file."
    try:
        return columns_of(read_parquet(path))
    except UnreadableTableError as error:
        raise InputValueError("track", "detections", f"{path} {error}", remedy) from None
    except (polars.exceptions.PolarsError, polars.exceptions.PanicException, OSError, MemoryError):
        raise InputValueError("track", "detections", f"{path} is not a valid parquet file", remedy) from None
