"""The table of tracks: one row per detection, in the order of the input.

    time, target, x, y[, z]                        as in the input
    x_filtered, vx_filtered, x_deviation, ...      filtered position and velocity, with standard deviations
    x_smoothed, ..., x_smoothed_deviation, ...     smoothed position and velocity, if requested
    probability_NAME                               mode probabilities, smoothed if available
    nis, nis_low, nis_high, inside                 normalised innovation squared, its 95 % band, 1 if inside

Velocities are empty before the second detection of a coordinate, nis before there is an innovation.

Read next: records.py.
"""

import csv
from pathlib import Path
from typing import Any

from torch import Tensor

from .._errors import MissingPackageError
from ..page.writing import replaced
from .records import Tracks


def table_of(tracks: Tracks) -> dict[str, Any]:
    """Columns by name: lists for time and target, tensors for the others."""
    rows, axes = tracks.detections, tracks.detections.axes
    columns: dict[str, Any] = {"time": rows.label, "target": [rows.names[i] for i in rows.target.tolist()]}
    columns |= dict(zip(axes, rows.position.unbind(-1), strict=True))
    names = [*axes, *(f"v{axis}" for axis in axes)]
    for kind, estimate in (("filtered", tracks.filtered), ("smoothed", tracks.smoothed)):
        if estimate is not None:
            deviation = "deviation" if kind == "filtered" else "smoothed_deviation"
            columns |= {f"{n}_{kind}": c for n, c in zip(names, estimate.mean.unbind(-1), strict=True)}
            columns |= {f"{n}_{deviation}": c for n, c in zip(names, estimate.deviation.unbind(-1), strict=True)}
    modes = zip(tracks.settings.modes, tracks.best.probability.unbind(-1), strict=True)
    columns |= {f"probability_{name}": column for name, column in modes}
    return columns | {
        "nis": tracks.nis,
        "nis_low": tracks.nis_low.masked_fill(tracks.nis.isnan(), float("nan")),
        "nis_high": tracks.nis_high.masked_fill(tracks.nis.isnan(), float("nan")),
        "inside": tracks.inside.double().masked_fill(tracks.nis.isnan(), float("nan")),
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
    columns = table_of(tracks)
    polars = _polars()
    with replaced(path) as part:
        if polars is None:
            with part.open("w", encoding="utf-8", newline="") as file:
                writer = csv.writer(file, lineterminator="\n")
                writer.writerow(columns)
                writer.writerows(zip(*map(_cells, columns.values()), strict=True))
        else:
            frame = polars.DataFrame([_series(polars, name, column) for name, column in columns.items()])
            if Path(path).suffix == ".parquet":
                frame.write_parquet(part)
            else:
                frame.write_csv(part)
    return Path(path)


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
