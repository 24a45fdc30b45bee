"""The page of tracks: results, paths with ellipses, mode probabilities and NIS over time, targets, noise levels.

Read next: tracks_wording.py (the texts), ../page (the layout).
"""

import math
from dataclasses import asdict, replace
from typing import Any

import torch

from .. import __version__
from .._typing import Tensor
from ..page import (
    Axis,
    Cell,
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
from ..special.proportions import share_of
from ..tracking.detections import grouped
from ..tracking.records import Tracks, consistency_verdict
from ..tracking.track_quantities import track_quantities
from .citations import cited
from .tracks_wording import (
    LABELS,
    STATUS_OF,
    counted,
    counts_text,
    headline,
    length_unit,
    method,
    moment_text,
    quantity_cells,
    quantity_name,
    remarks,
    rule,
    time_unit,
    truth_errors,
)

SHOWN = 12  # targets with figures
DRAWN = 20_000  # rows on the map of all tracks
LISTED = 2000  # targets in the table
STEPS = 1500  # rows of a target in its figures
ELLIPSES = 40  # on a path
CLOSE = 7  # rows on either side of the largest change of the mode probabilities
FAR = 100.0  # distance from 0, in widths of a figure, beyond which axes are shifted
CORNERS = 24  # of the polygon of an ellipse
ELLIPSE_95 = math.sqrt(-2 * math.log(0.05))  # standard deviations of the 95 % ellipse in the plane
FILTERS = {  # name and source
    "imm": ("interacting multiple model (IMM) filter", "blom88"),
    "gpb1": ("first-order generalised pseudo-Bayesian filter (GPB1)", "ackerson70"),
    "gpb2": ("second-order generalised pseudo-Bayesian filter (GPB2)", "chang78"),
}
COLOURS = ("blue", "vermilion", "green")
Axes = tuple[Axis, Axis]


def page_of(tracks: Tracks) -> Page:
    """Page of tracks."""
    s, simulated = tracks.settings, tracks.detections.truth is not None
    verdict = consistency_verdict(tracks.consistency)
    chips = (Chip(LABELS[verdict], STATUS_OF[verdict]),)
    notes = tuple(text for text in (truth_errors(tracks), *remarks(tracks)) if text)
    name = "the built-in scenario" if simulated else tracks.source.rsplit("/", 1)[-1]
    return Page(
        name="gradlogz-track",
        title=f"Tracks of {name}",
        subtitle=f"{method(tracks)}.",
        verdict=VerdictBanner(headline(tracks), chips, notes),
        sections=_sections(tracks),
        methods=_methods(s.filter),
        reproduce={
            "version": f"gradlogz {__version__}, torch {torch.__version__}",
            **({"seed": f"{s.seed}"} if simulated else {}),
            "command": tracks.command,
        },
        references=cited((FILTERS[s.filter][1], "barshalom01", "rosenblatt52")),
        data=data_of(tracks),
        made_by="gradlogz track",
    )


def data_of(tracks: Tracks) -> dict[str, Any]:
    """Settings, noise levels, consistency and a summary of each target as plain data."""
    share = tracks.consistency
    return {
        "version": __version__,
        "command": tracks.command,
        "settings": {**asdict(tracks.settings), "columns": dict(tracks.settings.columns)},
        "levels": tracks.levels._asdict(),
        "sentence": headline(tracks),
        "rows": len(tracks.detections.time),
        "outliers": int(tracks.detections.outlying.sum()),
        "skipped": [bad._asdict() for bad in tracks.detections.bad],
        "inside": {**share._asdict(), "value": share.value},
        "log_likelihood": tracks.log_likelihood,
        "errors": tracks.errors,
        "targets": [dict(zip([c.name for c in _columns(tracks)], row, strict=True)) for row in _rows(tracks)],
    }


def _sections(tracks: Tracks) -> tuple[Section, ...]:
    many = len(tracks.detections.names) > 1
    shown, axes = _shifted(tracks)
    overview: list[Part] = [_map(shown, axes)] if many else []
    chosen = _interesting(tracks)
    views = tuple(View(f"{tracks.detections.names[i]}", _target(shown, axes, i)) for i in chosen)
    total = len(tracks.detections.names)
    selection = (
        f"The {len(views)} of {total} targets whose mode probabilities change most." if len(views) < total else ""
    )
    text = [Text((selection,))] if selection else []
    return (
        Section("Results", (Text((_HOW_TO_READ,), title="How to read this page"), _results(tracks))),
        Section("Noise levels", (_facts(tracks),)),
        *([Section("All tracks", tuple(overview))] if many else []),
        Section("Individual targets", (*text, Views("targets", "Target", views))),
        *([Section("Consistency of the filter (NIS)", tuple(nis))] if (nis := _consistency(tracks)) else []),
        *([Section("Outliers", tuple(outliers))] if (outliers := _outliers(tracks)) else []),
        Section("Targets", (_table(tracks),)),
    )


_HOW_TO_READ = (
    "A filter is consistent if its innovations (detection minus prediction) are as large as their predicted "
    "covariances imply; then 95 % of the normalised innovations squared (NIS) lie inside the 95 % chi-square band. The "
    "banner and the first table give this share with its 95 % confidence interval (CI). In the figures of a target, "
    "the line is the estimated path, ellipses contain the position with probability 95 %, and circles mark detections "
    "whose NIS is above the band."
)


def _results(tracks: Tracks) -> Table:
    """The table of quantities, as on the terminal."""
    columns = (Column("quantity"), Column("value"), Column("95 % CI"), Column("n"), Column("expected"),
               Column("verdict"))  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for row in track_quantities(tracks):
        value, interval, expected = quantity_cells(row, tracks)
        verdict: Cell = Chip(row.verdict, STATUS_OF[row.verdict]) if row.verdict else None
        cells = (value, interval or None, row.total or None, expected or None, verdict)
        rows.append((quantity_name(row), *cells))
    caption = (
        f"{counts_text(tracks)} 95 % CI: Wilson's interval, assuming independent innovations. {rule()} –: not "
        "available."
    )
    if tracks.errors:
        caption += (
            " NEES / dof: normalised estimation error squared, divided by its degrees of freedom. The NEES "
            "leaves out the filtered estimates of a target until each of its coordinates has been detected twice, and "
            "all smoothed estimates of a target with a coordinate that was detected only once."
        )
    return Table("results", "Quantities of all tracks", columns, tuple(rows), caption, stacked=True)


# Rows of targets ----------------------------------------------------------------------------------------------------


def _means(tracks: Tracks, values: Tensor) -> Tensor:
    """Mean over the rows of each target, without NaN."""
    present = ~values.isnan()
    count = len(tracks.detections.names)
    total = torch.zeros(count, dtype=torch.float64).index_add_(0, tracks.detections.target, values.nan_to_num())
    number = torch.zeros(count, dtype=torch.float64).index_add_(0, tracks.detections.target, present.double())
    return total / number


def _interesting(tracks: Tracks) -> list[int]:
    """Targets with the largest total change of the mode probabilities."""
    order, _, lengths = grouped(tracks.detections.target)
    other = 1 - tracks.best.probability[:, 0]
    same = (tracks.detections.target[order].diff() == 0).double()
    change = torch.zeros(len(lengths), dtype=torch.float64)
    change.index_add_(0, tracks.detections.target[order][1:], other[order].diff().abs() * same)
    # A few targets are listed in the order of the file.
    best = (change + 1e-6 * lengths).argsort(descending=True, stable=True)[:SHOWN]
    return sorted(best.tolist()) if len(lengths) <= SHOWN else best.tolist()


def _columns(tracks: Tracks) -> tuple[Column, ...]:
    time = tracks.detections.unit if all(isinstance(at, float | int) for at in tracks.detections.label) else ""
    return (
        Column("target"), Column("rows"), Column("detections"), Column("from", time), Column("to", time),
        Column("mean NIS", "per degree of freedom"), Column("inside", "%"), Column("not in the first mode", "%"),
        Column("speed", f"{length_unit(tracks)}/{time_unit(tracks)}"),
    )  # fmt: skip


def _rows(tracks: Tracks) -> list[tuple[Any, ...]]:
    detections, d = tracks.detections, len(tracks.detections.axes)
    order, starts, lengths = grouped(detections.target)
    ends = starts + lengths - 1
    detected = (~detections.position.isnan()).any(-1).double()
    columns = [
        lengths.tolist(),
        (_means(tracks, detected) * lengths).round().long().tolist(),
        [moment_text(detections.label[i]) for i in order[starts].tolist()],
        [moment_text(detections.label[i]) for i in order[ends].tolist()],
        (
            _means(tracks, tracks.nis) / _means(tracks, tracks.degrees.masked_fill(tracks.nis.isnan(), math.nan))
        ).tolist(),
        (100 * _means(tracks, tracks.inside.double().masked_fill(tracks.nis.isnan(), math.nan))).tolist(),
        (100 * _means(tracks, 1 - tracks.best.probability[:, 0])).tolist(),
        _means(tracks, tracks.best.mean[:, d:].square().sum(-1).sqrt()).tolist(),
    ]
    return list(zip(detections.names, *columns, strict=True))


def _table(tracks: Tracks) -> Table:
    rows = _rows(tracks)
    first = tracks.settings.modes[0]
    caption = (
        "Rows: rows of the input, one for each time; detections: rows with at least one coordinate. Mean NIS: "
        "sum of the NIS divided by the sum of their degrees of freedom (expected 1). Inside: share of the NIS inside "
        f"the 95 % band (expected 95 %). Not in the first mode: 1 − probability of the mode {first}, mean over rows. "
        "Speed: norm of the estimated velocity, mean over rows."
    )
    if len(rows) > LISTED:
        chosen = set(_interesting(tracks))
        rows = [row for i, row in enumerate(rows) if i in chosen or i < LISTED]
        caption = f"{caption} {len(rows)} of {len(tracks.detections.names)} targets."
    return Table("targets", "Targets", _columns(tracks), tuple(rows), caption, shown=50, stacked=True)


def _outliers(tracks: Tracks) -> list[Part]:
    """Table of the rejected detections, the farthest first; empty without any."""
    detections, axes, unit = tracks.detections, tracks.detections.axes, length_unit(tracks)
    rows = detections.outlying.nonzero().flatten()
    if len(rows) == 0:
        return []
    apart = (detections.position - tracks.best.mean[:, : len(axes)])[rows]
    unknown = apart.isnan().all(-1)  # before the first estimate
    distance = apart.square().nansum(-1).sqrt().masked_fill(unknown, math.nan)
    order = distance.nan_to_num(nan=-1.0).argsort(descending=True)[:LISTED]
    cells = [
        (
            detections.names[int(detections.target[i])],
            moment_text(detections.label[int(i)]),
            *detections.position[i].tolist(),
            d,
        )
        for i, d in zip(rows[order], _plain(distance[order]), strict=True)
    ]
    columns = (Column("target"), Column("time"), *(Column(axis, unit) for axis in axes), Column("distance", unit))
    caption = (
        "Detections that the filter does not use, because they are probably outliers given the other detections of the "
        "target. Distance: from the estimated position."
    )
    return [Table("outliers", "Rejected detections", columns, tuple(cells), caption, shown=20, stacked=True)]


# Figures ------------------------------------------------------------------------------------------------------------


def _shifted(tracks: Tracks) -> tuple[Tracks, Axes]:
    """Positions relative to a round number if all are far from 0, since a page has six digits."""
    p, unit = tracks.detections.used[:, :2], length_unit(tracks)
    high, low = p.nan_to_num(nan=-math.inf).amax(0), p.nan_to_num(nan=math.inf).amin(0)
    width = float((high - low).clamp(min=0).max())
    digit = 10.0 ** math.ceil(math.log10(width)) if width > 0 else 1.0
    centre = ((high + low) / 2).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    origin = torch.where(centre.abs() > FAR * width, (centre / digit).round() * digit, 0.0)
    axes = [Axis(n, unit, f"{n} − {o:.12g}" if o else "") for n, o in zip("xy", origin.tolist(), strict=True)]
    rest = torch.nn.functional.pad(origin, (0, tracks.filtered.mean.shape[-1] - 2))
    d = tracks.detections.position.shape[-1]
    detections = tracks.detections
    truth = None if detections.truth is None else detections.truth - rest
    filtered, smoothed = (
        None if e is None else e._replace(mean=e.mean - rest) for e in (tracks.filtered, tracks.smoothed)
    )
    assert filtered is not None  # only smoothed may be None
    moved = detections._replace(position=detections.position - rest[:d], truth=truth)
    return replace(tracks, detections=moved, filtered=filtered, smoothed=smoothed), (axes[0], axes[1])


def _time_axis(tracks: Tracks) -> Axis:
    return Axis("time", time_unit(tracks), "t − t₁")


def _thinned(rows: Tensor, most: int) -> Tensor:
    """At most so many rows, evenly spaced."""
    return rows[:: math.ceil(len(rows) / most)] if len(rows) > most else rows


def _plain(values: Tensor) -> list[float | None]:
    """Values with None for NaN, so that lines have gaps."""
    return [None if math.isnan(v) else v for v in values.tolist()]


def _map(tracks: Tracks, axes: Axes) -> Figure:
    """Paths of all targets, or of an evenly spaced sample."""
    detections = tracks.detections
    order, _, lengths = grouped(detections.target)
    count = len(lengths)
    every = math.ceil(len(order) / DRAWN)
    rows = order[detections.target[order] % every == 0]
    rows = rows[:DRAWN]
    target = detections.target[rows]
    gap = torch.nn.functional.pad(target.diff() != 0, (0, 1)).tolist()
    points = zip(_plain(tracks.best.mean[rows, 0]), _plain(tracks.best.mean[rows, 1]), gap, strict=True)
    x: list[float | None] = []
    y: list[float | None] = []
    for a, b, ends in points:
        x += [a, None] if ends else [a]
        y += [b, None] if ends else [b]
    dots = Points("detections", _plain(detections.used[rows, 0]), _plain(detections.used[rows, 1]), "grey", size=3)
    marks: list[Mark] = [dots, *_truth(tracks, rows), Line(_estimate_name(tracks), x, y)]
    shown = len(target.unique())
    which = f"all {count} targets" if shown == count else f"{shown} of {count} targets, every {every}th"
    caption = f"{_estimate_name(tracks).capitalize()} paths and detections of {which}."
    return Figure("tracks", "All tracks", *axes, tuple(marks), caption, wide=True, equal=True)


def _estimate_name(tracks: Tracks) -> str:
    return "filtered" if tracks.smoothed is None else "smoothed"


def _truth(tracks: Tracks, rows: Tensor) -> list[Mark]:
    truth = tracks.detections.truth
    if truth is None:
        return []
    x: list[float | None] = []
    y: list[float | None] = []
    for target in tracks.detections.target[rows].unique().tolist():
        path = truth[rows[tracks.detections.target[rows] == target]]
        x += [*path[:, 0].tolist(), None]
        y += [*path[:, 1].tolist(), None]
    return [Line("truth", x, y, "ink", "dash")]


def _target(tracks: Tracks, axes: Axes, target: int) -> tuple[Text | Table | Figure, ...]:
    rows = (tracks.detections.target == target).nonzero().flatten()
    name = tracks.detections.names[target]
    change = tracks.best.probability[rows].diff(dim=0).abs().sum(-1)
    centre = int(change.argmax()) + 1 if len(change) else 0
    near = rows[max(0, centre - CLOSE) : centre + CLOSE]
    every = f"every {math.ceil(len(rows) / STEPS)}th of " if len(rows) > STEPS else ""
    part = f"{every}{_counted(tracks, rows)}"
    caption = f"{_estimate_name(tracks).capitalize()} path of {name}, {part}, with 95 % ellipses of the position."
    path = _path(tracks, axes, f"path-{target}", f"{name}: path", _thinned(rows, STEPS), caption)
    closer = _around(tracks, axes, near)
    caption = f"The {_counted(tracks, near)} of {name} around the largest change of its mode probabilities."
    close = _path(tracks, closer, f"close-{target}", f"{name}: largest change of modes", near, caption)
    figures = [path, close] if len(rows) > 2 * CLOSE else [path]
    if len(rows) > 1:
        figures.append(_modes(tracks, target, name, rows))
    if not bool(tracks.nis[rows].isnan().all()):
        figures.append(_innovations(tracks, target, name, rows))
    return tuple(figures)


def _counted(tracks: Tracks, rows: Tensor) -> str:
    """Number of rows: "50 detections", or "50 rows" if some have no detection."""
    detected = bool((~tracks.detections.used[rows].isnan()).any(-1).all())
    return counted(len(rows), "detection" if detected else "row")


def _around(tracks: Tracks, axes: Axes, rows: Tensor) -> Axes:
    """Axes with ranges that fit some rows."""
    p = tracks.best.mean[rows, :2]
    p = p[p.isfinite().all(-1)]
    if len(p) == 0:
        return axes
    high, low = p.amax(0), p.amin(0)
    arm = 0.1 * float((high - low).max()) + tracks.levels.sigma
    x, y = (replace(a, range=(float(i) - arm, float(j) + arm)) for a, i, j in zip(axes, low, high, strict=True))
    return x, y


def _path(tracks: Tracks, axes: Axes, name: str, title: str, part: Tensor, caption: str) -> Figure:
    detections, best = tracks.detections, tracks.best
    position = detections.used[part]
    texts = [f"{detections.label[i]}" for i in part.tolist()]
    estimated = part[~best.mean[part, :2].isnan().any(-1)]
    marks: list[Mark] = [
        Outlines("95 % ellipses", _ellipses(tracks, _thinned(estimated, ELLIPSES)), "blue"),
        Points("detections", _plain(position[:, 0]), _plain(position[:, 1]), "grey", "cross-thin-open", texts, size=6),
        *_truth(tracks, part),
        Line(_estimate_name(tracks), _plain(best.mean[part, 0]), _plain(best.mean[part, 1]), text=texts),
    ]
    above = part[(tracks.nis > tracks.nis_high)[part]]
    if len(above):
        at = detections.used[above]
        marks.append(Points("NIS above band", _plain(at[:, 0]), _plain(at[:, 1]), "vermilion", "circle-open"))
    return Figure(name, title, *axes, tuple(marks), caption, equal=True)


def _ellipses(tracks: Tracks, rows: Tensor) -> list[tuple[list[float], list[float]]]:
    """95 % ellipses of positions in the plane of x and y, as polygons."""
    best = tracks.best
    L = torch.linalg.cholesky_ex(best.covariance[rows][:, :2, :2]).L
    angle = torch.linspace(0, 2 * math.pi, CORNERS + 1, dtype=torch.float64)[:-1]
    circle = ELLIPSE_95 * torch.stack((angle.cos(), angle.sin()))
    curves = best.mean[rows, :2].unsqueeze(-1) + L @ circle
    return [(x.tolist(), y.tolist()) for x, y in curves]


def _modes(tracks: Tracks, target: int, name: str, rows: Tensor) -> Figure:
    part = _thinned(rows, STEPS)
    times = (tracks.detections.time[part] - tracks.detections.time[rows[0]]).tolist()
    pi = tracks.best.probability[part]
    marks = tuple(
        Line(mode, times, column.tolist(), colour)
        for mode, column, colour in zip(tracks.settings.modes, pi.unbind(-1), COLOURS, strict=False)
    )
    axis = Axis("mode probability", "1", "πⱼ", range=(-0.02, 1.02))
    caption = f"{_estimate_name(tracks).capitalize()} mode probabilities of {name}; they sum to 1."
    return Figure(f"modes-{target}", f"{name}: mode probabilities", _time_axis(tracks), axis, marks, caption)


def _innovations(tracks: Tracks, target: int, name: str, rows: Tensor) -> Figure:
    part = _thinned(rows, STEPS)
    part = part[~tracks.nis[part].isnan()]
    times = (tracks.detections.time[part] - tracks.detections.time[rows[0]]).tolist()
    inside, degrees = tracks.inside[part], tracks.degrees[part]
    usual = degrees == degrees.mode().values
    # One band for the usual number of coordinates: the bands of the others would be spikes.
    low, high = (float(band[part][usual][0]) for band in (tracks.nis_low, tracks.nis_high))
    marks: list[Mark] = [Ribbon("95 % band", [times[0], times[-1]], [low] * 2, [high] * 2, "grey")]
    for label, side, colour in (("inside", inside, "blue"), ("outside", ~inside, "vermilion")):
        for extra, chosen, symbol in (
            ("", side & usual, "circle"),
            (", fewer coordinates", side & ~usual, "diamond-open"),
        ):
            if bool(chosen.any()):
                at = [t for t, yes in zip(times, chosen.tolist(), strict=True) if yes]
                marks.append(Points(label + extra, at, tracks.nis[part][chosen].tolist(), colour, symbol, size=6))
    axis = Axis("NIS", "1", "eᵀS⁻¹e", scale="log")
    share = share_of(int(inside.sum()), len(part))
    caption = f"NIS of {name}: {share.number} of {share.total} inside the 95 % chi-square band"
    caption += f" (95 % CI {100 * share.low:.0f}–{100 * share.high:.0f} %; expected 95 %)."
    caption += _other_bands(tracks, part[usual], part[~usual])
    return Figure(
        f"nis-{target}", f"{name}: normalised innovations squared", _time_axis(tracks), axis, tuple(marks), caption
    )


def _other_bands(tracks: Tracks, usual: Tensor, others: Tensor) -> str:
    """The bands of innovations with another number of coordinates than usual; empty if there are none."""
    if len(others) == 0:
        return ""
    bands = []
    for degrees in tracks.degrees[others].unique().tolist():
        rows = others[tracks.degrees[others] == degrees]
        low, high = float(tracks.nis_low[rows[0]]), float(tracks.nis_high[rows[0]])
        several = counted(len(rows), "innovation")
        bands.append(f"{several} with {counted(int(degrees), 'coordinate')}, band {low:.2g} to {high:.2g}")
    shown = counted(int(tracks.degrees[usual[0]]), "coordinate")
    return f" The band shown is that of innovations with {shown}. Diamonds: {'; '.join(bands)}."


def _consistency(tracks: Tracks) -> list[Part]:
    """Calibration, consistency over time, and the largest NIS; empty without innovations."""
    if tracks.consistency.total == 0:
        return []
    return [_calibration(tracks), _over_time(tracks), _largest(tracks)]


def _largest(tracks: Tracks) -> Table:
    """Table of the detections whose NIS is above its band, the largest first."""
    detections, axes, unit = tracks.detections, tracks.detections.axes, length_unit(tracks)
    tail = torch.special.gammaincc(tracks.degrees / 2, tracks.nis / 2)
    above = (tracks.nis > tracks.nis_high).nonzero().flatten()
    order = above[tracks.nis[above].argsort(descending=True, stable=True)]
    cells = [
        (detections.names[int(detections.target[i])], moment_text(detections.label[int(i)]),
         *tracks.innovation[i].tolist(), float(tracks.nis[i]), float(tail[i]))
        for i in order[:LISTED]
    ]  # fmt: skip
    columns = (
        Column("target"), Column("time"), *(Column(f"innovation {axis}", unit) for axis in axes), Column("NIS", "1"),
        Column("p-value", "1"),
    )  # fmt: skip
    caption = (
        f"Detections above the 95 % band, the largest first: {counted(len(above), 'detection')}. p-value: probability "
        "of a larger NIS if the filter is consistent."
    )
    return Table("largest", "Largest NIS", columns, tuple(cells), caption, shown=10, stacked=True)


def _calibration(tracks: Tracks) -> Figure:
    """Share of the NIS below each chi-square quantile: on the diagonal if the filter is consistent."""
    measured = ~tracks.nis.isnan()
    level = torch.special.gammainc(tracks.degrees[measured] / 2, tracks.nis[measured] / 2).sort().values
    at = torch.linspace(0, 1, 41, dtype=torch.float64)
    total = max(len(level), 1)
    share = torch.searchsorted(level, at, right=True).double() / total
    half = 1.96 * (at * (1 - at) / total).sqrt()
    places = at.tolist()
    marks = (
        Ribbon(
            "95 % sampling band", places, (at - half).clamp(min=0).tolist(), (at + half).clamp(max=1).tolist(), "grey"
        ),
        Line("consistent filter", places, places, "ink", "dash"),
        Line("innovations", places, share.tolist()),
    )
    x, y = Axis("level of the quantile", "1", "p"), Axis("share of NIS below the quantile", "1")
    caption = (
        f"Share of {len(level)} NIS values below the chi-square quantile of each level p. Above the diagonal the "
        "predicted covariances are too large, below it too small."
    )
    return Figure("calibration", "Calibration of the NIS", x, y, marks, caption)


def _over_time(tracks: Tracks) -> Figure:
    """Share of the NIS inside the band over time, all targets together."""
    measured = (~tracks.nis.isnan()).nonzero().flatten()
    order = measured[tracks.detections.time[measured].argsort()]
    parts = [p for p in order.chunk(min(24, max(1, len(order) // 20))) if len(p)]
    shares = [share_of(int(tracks.inside[p].sum()), len(p)) for p in parts]
    times = [float(tracks.detections.time[p].mean()) for p in parts]
    values = [100 * s.value for s in shares]
    marks: list[Mark] = [
        Line("consistent filter", [times[0], times[-1]], [95.0, 95.0], "ink", "dash"),
        Points("inside", times, values, low=[100 * s.low for s in shares], high=[100 * s.high for s in shares]),
    ]
    axis = Axis("share of NIS inside the 95 % band", "%")
    caption = (
        f"Each point: share of about {len(parts[0])} consecutive NIS values inside their 95 % band, with its 95 % CI."
    )
    return Figure("inside", "Consistency over time", _time_axis(tracks), axis, tuple(marks), caption)


def _facts(tracks: Tracks) -> Facts:
    levels, s = tracks.levels, tracks.settings
    d = len(tracks.detections.axes)
    unit, time = length_unit(tracks), time_unit(tracks)
    density = f"{unit}²/{time}³"
    rows = {
        "detections": f"standard deviation {_deviations(tracks)} {unit} in each of {d} coordinates",
        f"mode {s.modes[0]}": f"process noise (on the velocity) with spectral density {levels.noise:.4g} {density}",
    }
    if s.model == "turn":
        rate = math.degrees(levels.turn_rate)
        rows["modes left and right"] = f"process noise as in the first mode, turn rate {rate:.4g} degrees per {time}"
    elif s.model in ("cv", "cv3"):
        if s.model == "cv3":
            rows["mode moderate"] = (
                f"process noise (on the velocity) with spectral density {levels.moderate:.4g} {density}"
            )
        noise = f"process noise (on the velocity) with spectral density {levels.manoeuvre:.4g} {density}"
        rows[f"mode {s.modes[-1]}"] = noise
    else:
        jerk = levels.manoeuvre / levels.step**2
        noise = f"process noise (on the acceleration) with spectral density {jerk:.4g} {unit}²/{time}⁵"
        rows[f"mode {s.modes[1]}"] = noise
    lasts = ", ".join(f"{mode} {t:.4g} {time}" for mode, t in zip(s.modes, levels.durations, strict=True))
    rows["mean durations"] = lasts
    rows["step"] = f"median {levels.step:.4g} {time}"
    if levels.jitter:
        rows["times of detections"] = f"standard deviation {levels.jitter:.4g} {time}, along the velocity"
        rows["late detections"] = (
            f"{100 * levels.late:.3g} %, standard deviations {levels.late_jitter:.4g} {time} and "
            f"{levels.late_sigma:.4g} {unit}"
        )
    if s.fit:
        rows["fit"] = f"maximum likelihood, {'converged' if tracks.converged else 'not converged'}"
    rows["log likelihood"] = f"{tracks.log_likelihood:.6g} nats"
    return Facts(rows)


def _deviations(tracks: Tracks) -> str:
    """Standard deviation of a detection, or one for each coordinate."""
    sigmas = [tracks.levels.sigma * ratio for ratio in tracks.levels.ratios]
    text = f"{sigmas[0]:.4g}" if len(set(sigmas)) == 1 else ", ".join(f"{sigma:.4g}" for sigma in sigmas)
    by_row = tracks.detections.sigma is not None and tracks.settings.sigma is None
    return f"as in the input, median {text}" if by_row else text


def _methods(filter_: str) -> tuple[str, ...]:
    name, source = FILTERS[filter_]
    return (
        "Each mode is a linear Gaussian system in continuous time; modes follow a Markov chain. The transition "
        f"between two detections is computed exactly for the elapsed time. The filter is the {name} [{source}].",
        "Tracks are initialised at the first detection with a diffuse position prior and the velocity prior "
        "N(0, (2 v₉₅)²); v₉₅ is the 95 % quantile of the speed between successive detections. Missing coordinates are "
        "left out of the update.",
        "NIS, the normalised innovation squared, is eᵀS⁻¹e for an innovation e with predicted covariance S; for the "
        "correct model of one mode it has a chi-square distribution with as many degrees of freedom as e has "
        "coordinates [barshalom01]. With several modes, whose prediction is a mixture, the NIS is the sum of squares "
        "of standard normal scores, each coordinate given the one before it [rosenblatt52], which has this "
        "distribution, too, and equals eᵀS⁻¹e for one mode. The first detection of a coordinate has no innovation.",
        "If detections deviate more along their path than across it, their times are inaccurate: R = σ²I + τ²vvᵀ with "
        "the jitter τ of times and the velocity v given the detections before. A share of the detections is late, with "
        "a larger τ and σ. Rows that repeat an earlier position of a target that moves are not used.",
        "Outliers: the filter runs forward and backward in time with a model in which every detection may be unrelated "
        "to the target. Detections that are unrelated with a probability above 1/2 in both directions are left out, "
        "unless these are two or more, and at least 30 %, of the target's.",
        "Noise levels that are not given are estimated from triples of detections of one target. The deviation of one "
        "detection from the line through the other two has a variance that is linear in two unknowns: the variance of "
        "the detection noise, and the process noise. Triples of successive detections and triples that span nine rows "
        "give two equations for them.",
    )  # fmt: skip
