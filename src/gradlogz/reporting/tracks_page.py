"""Tracks as a page: the paths with their ellipses, modes and innovations over time, targets in a table.

Read next: tracks_wording.py (the sentences), ../page (how it looks).
"""

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from .. import __version__
from .._typing import Tensor
from ..page import (
    Axis,
    Chip,
    Column,
    Facts,
    Figure,
    Line,
    Mark,
    Outlines,
    Page,
    Part,
    Points,
    Ribbon,
    Section,
    Table,
    Text,
    VerdictBanner,
    View,
    Views,
)
from ..tracking.detections import grouped
from ..tracking.records import Tracks, share_of
from .citations import cited
from .tracks_wording import beside_truth, consistent, headline, skipped

SHOWN = 12  # targets that have figures of their own
DRAWN = 20_000  # rows of the map of all tracks
LISTED = 2000  # targets of the table
STEPS = 1500  # rows of a target that are drawn
ELLIPSES = 40  # of a track
CLOSE = 7  # rows on either side of where modes change most
FAR = 100.0  # times the width of a picture from 0, from which it has an origin of its own
CORNERS = 24  # of an ellipse
TWO_SIGMA = math.sqrt(-2 * math.log(0.05))  # standard deviations of the ellipse that holds 95 % of a plane
COLOURS = ("blue", "vermilion", "green")
Axes = tuple[Axis, Axis]


def page_of(tracks: Tracks) -> Page:
    """The page of tracks."""
    s, found = tracks.settings, tracks.detections
    status = consistent(tracks.consistency)
    chips = (Chip({"agrees": "consistent", "departs": "not consistent"}.get(status, "nothing to compare"), status),)
    notes = tuple(words for words in (beside_truth(tracks), skipped(tracks)) if words)
    named = "the built-in scenario" if found.truth is not None else tracks.source.rsplit("/", 1)[-1]
    how = f"{s.filter} of the modes {', '.join(s.modes)}" + (", smoothed" if s.smooth else "")
    return Page(
        name="gradlogz-track",
        title=f"Tracks of {named}",
        subtitle=f"{how}; noise levels {_levels_are(tracks)}.",
        verdict=VerdictBanner(headline(tracks), chips, notes),
        sections=_sections(tracks),
        methods=_methods(),
        reproduce={
            "version": f"gradlogz {__version__}, torch {torch.__version__}",
            **({"seed": f"{s.seed}"} if found.truth is not None else {}),
            "command": tracks.command,
        },
        references=cited(("blom88", "barshalom01")),
        data=data_of(tracks),
        made_by="gradlogz track",
    )


def data_of(tracks: Tracks) -> dict[str, Any]:
    """What was found of the whole and of each target, as plain data; rows are in the table that is written."""
    share = tracks.consistency
    return {
        "version": __version__,
        "command": tracks.command,
        "settings": asdict(tracks.settings),
        "levels": tracks.levels._asdict(),
        "sentence": headline(tracks),
        "rows": len(tracks.detections.time),
        "skipped": [bad._asdict() for bad in tracks.detections.bad],
        "inside": {**share._asdict(), "value": share.value},
        "log_likelihood": tracks.log_likelihood,
        "errors": tracks.errors,
        "targets": [dict(zip([c.name for c in _COLUMNS], row, strict=True)) for row in _rows(tracks)],
    }


def _levels_are(tracks: Tracks) -> str:
    s = tracks.settings
    if s.fit:
        return f"learned in {tracks.rounds} rounds"
    return "as given" if s.sigma and s.noise else "found from the detections"


def _sections(tracks: Tracks) -> tuple[Section, ...]:
    many = len(tracks.detections.names) > 1
    shown, axes = _shifted(tracks)
    overview: list[Part] = [_map(shown, axes)] if many else []
    chosen = _interesting(tracks)
    views = tuple(View(f"{tracks.detections.names[who]}", _target(shown, axes, who)) for who in chosen)
    said = f"The {len(views)} targets whose modes change most." if len(views) < len(tracks.detections.names) else ""
    text = [Text((said,))] if said else []
    return (
        *([Section("All tracks", tuple(overview))] if many else []),
        Section("Target by target", (*text, Views("targets", "Target", views))),
        Section("Is the filter what it claims?", (_calibration(tracks), _over_time(tracks))),
        Section("Targets", (_table(tracks),)),
        Section("Levels", (_facts(tracks),)),
    )


