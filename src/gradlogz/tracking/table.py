"""The table of tracks: one row per detection, in the order of the input.

    time, target, x, y[, z]                        as in the input; in metres if the input has units
    latitude_filtered, longitude_filtered, ...     in degrees, if the input has latitudes and longitudes
    x_filtered, vx_filtered, x_deviation, ...      filtered position and velocity, with standard deviations
    x_smoothed, ..., x_smoothed_deviation, ...     smoothed position and velocity, if requested
    probability_NAME                               mode probabilities, smoothed if available
    nis, nis_low, nis_high, inside                 normalised innovation squared, its 95 % band, 1 if inside
    outlier, stale                                 1 if the detection was rejected, or repeats an earlier position

Velocities are empty before the second detection of a coordinate, nis before there is an innovation.

Read next: records.py.
"""

import csv
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from .._errors import InputValueError, MissingPackageError
from .._foreign_text import table_cell
from .._output_files import replaced
from .._parquet import write_parquet
from .records import Tracks


def table_of(tracks: Tracks) -> dict[str, Any]:
    """Columns by name, rows in the order of the input: lists for time and target, tensors for the others."""
    columns, row = _columns(tracks), tracks.detections.row
    if row is None or not bool((row.diff() < 0).any()):
        return columns
    order = row.argsort()
    return {
        name: column[order] if isinstance(column, Tensor) else [column[i] for i in order.tolist()]
        for name, column in columns.items()
    }


LIBRARIES = ("polars", "pandas", "xarray", "numpy")


def frame_of(tracks: Tracks, library: Literal["polars", "pandas", "xarray", "numpy"] = "polars") -> Any:
    """The table for polars or pandas (DataFrame), xarray (Dataset with dimension "row") or numpy (record array)."""
    columns = {
        name: column.numpy() if isinstance(column, Tensor) else column for name, column in table_of(tracks).items()
    }
    if library not in LIBRARIES:
        problem = f"there is no library {library!r} for tables"
        raise InputValueError("frame_of", "library", problem, f"Choose one of {', '.join(LIBRARIES)}.")
    try:
        module = import_module(library)
    except ImportError:
        problem = f"{library} is not installed"
        raise MissingPackageError("frame_of", library, problem, f"Install it with pip install {library}.") from None
    if library == "polars":
        return module.DataFrame([_series(module, name, column) for name, column in table_of(tracks).items()])
    if library == "pandas":
        return module.DataFrame(columns)
    if library == "numpy":
        return module.rec.fromarrays([module.asarray(column) for column in columns.values()], names=list(columns))
    return module.Dataset({name: ("row", column) for name, column in columns.items()})


def _columns(tracks: Tracks) -> dict[str, Any]:
    rows, axes = tracks.detections, tracks.detections.axes
    columns: dict[str, Any] = {"time": rows.label, "target": [rows.names[i] for i in rows.target.tolist()]}
    columns |= dict(zip(axes, rows.position.unbind(-1), strict=True))
    names = [*axes, *(f"v{axis}" for axis in axes)]
    for kind, estimate in (("filtered", tracks.filtered), ("smoothed", tracks.smoothed)):
        if estimate is not None:
            deviation = "deviation" if kind == "filtered" else "smoothed_deviation"
            columns |= {f"{n}_{kind}": c for n, c in zip(names, estimate.mean.unbind(-1), strict=True)}
            if rows.plane is not None:
                degrees = rows.plane.locate(estimate.mean[:, :2])
                columns |= dict(zip((f"latitude_{kind}", f"longitude_{kind}"), degrees, strict=True))
            columns |= {f"{n}_{deviation}": c for n, c in zip(names, estimate.deviation.unbind(-1), strict=True)}
    modes = zip(tracks.settings.modes, tracks.best.probability.unbind(-1), strict=True)
    columns |= {f"probability_{name}": column for name, column in modes}
    return columns | {
        "nis": tracks.nis,
        "nis_low": tracks.nis_low.masked_fill(tracks.nis.isnan(), float("nan")),
        "nis_high": tracks.nis_high.masked_fill(tracks.nis.isnan(), float("nan")),
        "inside": tracks.inside.double().masked_fill(tracks.nis.isnan(), float("nan")),
        "outlier": tracks.detections.outlying.double(),
        **({} if rows.stale is None else {"stale": rows.stale.double()}),
    }


def check_table(path: str | Path) -> None:
    """Raise an error before the computation if the table could not be written after it."""
    if Path(path).suffix == ".parquet" and _polars() is None:
        problem = "polars, which writes parquet files, is not installed"
        raise MissingPackageError(
            "track", "polars", problem, "Install it with pip install 'gradlogz[tables]', or write CSV."
        )


def write_table(tracks: Tracks, path: str | Path) -> Path:
    """Write the table as parquet for the suffix .parquet, else as CSV; the file is replaced atomically."""
    check_table(path)
    polars = _polars()
    with replaced(path) as part:
        if polars is None:
            columns = table_of(tracks)
            with part.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(map(table_cell, row) for row in zip(*map(_cells, columns.values()), strict=True))
        else:
            frame = frame_of(tracks)
            if Path(path).suffix == ".parquet":
                write_parquet(frame, part)
            else:
                with part.open("wb") as file:
                    frame.with_columns(_without_formulas(polars)).write_csv(file)
    return Path(path)


def _without_formulas(polars: Any) -> Any:
    """Columns of texts, as `table_cell` has each cell."""
    text = polars.col(polars.String)
    computed = text.str.contains(r"^[=+\-@\t\r]") & text.cast(polars.Float64, strict=False).is_null()
    return polars.when(computed).then("'" + text).otherwise(text).name.keep()


def _polars() -> Any:
    try:
        import polars
    except ImportError:
        return None
    return polars


def _cells(column: Any) -> list[Any]:
    """Cells of a column, None for NaN."""
    return [None if cell != cell else cell for cell in column.tolist()] if isinstance(column, Tensor) else column


def _series(polars: Any, name: str, column: Any) -> Any:
    if not isinstance(column, Tensor):
        return polars.Series(name, column)
    return polars.Series(name, column.tolist(), dtype=polars.Float64).fill_nan(None)
