"""Detections: times, targets and positions from the cells of a table.

    time        number, or ISO timestamp (converted to seconds; a unit of the column applies to numbers only)
    target      name of the target; optional if there is one target
    position    x, y and optionally z, or latitude and longitude (projected to metres); NaN if not detected
    sigma       standard deviation of each coordinate; optional, and needed only in rows with a detection
    velocity    from groundspeed and track, if it is used; NaN if one of them is missing

An invalid cell is reported with its row and column. Rows of a target are sorted by time; rows that repeat another one
exactly are left out. Conversion is by column and grouping by sorting, so that only invalid rows cost a Python loop.

Read next: columns.py (tables), column_roles.py (which column is what), projection.py, run_tracking.py (the filter).
"""

import math
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch

from .._errors import InputValueError
from .._typing import Bool, Float, Int, Tensor
from .column_roles import Role, has_length_unit, roles_of
from .columns import Bad, Columns, Source, columns_of
from .projection import LocalPlane

MISSING = ("", "na", "n/a", "null", "none", "nat", "-")  # "nan" is parsed by float
LONGEST = 40  # characters of a cell in a message
LARGEST = 1e30  # beyond, powers of numbers overflow in the filter
TOO_LARGE = f"be at most {LARGEST:.0e} in magnitude"


class Detections(NamedTuple):
    """Detections in the order of the input, but for rows of a target that are sorted by time.

    Attributes:
        label: times as in the input.
        time: times since the earliest.
        target: index of the target in `names`.
        names: names of the targets.
        position: coordinates; NaN if not detected.
        unit: unit of time: "s" if known, else empty.
        bad: rows that were skipped.
        truth: true states of a scenario: positions, then velocities.
        length: unit of positions: "m" if known, else empty.
        sigma: standard deviations of the coordinates of each row, if the input has them.
        plane: projection of latitudes and longitudes.
        row: number of each row in the input.
        late: number of rows that were not in order of time.
        repeated: number of rows left out because they repeat another one.
        unused: names of the columns that are not used.
        rejected: rows that are taken for outliers, once they are known.
        stale: rows that repeat an earlier position of a moving target, once they are known.
        velocity: reported velocities in x and y, if they are used; NaN if missing.
    """

    label: list[Any]
    time: Float[Tensor, "n"]
    target: Int[Tensor, "n"]
    names: list[str]
    position: Float[Tensor, "n d"]
    unit: str
    bad: list[Bad]
    truth: Float[Tensor, "n e"] | None = None
    length: str = ""
    sigma: Float[Tensor, "n d"] | None = None
    plane: LocalPlane | None = None
    row: Int[Tensor, "n"] | None = None
    late: int = 0
    repeated: int = 0
    unused: tuple[str, ...] = ()
    rejected: Bool[Tensor, "n"] | None = None
    stale: Bool[Tensor, "n"] | None = None
    velocity: Float[Tensor, "n 2"] | None = None

    @property
    def axes(self) -> str:
        """Names of the coordinates: "xy" or "xyz"."""
        return "xyz"[: self.position.shape[-1]]

    @property
    def outlying(self) -> Bool[Tensor, "n"]:
        """Rows that are taken for outliers."""
        return torch.zeros(len(self.time), dtype=torch.bool) if self.rejected is None else self.rejected

    @property
    def used(self) -> Float[Tensor, "n d"]:
        """Coordinates that the filter uses; NaN for outliers and stale rows, too."""
        return self.position.masked_fill(self._unused.unsqueeze(-1), math.nan)

    @property
    def used_velocity(self) -> Float[Tensor, "n 2"] | None:
        """Velocities that the filter uses, those of rows with a position that it uses."""
        if self.velocity is None:
            return None
        undetected = self.position[:, :2].isnan().any(-1)
        return self.velocity.masked_fill((self._unused | undetected).unsqueeze(-1), math.nan)

    @property
    def _unused(self) -> Bool[Tensor, "n"]:
        """Outliers and stale rows."""
        return self.outlying if self.stale is None else self.outlying | self.stale

    def rows(self, at: Int[Tensor, "m"]) -> "Detections":
        """Some rows, with the targets that they contain."""
        remaining, target = self.target[at].unique(return_inverse=True)
        return self._replace(
            label=[self.label[i] for i in at.tolist()],
            time=self.time[at],
            target=target,
            names=[self.names[i] for i in remaining.tolist()],
            position=self.position[at],
            sigma=None if self.sigma is None else self.sigma[at],
            row=None if self.row is None else self.row[at],
            velocity=None if self.velocity is None else self.velocity[at],
        )