# Rows of targets ----------------------------------------------------------------------------------------------------


def _means(tracks: Tracks, values: Tensor) -> Tensor:
    """The mean of each target over the rows that have a value."""
    seen = ~values.isnan()
    count = len(tracks.detections.names)
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, tracks.detections.target, values.nan_to_num())
    number = torch.zeros(count, dtype=torch.float64).index_add_(0, tracks.detections.target, seen.double())
    return total / number


def _interesting(tracks: Tracks) -> list[int]:
    """Targets with the most rows in which another mode than the first is likely but not always."""
    order, _, lengths = grouped(tracks.detections.target)
    other = 1 - tracks.best.probability[:, 0]
    same = (tracks.detections.target[order].diff() == 0).double()
    change = torch.zeros(len(lengths), dtype=torch.float64)
    change.index_add_(0, tracks.detections.target[order][1:], other[order].diff().abs() * same)
    # Names come in the order of the file where targets are few.
    best = (change + 1e-6 * lengths).argsort(descending=True, stable=True)[:SHOWN]
    return sorted(best.tolist()) if len(lengths) <= SHOWN else best.tolist()


_COLUMNS = (
    Column("target"), Column("rows"), Column("detections"), Column("from"), Column("to"),
    Column("mean NIS", "1 / degree", "vᵀS⁻¹v / o"), Column("inside", "%", "95 % band"),
    Column("not in the first mode", "%", "1 − π₁"), Column("speed", "length / time", "|v|"),
)  # fmt: skip


def _rows(tracks: Tracks) -> list[tuple[Any, ...]]:
    found, d = tracks.detections, len(tracks.detections.axes)
    order, starts, lengths = grouped(found.target)
    ends = starts + lengths - 1
    seen = (~found.position.isnan()).any(-1).double()
    columns = [
        lengths.tolist(),
        (_means(tracks, seen) * lengths).round().long().tolist(),
        [found.label[i] for i in order[starts].tolist()],
        [found.label[i] for i in order[ends].tolist()],
        (
            _means(tracks, tracks.nis) / _means(tracks, tracks.degrees.masked_fill(tracks.nis.isnan(), math.nan))
        ).tolist(),
        (100 * _means(tracks, tracks.inside.double().masked_fill(tracks.nis.isnan(), math.nan))).tolist(),
        (100 * _means(tracks, 1 - tracks.best.probability[:, 0])).tolist(),
        _means(tracks, tracks.best.mean[:, d:].square().sum(-1).sqrt()).tolist(),
    ]
    return list(zip(found.names, *columns, strict=True))


def _table(tracks: Tracks) -> Table:
    rows = _rows(tracks)
    caption = "Means over the rows of each target."
    if len(rows) > LISTED:
        chosen = set(_interesting(tracks))
        rows = [row for i, row in enumerate(rows) if i in chosen or i < LISTED]
        caption = f"{caption} {len(rows)} of {len(tracks.detections.names)} targets."
    return Table("targets", "Targets", _COLUMNS, tuple(rows), caption, shown=50)


# Figures ------------------------------------------------------------------------------------------------------------


def _length(tracks: Tracks) -> str:
    return "m" if tracks.detections.truth is not None else "length"


