"""Texts of tracks: names and units of quantities, cells of tables, sentences.

Read next: tracks_page.py and tracks_terminal.py, which show them; ../tracking/track_quantities.py (records).
"""

import math
import re
from typing import Any

from ..page.parts import Status
from ..tracking.records import LEVEL, TOLERANCE, TrackQuantity, Tracks, consistency_verdict
from ..tracking.scenario import settings_of
from ..tracking.settings import TrackingSettings

STATUS_OF: dict[str, Status] = {"consistent": "agrees", "inconsistent": "departs", "": "silent"}
LABELS = {"consistent": "consistent (NIS)", "inconsistent": "inconsistent (NIS)", "": "no innovations"}
SHARES = ("nis", "innovation", "mode", "late")  # shown in percent
NAMES = {
    "nis": "NIS in 95 % band",
    "innovation": "innovation in 95 % band",
    "innovation_rms": "innovation RMS",
    "mode": "mode",
    "sigma": "detection noise σ",
    "noise": "process noise",
    "manoeuvre": "manoeuvre noise",
    "turn_rate": "turn rate",
    "moderate": "moderate noise",
    "jitter": "jitter of times",
    "late": "late detections",
    "position_error": "position RMS error",
    "nees": "NEES / dof",
}


def counted(number: int, noun: str) -> str:
    """A number with its noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}".replace(",", "\u202f")


def length_unit(tracks: Tracks) -> str:
    """Unit of positions: m in the scenario and where the columns have units, else unknown."""
    return tracks.detections.length or "length"


def time_unit(tracks: Tracks) -> str:
    """Unit of time: s for timestamps and the scenario, else unknown."""
    return tracks.detections.unit or "time"


def moment_text(label: Any) -> Any:
    """A time as in the input; a timestamp in a form that fits one line of a table: 2024-05-01 12:00:00.5Z."""
    if isinstance(label, int | float):
        return label
    text = str(label).strip().replace("T", " ").replace("+00:00", "Z")
    return re.sub(r"(\.\d{3})\d+", r"\1", text)


# Cells of tables -----------------------------------------------------------------------------------------------------


def quantity_name(row: TrackQuantity) -> str:
    """Name of a quantity: "innovation in 95 % band, x", "mode straight, prob."."""
    if row.name == "mode":
        return f"mode {row.part}, prob."
    return NAMES[row.name] + (f", {row.part}" if row.part else "")


def quantity_unit(row: TrackQuantity, tracks: Tracks) -> str:
    """Unit of a quantity."""
    length, time = length_unit(tracks), time_unit(tracks)
    if row.name in SHARES:
        return "%"
    density = f"{length}²/{time}³"
    units = {"noise": density, "moderate": density, "manoeuvre": density, "turn_rate": f"°/{time}", "nees": "1"}
    units["jitter"] = time
    return units.get(row.name, length)


def quantity_cells(row: TrackQuantity, tracks: Tracks) -> tuple[str, str, str]:
    """Value with its unit, 95 % confidence interval and expected value; empty where there is none."""
    if row.name in SHARES:
        interval = "" if math.isnan(row.low) else f"{100 * row.low:.1f}–{100 * row.high:.1f} %"
        expected = "" if math.isnan(row.expected) else f"{100 * row.expected:.0f} %"
        return f"{100 * row.value:.1f} %", interval, expected
    unit = "" if row.name == "nees" else f" {quantity_unit(row, tracks)}"
    return f"{row.value:.3g}{unit}", "", "" if math.isnan(row.expected) else f"{row.expected:.3g}{unit}"


# Sentences -----------------------------------------------------------------------------------------------------------


def run_text(tracks: Tracks) -> str:
    """The run: targets, detections, filter, modes, noise levels."""
    return f"{sample(tracks)}; {method(tracks)}"


def sample(tracks: Tracks) -> str:
    """Numbers of targets and detections."""
    rows = tracks.detections
    detected = int((~rows.position.isnan()).any(-1).sum())
    return f"{counted(len(rows.names), 'target')}, {counted(detected, 'detection')}"


def method(tracks: Tracks) -> str:
    """Filter, modes, smoothing and origin of the noise levels."""
    s = tracks.settings
    options = [s.sigma, s.noise, *([s.turn_rate] if s.model == "turn" else [])]  # the jitter need not be given
    if s.fit:
        end = "converged" if tracks.converged else "not converged"
        levels = f"fitted by maximum likelihood ({end} after {counted(tracks.evaluations, 'evaluation')})"
    elif s.levels is not None:
        levels = f"of {s.levels.rsplit('/', 1)[-1]}"
    elif tracks.detections.truth is not None and _levels(s) == _levels(settings_of(s.model)):
        levels = "preset for the scenario"
    elif all(options):
        levels = "given by the options"
    else:
        levels = (
            "partly given, partly estimated from the detections" if any(options) else "estimated from the detections"
        )
    smoothed = ", smoothed" if s.smooth else ""
    return f"{s.filter.upper()} filter with modes {', '.join(s.modes)}{smoothed}; noise levels {levels}"


def _levels(settings: TrackingSettings) -> tuple[object, ...]:
    return settings.sigma, settings.noise, settings.turn_rate


def headline(tracks: Tracks) -> str:
    """Numbers of targets and detections, and the consistency of the filter."""
    share = tracks.consistency
    if share.total == 0:
        return f"{sample(tracks)}: no target has a second detection, so there are no innovations to test."
    inside = f"{100 * share.value:.1f}\u00a0% of {counted(share.total, 'innovation')} inside the 95\u00a0% band"
    interval = f"95\u00a0% CI {100 * share.low:.1f}–{100 * share.high:.1f}\u00a0%"
    return f"{sample(tracks)}. NIS: {inside} ({interval}): {_meaning(tracks)}."


def rule() -> str:
    """The rule of the verdicts on consistency."""
    return (
        f"Consistent: the expected share ({LEVEL:.0%}) lies in the CI, or differs from the measured share by at most "
        f"{100 * TOLERANCE:.0f} percentage points."
    ).replace("%", " %")


def counts_text(tracks: Tracks) -> str:
    """The meaning of the column n, and the reason why there are fewer innovations than detections."""
    rows = tracks.detections
    detected = ~rows.position.isnan()
    complete = bool(detected.any(-1).all())
    noun = "detections" if complete else "rows of the input"
    numbers = (detected.any(-1, keepdim=True) & ~detected).sum(0).tolist()
    missing = [f"{number} detections lack {axis}" for axis, number in zip(rows.axes, numbers, strict=True) if number]
    reasons = "; ".join(["The first detection of a coordinate has no innovation", *missing])
    return f"n: for rows on NIS and innovations, the number of innovations; for other rows, that of {noun}. {reasons}."


def _meaning(tracks: Tracks) -> str:
    share = tracks.consistency
    if consistency_verdict(share) == "consistent":
        return "consistent"
    above = int((tracks.nis > tracks.nis_high).sum()) / share.total
    below = int((tracks.nis < tracks.nis_low).sum()) / share.total
    if share.value > LEVEL:
        return "inconsistent, the predicted covariances are too large"
    return f"inconsistent, the predicted covariances are too {'small' if above > below else 'large'}"


def skipped(tracks: Tracks) -> str:
    """Number of skipped rows, and the problem of the first; empty if there are none."""
    bad = tracks.detections.bad
    return f"{counted(len(bad), 'invalid row')} skipped; the first: {bad[0].problem}." if bad else ""


def remarks(tracks: Tracks) -> list[str]:
    """Sentences on what was done to the rows of the input and is not obvious from the results."""
    rows = tracks.detections
    sentences = [skipped(tracks)]
    if count := int(rows.outlying.sum()):
        sentences.append(f"{counted(count, 'detection')} rejected as outliers; --outliers 0 rejects none.")
    if poor := tracks.poorly_smoothed:
        names = ", ".join(poor[:3]) + (", ..." if len(poor) > 3 else "")
        fact = f"Smoothed positions of {counted(len(poor), 'target')} are farther from the detections than predictions"
        sentences.append(f"{fact}: {names}. Use the filtered ones, or more process noise (--noise).")
    if rows.stale is not None:
        repeats = counted(int(rows.stale.sum()), "row")
        sentences.append(f"{repeats} not used: the position repeats an earlier one of a target that moves.")
    if rows.late:
        sentences.append(f"{counted(rows.late, 'row')} before an earlier time of the target: rows are sorted by time.")
    if rows.repeated:
        sentences.append(f"{counted(rows.repeated, 'row')} left out: time, target and coordinates repeat another row.")
    if rows.unused:
        sentences.append(f"Columns that are not used: {', '.join(rows.unused)}.")
    if rows.plane is not None:
        origin = f"{rows.plane.latitude:.4f}° latitude, {rows.plane.longitude:.4f}° longitude"
        sentences.append(f"x and y are metres east and north of {origin}.")
    return [sentence for sentence in sentences if sentence]


def truth_errors(tracks: Tracks) -> str:
    """Errors relative to the truth of a scenario; empty without a truth."""
    e = tracks.errors
    if not e:
        return ""
    parts = [f"detections {e['error of detections']:.0f}\u00a0m"]
    for name in ("filtered", "smoothed"):
        if f"{name} position" in e:
            parts.append(f"{name} positions {e[f'{name} position']:.0f}\u00a0m")
            parts.append(f"{name} velocities {e[f'{name} velocity']:.1f}\u00a0m/s")
    nees = ", ".join(f"{name} {e[f'{name} NEES']:.2f}" for name in ("filtered", "smoothed") if f"{name} NEES" in e)
    return f"RMS errors relative to the truth: {', '.join(parts)}. NEES per degree of freedom (expected 1): {nees}."
