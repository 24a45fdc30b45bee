"""Times with a jitter move detections along the velocity; rows that repeat a position are no detections."""

import json
import math

import pytest
import torch

from gradlogz.tracking import track
from gradlogz.tracking.detections import read
from gradlogz.tracking.noise_levels import levels_of
from gradlogz.tracking.settings import TrackingSettings
from gradlogz.tracking.stale_rows import stale_rows
from gradlogz.tracking.tracking_model import model_of, noise_of, velocities_of
from support.scales import close

SIGMA, JITTER, LATE_JITTER, LATE = 2.0, 0.2, 1.5, 0.1
MODES = {"cv": 2, "cv3": 3, "turn": 3}


def flights(targets=40, steps=60, late=LATE, seed=0, jitter=JITTER):
    """Straight flights at 200 m/s every 10 s, whose times have a jitter, and a larger one in a share of the rows."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    angle = 2 * math.pi * torch.rand(targets, 1, 1, generator=g, dtype=torch.float64)
    way = 200 * torch.cat((angle.cos(), angle.sin()), -1)
    time = 10.0 * torch.arange(steps, dtype=torch.float64)
    slow = torch.rand(targets, steps, generator=g, dtype=torch.float64) < late
    error = torch.where(slow, LATE_JITTER if late else 0.0, jitter) * normal(targets, steps)
    place = (time + error).unsqueeze(-1) * way + SIGMA * normal(targets, steps, 2)
    names = [f"T{i}" for i in range(targets) for _ in range(steps)]
    x, y = place.flatten(0, 1).unbind(-1)
    return {"time": time.repeat(targets).tolist(), "target": names, "x": x.tolist(), "y": y.tolist()}


def test_the_jitter_is_estimated_and_only_where_there_is_one():
    settings = TrackingSettings()
    levels = levels_of(read(flights(late=0)), settings)
    assert abs(levels.jitter / JITTER - 1) < 0.1
    assert abs(levels.sigma / SIGMA - 1) < 0.1
    assert levels_of(read(flights(late=0, jitter=0)), settings).jitter == 0.0
    assert levels_of(read(flights()), TrackingSettings(jitter=0.0)).late == 0.0
    assert levels_of(read(flights()), TrackingSettings(sigma=50.0)).jitter == 0.0  # contains all errors
    assert levels_of(read(flights(2, 20)), settings).jitter == 0.0  # too few to tell


@pytest.mark.parametrize("model", ["cv", "cv3"])
def test_a_fit_finds_the_levels_and_other_flights_are_consistent_with_them(model):
    found = track(flights(), model=model, fit=True)
    levels = found.levels
    assert found.converged
    assert abs(levels.sigma / SIGMA - 1) < 0.1
    assert abs(levels.jitter / JITTER - 1) < 0.1
    assert abs(levels.late - LATE) < 0.03
    assert abs(levels.late_jitter / LATE_JITTER - 1) < 0.25
    others = track(flights(seed=1), model=model, levels=levels)
    assert abs(others.consistency.value - 0.95) < 0.02
    without = track(flights(seed=1), model=model, jitter=0.0)
    assert others.log_score.nanmean() > without.log_score.nanmean() + 1


def test_the_noise_of_a_row_is_its_definition():
    rows = read(flights(3, 12))
    levels = levels_of(rows, TrackingSettings(jitter=JITTER))
    v = velocities_of(rows, TrackingSettings(), levels)
    noise = noise_of(rows, levels, v)
    for i in (0, 7, 20):
        for covariance, sigma, jitter in (
            (noise.ordinary, levels.sigma, levels.jitter),
            (noise.late, levels.late_sigma, levels.late_jitter),
        ):
            expected = [
                [sigma**2 * (a == b) + jitter**2 * float(v[i, a] * v[i, b]) for b in range(2)] for a in range(2)
            ]
            close(covariance[i], torch.tensor(expected, dtype=torch.float64), scale=float(covariance[i].abs().max()))
    assert (v.norm(dim=-1) - 200).abs().max() < 60
    assert model_of(levels, TrackingSettings(), 2).modes == 2


def test_later_detections_change_nothing_but_the_first_two_rows():
    rows = flights(1, 30)
    levels = levels_of(read(flights()), TrackingSettings())
    whole = track(rows, levels=levels, outliers=0)
    part = track({name: column[:20] for name, column in rows.items()}, levels=levels, outliers=0)
    for field in ("nis", "log_score"):
        close(getattr(whole, field)[1:20], getattr(part, field)[1:], scale=1e3)


@pytest.mark.parametrize("model", ["cv", "turn"])
def test_smoothed_and_filtered_estimates_have_one_probability_for_each_motion(model):
    found = track(flights(4, 20), model=model, smooth=True, jitter=0.2)
    for estimate in (found.filtered, found.smoothed):
        assert estimate.probability.shape == (80, MODES[model])
        close(estimate.probability.sum(-1), torch.ones(80, dtype=torch.float64), scale=10.0)
    assert found.smoothed.deviation[5, 0] < found.filtered.deviation[5, 0]


def test_levels_are_read_from_the_results_of_an_earlier_run(tmp_path):
    from gradlogz.reporting.tracks_page import data_of

    earlier = track(flights(5, 30))
    (tmp_path / "a.json").write_text(json.dumps(data_of(earlier)))
    again = track(flights(5, 30, seed=2), levels=tmp_path / "a.json")
    assert again.levels == earlier.levels
    assert "--levels" in again.command


def test_a_single_detection_is_no_outlier():
    rows = flights(10, 40)
    for name, cell in (("time", 5.0), ("target", "single"), ("x", 3e4), ("y", 1e4)):
        rows[name].append(cell)
    found = track(rows)
    assert found.levels.jitter > 0
    assert not found.detections.outlying[-1]


# Stale rows ----------------------------------------------------------------------------------------------------------


def repeated(x, t=None):
    return read({"time": t or list(range(len(x))), "x": x, "y": [0.0] * len(x)})


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        ([0.0, 10, 20, 20, 20, 50, 60], [3, 4]),  # repeats while the target moves on
        ([0.0, 10, 20, 30, 30, 30], [4, 5]),  # at the end
        ([0.0, 10, 20, 20, 20, 20, 20, 21, 22], []),  # a stop
        ([5.0, 5, 5, 5], []),  # never moves
        ([0.0, 1, 1, 2, 2, 3, 3], []),  # slower than the noise
        ([0.0, 10, None, 10, 30, 40], [3]),  # a gap between them
    ],
)
def test_a_row_is_stale_if_it_repeats_a_position_of_a_moving_target(x, expected):
    assert stale_rows(repeated(x), 1.0).nonzero().flatten().tolist() == expected


def test_another_target_at_the_same_place_is_not_stale():
    rows = read(
        {"time": [0, 1, 2, 0, 1, 2], "target": list("aaabbb"), "x": [0.0, 50, 100, 100, 150, 200], "y": [0.0] * 6}
    )
    assert not stale_rows(rows, 1.0).any()


def test_stale_rows_are_not_used():
    rows = flights(10, 40, late=0)
    for name in "xy":
        rows[name][25] = rows[name][26] = rows[name][24]
    found = track(rows)
    assert found.detections.stale.nonzero().flatten().tolist() == [25, 26]
    assert found.nis[25:27].isnan().all()
    rows["x"][25:27] = rows["y"][25:27] = [None, None]
    missing = track(rows)
    close(found.filtered.mean[30], missing.filtered.mean[30], scale=1e6)