def _shifted(tracks: Tracks) -> tuple[Tracks, Axes]:
    """Positions from a round number on where all are far from 0: a page keeps six digits."""
    p, unit = tracks.detections.position[:, :2], _length(tracks)
    high, low = p.nan_to_num(nan=-math.inf).amax(0), p.nan_to_num(nan=math.inf).amin(0)
    width = float((high - low).clamp(min=0).max())
    digit = 10.0 ** math.ceil(math.log10(width)) if width > 0 else 1.0
    middle = ((high + low) / 2).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    origin = torch.where(middle.abs() > FAR * width, (middle / digit).round() * digit, 0.0)
    axes = [Axis(n, unit, f"{n} − {o:.12g}" if o else "") for n, o in zip("xy", origin.tolist(), strict=True)]
    rest = torch.nn.functional.pad(origin, (0, tracks.filtered.mean.shape[-1] - 2))
    d = tracks.detections.position.shape[-1]
    found = tracks.detections
    truth = None if found.truth is None else found.truth - rest
    filtered, smoothed = (
        None if e is None else e._replace(mean=e.mean - rest) for e in (tracks.filtered, tracks.smoothed)
    )
    assert filtered is not None  # smoothed alone may be
    moved = found._replace(position=found.position - rest[:d], truth=truth)
    return replace(tracks, detections=moved, filtered=filtered, smoothed=smoothed), (axes[0], axes[1])


def _time_axis(tracks: Tracks) -> Axis:
    return Axis("time", tracks.detections.unit or "time", "t − t₁")


def _kept(rows: Tensor, most: int) -> Tensor:
    return rows[:: math.ceil(len(rows) / most)] if len(rows) > most else rows


def _plain(values: Tensor) -> list[float | None]:
    """NaN as nothing, so that lines have gaps."""
    return [None if math.isnan(v) else v for v in values.tolist()]


def _map(tracks: Tracks, axes: Axes) -> Figure:
    """Paths of all targets, or of some that stand for all."""
    found = tracks.detections
    order, _, lengths = grouped(found.target)
    count = len(lengths)
    every = math.ceil(len(order) / DRAWN)
    rows = order[found.target[order] % every == 0]
    rows = rows[:DRAWN]
    who = found.target[rows]
    gap = torch.nn.functional.pad(who.diff() != 0, (0, 1)).tolist()
    points = zip(_plain(tracks.best.mean[rows, 0]), _plain(tracks.best.mean[rows, 1]), gap, strict=True)
    x: list[float | None] = []
    y: list[float | None] = []
    for a, b, ends in points:
        x += [a, None] if ends else [a]
        y += [b, None] if ends else [b]
    dots = Points("detections", _plain(found.position[rows, 0]), _plain(found.position[rows, 1]), "grey", size=3)
    marks: list[Mark] = [dots, *_truth(tracks, rows), Line(_known(tracks), x, y)]
    shown = len(who.unique())
    caption = "" if shown == count else f"{shown} of {count} targets, one in {every}."
    return Figure("tracks", "All tracks", *axes, tuple(marks), caption, wide=True, equal=True)


def _known(tracks: Tracks) -> str:
    return "filtered" if tracks.smoothed is None else "smoothed"


def _truth(tracks: Tracks, rows: Tensor) -> list[Mark]:
    truth = tracks.detections.truth
    if truth is None:
        return []
    x: list[float | None] = []
    y: list[float | None] = []
    for who in tracks.detections.target[rows].unique().tolist():
        own = truth[rows[tracks.detections.target[rows] == who]]
        x += [*own[:, 0].tolist(), None]
        y += [*own[:, 1].tolist(), None]
    return [Line("truth", x, y, "ink", "dash")]


def _target(tracks: Tracks, axes: Axes, who: int) -> tuple[Text | Table | Figure, ...]:
    rows = (tracks.detections.target == who).nonzero().flatten()
    name = tracks.detections.names[who]
    change = tracks.best.probability[rows].diff(dim=0).abs().sum(-1)
    middle = int(change.argmax()) + 1 if len(change) else 0
    near = rows[max(0, middle - CLOSE) : middle + CLOSE]
    caption = f"One row in {math.ceil(len(rows) / STEPS)}." if len(rows) > STEPS else ""
    path = _path(tracks, axes, f"path-{who}", f"{name}: track", _kept(rows, STEPS), caption)
    closer = _around(tracks, axes, near)
    close = _path(tracks, closer, f"close-{who}", f"{name}: where modes change most", near, "")
    figures = [path, close] if len(rows) > 2 * CLOSE else [path]
    return (*figures, _modes(tracks, who, name, rows), _innovations(tracks, who, name, rows))


