"""The column of a table that holds each quantity, by its name or by the user's choice, and its unit.

    time         time, timestamp, datetime, date, t
    target       target, target_id, track_id, id, icao24, mmsi
    x, y, z      x, y, z; east, north, up; easting, northing, height
    latitude, longitude              lat, lon, lng, long; degrees
    sigma_x, sigma_y, sigma_z        standard deviation of a detection; sigma: of every coordinate
    groundspeed, track               gs, speed; course, cog: degrees clockwise from north; only if velocities are used

A name may end in a unit: x_km, "height [ft]", time_ms. A choice names the column and, after a colon, its unit, if its
name does not end in one: {"x": "range", "time": "clock:ms"}.

Read next: columns.py (the table), detections.py (cells as numbers).
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from .._errors import InputValueError

NAMES: dict[str, tuple[str, ...]] = {
    "time": ("time", "timestamp", "datetime", "date", "t"),
    "target": ("target", "target_id", "track_id", "id", "icao24", "mmsi"),
    "x": ("x", "east", "easting"),
    "y": ("y", "north", "northing"),
    "z": ("z", "up", "height", "altitude", "geoaltitude"),
    "latitude": ("latitude", "lat"),
    "longitude": ("longitude", "lon", "lng", "long"),
    "sigma": ("sigma",),
    "sigma_x": ("sigma_x",),
    "sigma_y": ("sigma_y",),
    "sigma_z": ("sigma_z",),
}
VELOCITY: dict[str, tuple[str, ...]] = {
    "groundspeed": ("groundspeed", "ground_speed", "gs", "speed"),
    "track": ("track", "true_track", "course", "cog"),
}
ONLY_WITH_UNIT = ("altitude", "geoaltitude")  # feet in some sources and metres in others
LENGTHS = {"m": 1.0, "km": 1000.0, "ft": 0.3048, "nm": 1852.0, "mi": 1609.344}
SPEEDS = {"m/s": 1.0, "km/h": 1 / 3.6, "kt": 1852 / 3600, "kts": 1852 / 3600, "mph": 0.44704}
TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
LONGEST = 80  # letters of a column's name in an error
# A name has no two blanks in a row, with which this would take the cube of their number.
_WITH_UNIT = re.compile(r"(.+?)\s*[_\s(\[]\s*([a-z/]+)[)\]]?")


class Role(NamedTuple):
    """The column of a quantity; unit: empty if its name has none."""

    column: str
    unit: str = ""

    def scale(self, quantity: str) -> float:
        """Factor to metres or seconds; 1 without a unit."""
        return units_of(quantity).get(self.unit, 1.0)


def name_of(cell: Any) -> str:
    """Name of a column: in lower case, without blanks around it, and with one blank for several or for a line break."""
    return " ".join(str(cell).split()).lower()


def shown(name: str) -> str:
    """Name of a column in an error; a quote that is not closed makes the whole file a name."""
    return name if len(name) <= LONGEST else f"{name[:LONGEST]}…"


def units_of(quantity: str) -> Mapping[str, float]:
    """Units that a quantity may have."""
    if quantity == "time":
        return TIMES
    if quantity == "groundspeed":
        return SPEEDS
    return {} if quantity in ("target", "latitude", "longitude", "track") else LENGTHS


def roles_of(names: Sequence[str], choice: Mapping[str, str], *, with_velocity: bool = False) -> dict[str, Role]:
    """Column of each quantity; raise an error if one is missing, or if two columns have the same claim to it.

    choice: {quantity: "column" or "column:unit"}, before names. with_velocity: groundspeed and track are needed, too.
    """
    if not with_velocity and (unused := [quantity for quantity in VELOCITY if quantity in choice]):
        problem = f"columns has {unused[0]!r}, but velocities are not used"
        raise InputValueError("track", "columns", problem, "Pass their sigma_velocity (--sigma-velocity), too.")
    quantities = NAMES | VELOCITY if with_velocity else NAMES
    roles = {quantity: _chosen(quantity, text, names) for quantity, text in choice.items()}
    for quantity in quantities:
        if quantity not in roles and (role := _recognised(quantity, names, roles)) is not None:
            roles[quantity] = role
    if {"x", "y"} <= roles.keys():
        roles = {quantity: role for quantity, role in roles.items() if quantity not in ("latitude", "longitude")}
    needed = ("time", "latitude", "longitude") if "latitude" in roles or "longitude" in roles else ("time", "x", "y")
    missing = [quantity for quantity in (*needed, *(VELOCITY if with_velocity else ())) if quantity not in roles]
    if missing:
        example = f"columns={{{missing[0]!r}: NAME}} (--column {missing[0]}=NAME)"
        remedy = f"Name it: {example}; the columns are {', '.join(map(shown, names))}."
        raise InputValueError("track", "columns", f"the column {missing[0]!r} is missing", remedy)
    _check_units(roles)
    return roles


def _chosen(quantity: str, text: str, names: Sequence[str]) -> Role:
    """The column that the user names; a name that contains a colon itself is tried first."""
    if quantity not in NAMES | VELOCITY:
        problem = f"columns has no quantity {quantity!r}"
        raise InputValueError("track", "columns", problem, f"Choose from {', '.join(NAMES | VELOCITY)}.")
    column, _, unit = name_of(text).rpartition(":")
    if name_of(text) in names or not column:
        column, unit = name_of(text), ""
    if column not in names:
        problem = f"there is no column {column!r} for {quantity}"
        raise InputValueError("track", "columns", problem, f"Choose from {', '.join(map(shown, names))}.")
    if not unit and (parts := _WITH_UNIT.fullmatch(column)) and parts[2] in units_of(quantity):
        unit = parts[2]  # of the column's own name
    if unit and unit not in units_of(quantity):
        problem = f"{unit!r} is no unit of {quantity}"
        remedy = f"Choose from {', '.join(units_of(quantity))}." if units_of(quantity) else "Leave the unit out."
        raise InputValueError("track", "columns", problem, remedy)
    return Role(column, unit)


def _recognised(quantity: str, names: Sequence[str], roles: Mapping[str, Role]) -> Role | None:
    """The column whose name means the quantity, with or without a unit; the quantity's own name goes first."""
    taken = {role.column for role in roles.values()}
    matches: list[tuple[str, Role]] = []
    for name in names:
        parts = _WITH_UNIT.fullmatch(name)
        base, unit = parts.groups() if parts and parts[2] in units_of(quantity) else (name, "")
        if base in (NAMES | VELOCITY)[quantity] and name not in taken and (unit or base not in ONLY_WITH_UNIT):
            matches.append((base, Role(name, unit)))
    matches.sort(key=lambda match: match[0] != quantity)
    first = [role for base, role in matches if base == matches[0][0] or matches[0][0] != quantity]
    if len(first) > 1:
        problem = f"the columns {' and '.join(role.column for role in first)} may both be {quantity}"
        remedy = f"Name one, such as columns={{{quantity!r}: {first[0].column!r}}} (--column)."
        raise InputValueError("track", "columns", problem, remedy)
    return first[0] if first else None


def _check_units(roles: Mapping[str, Role]) -> None:
    """Raise an error if some lengths have units and others have none."""
    lengths = {quantity: role for quantity, role in roles.items() if units_of(quantity) is LENGTHS}
    known = "latitude" in roles or any(role.unit for role in lengths.values())
    if "groundspeed" in roles and bool(roles["groundspeed"].unit) != known:
        column = roles["groundspeed"].column
        problem = f"the column {column!r} must have a unit if positions have one, and none if they have none"
        remedy = f"Name it, such as columns={{'groundspeed': '{column}:kt'}} (--column); units are {', '.join(SPEEDS)}."
        raise InputValueError("track", "columns", problem, remedy)
    without = [role.column for role in lengths.values() if not role.unit]
    if known and without:
        problem = f"the column {without[0]!r} has no unit, but other columns have"
        remedy = f"Name it, such as columns={{...: '{without[0]}:m'}} (--column); units are {', '.join(LENGTHS)}."
        raise InputValueError("track", "columns", problem, remedy)


def has_length_unit(roles: Mapping[str, Role]) -> bool:
    """True if positions are in metres."""
    return "latitude" in roles or bool(roles["x"].unit)