def read(
    source: Source,
    *,
    columns: Mapping[str, str] | None = None,
    skip_bad: bool = False,
    with_velocity: bool = False,
) -> Detections:
    """Read detections from a file, columns or a data frame; raise an error for the first invalid row.

    columns: {quantity: "column" or "column:unit"} where names do not say it. skip_bad: skip and count invalid rows.
    with_velocity: read groundspeed and track, too.
    """
    table = columns_of(source)
    roles = roles_of(list(table.cells), columns or {}, with_velocity=with_velocity)
    detections, bad_cells = _converted(table, roles)
    bad = sorted({b.row: b for b in reversed([*table.bad, *bad_cells])}.values())  # one for each row
    if bad and not skip_bad:
        remedy = "Correct the row, or skip invalid rows with skip_bad=True (--skip-bad)."
        raise InputValueError("track", "detections", bad[0].problem, remedy)
    if bad:
        skipped = torch.tensor([b.row for b in bad])
        detections = detections.rows((~torch.isin(detections.row, skipped)).nonzero().flatten())  # type: ignore[arg-type]
    if not bool(detections.position.isfinite().any()):
        problem = f"detections has no coordinate in {len(detections.time)} rows ({len(bad)} skipped)"
        raise InputValueError("track", "detections", problem, "Pass rows with a time and with numbers in x or y.")
    detections = _ordered(detections._replace(time=detections.time - detections.time.min(), bad=bad))
    return detections._replace(unused=tuple(n for n in table.cells if n not in {r.column for r in roles.values()}))


# Cells --------------------------------------------------------------------------------------------------------------


def _converted(table: Columns, roles: Mapping[str, Role]) -> tuple[Detections, list[Bad]]:
    """Cells as numbers, NaN if missing, and the invalid rows; infinity marks a cell that is not a number."""
    rows, bad = table.rows, []

    def reject(quantity: str, invalid: Tensor, condition: str) -> None:
        name = roles[quantity].column
        for i in invalid.nonzero().flatten().tolist():
            cell = _shown(table.cells[name][i])
            bad.append(Bad(rows[i], f"row {rows[i]}, column {name} must {condition}", cell))

    def numbers_of(quantity: str) -> Tensor:
        cells = table.cells[roles[quantity].column]
        numbers = _numbers(cells, decimal_comma=table.decimal_comma) * roles[quantity].scale(quantity)
        reject(quantity, numbers.isinf(), "be a number or empty")
        reject(quantity, numbers.isfinite() & (numbers.abs() > LARGEST), TOO_LARGE)
        return numbers

    position, plane = _positions(numbers_of, reject, roles)
    labels = table.cells[roles["time"].column]
    time, unit = _times(labels, decimal_comma=table.decimal_comma)
    if not unit and roles["time"].unit:  # a timestamp has no other unit than its own
        time, unit = time * roles["time"].scale("time"), "s"
    reject("time", ~time.isfinite() & ~time.isneginf(), "be a number or an ISO timestamp such as 2024-05-01T12:00:00Z")
    reject("time", time.isfinite() & (time.abs() > LARGEST), TOO_LARGE)
    reject("time", time.isneginf(), "have a time zone if other times have one, and none if they have none")
    cells = table.cells[roles["target"].column] if "target" in roles else ["1"] * len(rows)
    names = list(map(_name, cells))
    index: dict[str, int] = {}
    target = torch.tensor([index.setdefault(name, len(index)) for name in names], dtype=torch.long)
    if "target" in roles:
        reject("target", target == index.get("", -1), "be the name of a target")
    length, numbers = "m" if has_length_unit(roles) else "", torch.tensor(list(rows), dtype=torch.long)
    sigma = _sigma(numbers_of, reject, roles, position)
    velocity = _velocities(numbers_of, reject, position, plane) if "groundspeed" in roles else None
    if velocity is not None and length and not unit:
        problem = "the time has no unit, but velocities have"
        raise InputValueError(
            "track", "columns", problem, f"Name it, such as columns={{'time': '{roles['time'].column}:s'}} (--column)."
        )
    known = Detections(
        list(labels), time, target, list(index), position, unit, [], None, length, sigma, plane, numbers,
        velocity=velocity,
    )  # fmt: skip
    return known, bad