def _around(tracks: Tracks, axes: Axes, rows: Tensor) -> Axes:
    """Axes with ends about some rows, which a narrow picture then need not look for."""
    p = tracks.best.mean[rows, :2]
    p = p[p.isfinite().all(-1)]
    if len(p) == 0:
        return axes
    high, low = p.amax(0), p.amin(0)
    arm = 0.1 * float((high - low).max()) + tracks.levels.sigma
    x, y = (replace(a, range=(float(i) - arm, float(j) + arm)) for a, i, j in zip(axes, low, high, strict=True))
    return x, y


def _path(tracks: Tracks, axes: Axes, name: str, title: str, part: Tensor, caption: str) -> Figure:
    found, best = tracks.detections, tracks.best
    seen = found.position[part]
    texts = [f"{found.label[i]}" for i in part.tolist()]
    known = part[~best.mean[part, :2].isnan().any(-1)]
    marks: list[Mark] = [
        Outlines("95 % ellipses", _ellipses(tracks, _kept(known, ELLIPSES)), "blue"),
        Points("detections", _plain(seen[:, 0]), _plain(seen[:, 1]), "grey", "cross-thin-open", texts, size=6),
        *_truth(tracks, part),
        Line(_known(tracks), _plain(best.mean[part, 0]), _plain(best.mean[part, 1]), text=texts),
    ]
    beyond = part[(tracks.nis > tracks.nis_high)[part]]
    if len(beyond):
        at = found.position[beyond]
        marks.append(Points("above its band", _plain(at[:, 0]), _plain(at[:, 1]), "vermilion", "circle-open"))
    return Figure(name, title, *axes, tuple(marks), caption, equal=True)


def _ellipses(tracks: Tracks, rows: Tensor) -> list[tuple[list[float], list[float]]]:
    """Of positions in the plane of x and y."""
    best = tracks.best
    L = torch.linalg.cholesky_ex(best.covariance[rows][:, :2, :2]).L
    angle = torch.linspace(0, 2 * math.pi, CORNERS + 1, dtype=torch.float64)[:-1]
    circle = TWO_SIGMA * torch.stack((angle.cos(), angle.sin()))
    curves = best.mean[rows, :2].unsqueeze(-1) + L @ circle
    return [(x.tolist(), y.tolist()) for x, y in curves]


def _modes(tracks: Tracks, who: int, name: str, rows: Tensor) -> Figure:
    part = _kept(rows, STEPS)
    times = (tracks.detections.time[part] - tracks.detections.time[rows[0]]).tolist()
    pi = tracks.best.probability[part]
    marks = tuple(
        Line(mode, times, column.tolist(), colour)
        for mode, column, colour in zip(tracks.settings.modes, pi.unbind(-1), COLOURS, strict=False)
    )
    axis = Axis("probability of a mode", "1", "πⱼ", range=(-0.02, 1.02))
    return Figure(f"modes-{who}", f"{name}: modes", _time_axis(tracks), axis, marks)


def _innovations(tracks: Tracks, who: int, name: str, rows: Tensor) -> Figure:
    part = _kept(rows, STEPS)
    part = part[~tracks.nis[part].isnan()]
    times = (tracks.detections.time[part] - tracks.detections.time[rows[0]]).tolist()
    inside = tracks.inside[part]
    low, high = tracks.nis_low[part].tolist(), tracks.nis_high[part].tolist()
    marks: list[Mark] = [Ribbon("95 % band", times, low, high, "grey")]
    for word, chosen, colour in (("inside", inside, "blue"), ("outside", ~inside, "vermilion")):
        if bool(chosen.any()):
            at = [t for t, yes in zip(times, chosen.tolist(), strict=True) if yes]
            marks.append(Points(word, at, tracks.nis[part][chosen].tolist(), colour, size=6))
    axis = Axis("NIS", "1", "vᵀS⁻¹v", scale="log")
    share = share_of(int(inside.sum()), len(part))
    caption = f"{share.number} of {share.total} inside; of a filter that knows its noise 95 in 100 are."
    return Figure(f"nis-{who}", f"{name}: innovations", _time_axis(tracks), axis, tuple(marks), caption)


