"""A row for each detection: what was seen, what is known of it, and whether it was to be expected.

    time, target, x, y[, z]                        as they were given
    x_filtered, vx_filtered, x_deviation, ...      position and velocity given what was seen up to then
    x_smoothed, ..., x_smoothed_deviation, ...     the same given everything, where it was asked for
    probability_NAME                               of each mode, smoothed where there is that
    nis, nis_low, nis_high, inside                 squared distance from what was expected, and the band of 95 %

Velocities are empty until a coordinate has been seen twice, nis where nothing can be compared.

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
    """Columns by name: lists of what was given, and tensors."""
    found, axes = tracks.detections, tracks.detections.axes
    columns: dict[str, Any] = {"time": found.label, "target": [found.names[i] for i in found.target.tolist()]}
    columns |= dict(zip(axes, found.position.unbind(-1), strict=True))
    names = [*axes, *(f"v{axis}" for axis in axes)]
    for word, estimate in (("filtered", tracks.filtered), ("smoothed", tracks.smoothed)):
        if estimate is not None:
            deviation = "deviation" if word == "filtered" else "smoothed_deviation"
            columns |= {f"{n}_{word}": c for n, c in zip(names, estimate.mean.unbind(-1), strict=True)}
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
    """Refuse, before anything is computed, a table that could not be written after it."""
    if Path(path).suffix == ".parquet" and _polars() is None:
        remedy = "Install it with: pip install 'gradlogz[tables]', or write CSV."
        raise MissingPackageError("track", "polars", "polars must be installed to write parquet, got no polars", remedy)


def write_table(tracks: Tracks, path: str | Path) -> Path:
    """Write the rows of tracks as parquet if the suffix says so, else as CSV; whole or not at all."""
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
    """NaN as nothing."""
    return [None if cell != cell else cell for cell in column.tolist()] if isinstance(column, Tensor) else column


def _series(polars: Any, name: str, column: Any) -> Any:
    if not isinstance(column, Tensor):
        return polars.Series(name, column)
    return polars.Series(name, column.tolist(), dtype=polars.Float64).fill_nan(None)