def _positions(numbers_of: Any, reject: Any, roles: Mapping[str, Role]) -> tuple[Tensor, LocalPlane | None]:
    """Coordinates of each row, and the projection of latitudes and longitudes."""
    height = [numbers_of("z")] if "z" in roles else []
    if "latitude" not in roles:
        return torch.stack([numbers_of("x"), numbers_of("y"), *height], -1), None
    latitude, longitude = numbers_of("latitude"), numbers_of("longitude")
    reject("latitude", latitude.abs() > 90, "be between -90 and 90 degrees")
    reject("longitude", longitude.abs() > 360, "be between -180 and 360 degrees")
    valid = (latitude.abs() <= 90) & (longitude.abs() <= 360)  # both or none: a point cannot be projected otherwise
    latitude, longitude = latitude.masked_fill(~valid, math.nan), longitude.masked_fill(~valid, math.nan)
    plane = LocalPlane.of(latitude, longitude)
    return torch.cat((plane.project(latitude, longitude), *(z.unsqueeze(-1) for z in height)), -1), plane


def _velocities(numbers_of: Any, reject: Any, position: Tensor, plane: LocalPlane | None) -> Float[Tensor, "n 2"]:
    """Velocities in x and y from groundspeed and track, the direction in degrees clockwise from north (y)."""
    speed, track = numbers_of("groundspeed"), numbers_of("track")
    reject("groundspeed", speed < 0, "not be negative")
    reject("track", track.abs() > 360, "be between -360 and 360 degrees")
    course = torch.stack((track.deg2rad().sin(), track.deg2rad().cos()), -1)
    return speed.unsqueeze(-1) * (course if plane is None else plane.turned(course, position[:, :2]))


def _sigma(numbers_of: Any, reject: Any, roles: Mapping[str, Role], position: Tensor) -> Tensor | None:
    """Standard deviations by row and coordinate; None if no column has them."""
    axes = "xyz"[: position.shape[-1]]
    quantities = [f"sigma_{axis}" if f"sigma_{axis}" in roles else "sigma" for axis in axes]
    present = [quantity in roles for quantity in quantities]
    if not any(present):
        return None
    if not all(present):
        lacking = axes[present.index(False)]
        problem = f"there is no standard deviation of {lacking}, but there is one of another coordinate"
        raise InputValueError("track", "columns", problem, f"Add a column sigma_{lacking}, or sigma for all.")
    columns = {quantity: numbers_of(quantity) for quantity in dict.fromkeys(quantities)}
    for quantity, numbers in columns.items():
        described = [axis for axis, name in enumerate(quantities) if name == quantity]
        detected = ~position[:, described].isnan().all(-1)
        reject(quantity, ~(numbers > 0) & (detected | ~numbers.isnan()), "be positive")
    return _filled(torch.stack([columns[quantity] for quantity in quantities], -1))