def _calibration(tracks: Tracks) -> Figure:
    """How many innovations lie below each quantile: on the diagonal if the filter is what it claims."""
    seen = ~tracks.nis.isnan()
    level = torch.special.gammainc(tracks.degrees[seen] / 2, tracks.nis[seen] / 2).sort().values
    at = torch.linspace(0, 1, 41, dtype=torch.float64)
    total = max(len(level), 1)
    share = torch.searchsorted(level, at, right=True).double() / total
    arm = 1.96 * (at * (1 - at) / total).sqrt()
    places = at.tolist()
    marks = (
        Ribbon("95 % of chance", places, (at - arm).clamp(min=0).tolist(), (at + arm).clamp(max=1).tolist(), "grey"),
        Line("as it should be", places, places, "ink", "dash"),
        Line("seen", places, share.tolist()),
    )
    x, y = Axis("quantile of chi-square", "1", "p"), Axis("innovations below it", "1", "share")
    caption = "Above the diagonal detections lie nearer to what was expected than the filter claims, below it further."
    return Figure("calibration", "Innovations beside chi-square", x, y, marks, caption)


def _over_time(tracks: Tracks) -> Figure:
    """The share inside the band, by time of all targets together."""
    seen = (~tracks.nis.isnan()).nonzero().flatten()
    order = seen[tracks.detections.time[seen].argsort()]
    parts = [p for p in order.chunk(min(24, max(1, len(order) // 20))) if len(p)]
    shares = [share_of(int(tracks.inside[p].sum()), len(p)) for p in parts]
    times = [float(tracks.detections.time[p].mean()) for p in parts]
    values = [100 * s.value for s in shares]
    marks: list[Mark] = [
        Line("as it should be", [times[0], times[-1]], [95.0, 95.0], "ink", "dash") if times else Line("none", [], []),
        Points("inside", times, values, low=[100 * s.low for s in shares], high=[100 * s.high for s in shares]),
    ]
    axis = Axis("innovations inside", "%", "95 % band")
    caption = "Each point is as many innovations, in the order of time, with the interval of its share."
    return Figure("inside", "Consistency over time", _time_axis(tracks), axis, tuple(marks), caption)


def _facts(tracks: Tracks) -> Facts:
    levels, s = tracks.levels, tracks.settings
    d = len(tracks.detections.axes)
    unit, time = _length(tracks), tracks.detections.unit or "time"
    rows = {
        "observation": f"standard deviation {levels.sigma:.4g} {unit} in each of {d} coordinates",
        f"mode {s.modes[0]}": f"velocities diffuse with density {levels.noise:.4g} {unit}²/{time}³",
    }
    if s.model == "turn":
        rate = math.degrees(levels.turn_rate)
        rows["modes left and right"] = f"the same, turning {rate:.4g} degrees a {'second' if time == 's' else 'time'}"
    elif s.model == "cv":
        rows[f"mode {s.modes[1]}"] = f"the same with density {levels.manoeuvre:.4g} {unit}²/{time}³"
    else:
        rows[f"mode {s.modes[1]}"] = (
            f"accelerations diffuse with density {levels.manoeuvre / levels.step**2:.4g} {unit}²/{time}⁵"
        )
    rows["a step"] = f"{levels.step:.4g} {time} at the median; the first mode lasts 20, the others 10 on average"
    rows["log likelihood"] = f"{tracks.log_likelihood:.6g} nats"
    return Facts(rows)


def _methods() -> tuple[str, ...]:
    return (
        "Each mode is a linear Gaussian system in continuous time, and a Markov chain switches them; between two "
        "detections the exact transition of the time that has passed is used. The filter is the interacting multiple "
        "model [blom88] or a generalised pseudo-Bayesian one.",
        "A target begins at its first detection, with all but no knowledge of its position and a velocity of zero give "
        "or take twice a speed that few exceed. A coordinate that was not seen is left out, not filled in.",
        "NIS is the squared distance of a detection from what was expected, in units of what was expected of it; with "
        "the right model it is chi-square [barshalom01]. The first detection of a coordinate is compared with nothing.",
        "Levels that are not given are found from triples of detections: how far one lies from the line between its "
        "neighbours says how large the noise is, near and far triples tell observation and motion apart.",
    )  # fmt: skip
