"""Quantities of tracks with their confidence intervals, and verdicts on consistency: records without words.

    nis               share of the NIS inside the 95 % chi-square band, Wilson's interval       expected: 95 %
    innovation        by coordinate: share inside the central 95 % interval of its prediction   expected: 95 %
    innovation_rms    by coordinate: root mean square
    mode              mean probability of each mode
    levels            noise levels that the filter used
    errors            root mean square errors and NEES, if the truth is known                   expected of NEES: 1

    consistent        95 % lies in the interval of the share, or differs from the share by at most 2 percentage points
    inconsistent      otherwise

Read next: records.py (Tracks), ../reporting/tracks_terminal.py (the table).
"""

import math

from ..special.proportions import NORMAL_QUANTILE, share_of
from .records import LEVEL, TrackQuantity, Tracks, consistency_verdict


def track_quantities(tracks: Tracks) -> list[TrackQuantity]:
    """The quantities of tracks, those with verdicts first."""
    return [*_shares(tracks), *_errors(tracks), *_rms(tracks), *_modes(tracks), *_levels(tracks)]


def _shares(tracks: Tracks) -> list[TrackQuantity]:
    shares = [("nis", "", tracks.consistency)]
    for axis, column in zip(tracks.detections.axes, tracks.score.abs().unbind(-1), strict=True):
        inside, total = int((column <= NORMAL_QUANTILE).sum()), int((~column.isnan()).sum())
        shares.append(("innovation", axis, share_of(inside, total)))
    return [
        TrackQuantity(name, part, share.value, share.low, share.high, share.total, LEVEL, consistency_verdict(share))
        for name, part, share in shares
        if share.total
    ]


def _rms(tracks: Tracks) -> list[TrackQuantity]:
    rows = []
    for i, axis in enumerate(tracks.detections.axes):
        innovation = tracks.innovation[:, i]
        total = int((~innovation.isnan()).sum())
        if total:
            value = math.sqrt(float(innovation.square().nanmean()))
            rows.append(TrackQuantity("innovation_rms", axis, value, total=total))
    return rows


def _modes(tracks: Tracks) -> list[TrackQuantity]:
    means = tracks.best.probability.mean(0).tolist()
    total = len(tracks.detections.time)
    return [TrackQuantity("mode", name, p, total=total) for name, p in zip(tracks.settings.modes, means, strict=True)]


def _levels(tracks: Tracks) -> list[TrackQuantity]:
    levels, model = tracks.levels, tracks.settings.model
    parts = [(axis, ratio * levels.sigma) for axis, ratio in zip(tracks.detections.axes, levels.ratios, strict=True)]
    parts = parts if len(set(levels.ratios)) > 1 else [("", levels.sigma)]
    rows = [*(TrackQuantity("sigma", axis, value) for axis, value in parts), TrackQuantity("noise", "", levels.noise)]
    if levels.jitter:
        rows += [TrackQuantity("jitter", "", levels.jitter), TrackQuantity("late", "", levels.late)]
        rows += [TrackQuantity("jitter", "late", levels.late_jitter), TrackQuantity("sigma", "late", levels.late_sigma)]
    if model == "turn":
        return [*rows, TrackQuantity("turn_rate", "", math.degrees(levels.turn_rate))]
    rows += [TrackQuantity("moderate", "", levels.moderate)] if model == "cv3" else []
    return [*rows, TrackQuantity("manoeuvre", "", levels.manoeuvre)]


def _errors(tracks: Tracks) -> list[TrackQuantity]:
    errors, position, rows = tracks.errors, tracks.detections.position, []
    for kind, estimate in (("filtered", tracks.filtered), ("smoothed", tracks.smoothed)):
        if estimate is not None and f"{kind} position" in errors:
            known = ~estimate.mean.isnan()
            located, complete = int(known[:, : position.shape[-1]].any(-1).sum()), int(known.all(-1).sum())
            rows.append(TrackQuantity("position_error", kind, errors[f"{kind} position"], total=located))
            rows.append(TrackQuantity("nees", kind, errors[f"{kind} NEES"], total=complete, expected=1.0))
    if rows:
        detected = int((~position.isnan()).any(-1).sum())
        rows.append(TrackQuantity("position_error", "detections", errors["error of detections"], total=detected))
    return rows