def _filled(sigma: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
    """Standard deviations, with the median of a coordinate where there is none; those rows have no detection."""
    if not bool(sigma.isnan().any()):
        return sigma
    valid = sigma.where((sigma > 0) & sigma.isfinite(), math.nan)
    typical = valid.nanmedian(0).values
    typical = torch.where(typical.isnan(), valid.nanmedian(), typical).nan_to_num(nan=1.0)  # or that of all coordinates
    return torch.where(sigma.isnan(), typical, sigma)


def _name(cell: Any) -> str:
    """Name of a target; empty for None, NaN, and NA and NaT of pandas."""
    text = "" if cell is None else str(cell).strip()
    return "" if text in ("nan", "<NA>", "NaT") and not isinstance(cell, str) else text


def _numbers(cells: Sequence[Any], *, decimal_comma: bool = False) -> Tensor:
    try:
        values = list(map(float, cells))
    except (ValueError, TypeError, OverflowError):
        values = [_number(cell, decimal_comma=decimal_comma) for cell in cells]
    return torch.tensor(values, dtype=torch.float64)


def _number(cell: Any, *, decimal_comma: bool = False) -> float:
    if cell is None or (isinstance(cell, str) and cell.strip().lower() in MISSING):
        return math.nan
    if decimal_comma and isinstance(cell, str) and cell.count(",") == 1 and "." not in cell:
        cell = cell.replace(",", ".")
    try:
        return float(cell)
    except (ValueError, TypeError, OverflowError):
        return math.inf


def _times(cells: Sequence[Any], *, decimal_comma: bool = False) -> tuple[Tensor, str]:
    """Times as numbers, and their unit; the first cell decides between numbers and timestamps, and on time zones.

    Minus infinity marks a timestamp with a time zone among others without, or the reverse.
    """
    first = next((cell for cell in cells if not math.isnan(_number(cell))), None)
    if first is None or math.isfinite(_number(first, decimal_comma=decimal_comma)) or _moment(first) is None:
        numbers = _numbers(cells, decimal_comma=decimal_comma)
        return numbers.masked_fill(numbers.isneginf(), math.inf), ""
    moments = list(map(_moment, cells))
    zoned = next(at for at in moments if at is not None).tzinfo is not None
    seconds = [
        math.inf if at is None else -math.inf if (at.tzinfo is not None) != zoned else _seconds(at) for at in moments
    ]
    return torch.tensor(seconds, dtype=torch.float64), "s"


def _moment(cell: Any) -> datetime | None:
    """A timestamp; None if it cannot be parsed."""
    try:
        at = cell if isinstance(cell, datetime) else datetime.fromisoformat(str(cell).strip())
    except ValueError:
        return None
    return at if at == at else None  # NaT of pandas is a datetime that differs from itself


def _seconds(at: datetime) -> float:
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


def _ordered(detections: Detections) -> Detections:
    """Rows of each target in order of time, at the places of the target in the input, without repetitions."""
    places, _, _ = grouped(detections.target)
    by_time = detections.time.argsort(stable=True)
    order = by_time[detections.target[by_time].argsort(stable=True)]  # by target, then by time
    late = int(((detections.time[places].diff() < 0) & (detections.target[places].diff() == 0)).sum())
    if late:
        moved = torch.empty_like(order)
        moved[places] = order
        detections = detections.rows(moved)
    repeats = _repeated(detections)
    if bool(repeats.any()):
        detections = detections.rows((~repeats).nonzero().flatten())
    return detections._replace(late=late, repeated=int(repeats.sum()))


def _repeated(detections: Detections) -> Tensor:
    """Rows that have the time, target and coordinates of an earlier row."""
    order, _, _ = grouped(detections.target)
    again = (detections.time[order].diff() == 0) & (detections.target[order].diff() == 0)
    repeats = torch.zeros(len(order), dtype=torch.bool)
    if not bool(again.any()):
        return repeats
    pad = torch.nn.functional.pad
    same = order[pad(again, (1, 0)) | pad(again, (0, 1))].sort().values  # only rows of equal times are compared
    columns = [detections.time[same], detections.target[same].double(), *detections.position[same].unbind(-1)]
    _, index = torch.stack(columns, -1).nan_to_num(nan=math.inf).unique(dim=0, return_inverse=True)
    numbers = torch.arange(len(same))
    first = torch.full((len(same),), len(same)).scatter_reduce(0, index, numbers, "amin")
    repeats[same] = first[index] != numbers
    return repeats
