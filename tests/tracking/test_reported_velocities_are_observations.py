"""Groundspeed and track are observations of the velocity, with `sigma_velocity`."""

import math

import pytest
import torch

import gradlogz
from gradlogz import Series, imm
from gradlogz.filters import SwitchingModel
from gradlogz.tracking.detections import read
from gradlogz.tracking.projection import LocalPlane
from gradlogz.tracking.scenario import flights
from gradlogz.tracking.tracking_model import model_of, prior_of

F64 = torch.float64
KNOT = 1852 / 3600
LEVELS = {"sigma": 100.0, "noise": 1.0, "turn_rate": 3.0, "outliers": 0.0}


def reported(seed=0, *, missing=()):
    """Columns of the scenario with true velocities as groundspeed and track, and the truth."""
    rows = flights(seed)
    v = rows.truth[:, 2:]
    speed, track = v.norm(dim=-1) / KNOT, torch.atan2(v[:, 0], v[:, 1]).rad2deg()
    speed[list(missing)] = math.nan
    columns = {
        "time_s": rows.time.tolist(),
        "target": [rows.names[i] for i in rows.target.tolist()],
        "x_m": rows.position[:, 0].tolist(),
        "y_m": rows.position[:, 1].tolist(),
        "gs [kt]": speed.tolist(),
        "course": track.tolist(),
    }
    return columns, rows.truth


def test_the_filter_is_imm_with_four_observations():
    columns, _ = reported(missing=(4, 7))
    own = [i for i, who in enumerate(columns["target"]) if who == "A1"]
    single = {name: [cells[i] for i in own] for name, cells in columns.items()}
    tracks = gradlogz.track(single, model="turn", sigma_velocity=2.0, **LEVELS)
    rows, levels = tracks.detections, tracks.levels
    motion = model_of(levels, tracks.settings, 2)
    C = torch.eye(4, dtype=F64)[[0, 2, 1, 3]]  # x, y, vx, vy of x, vx, y, vy
    R = torch.tensor([1e4, 1e4, 4.0, 4.0], dtype=F64).diag()
    model = SwitchingModel(motion.transition, motion.F, motion.Q, C.expand(3, 4, 4), R.expand(3, 4, 4))
    first = (~rows.position.isnan()).long().argmax(0)
    origin = rows.position.gather(0, first[None])[0]
    y = torch.cat((rows.position - origin, rows.velocity), -1)
    y[y[:, :2].isnan().any(-1), 2:] = math.nan
    dt = rows.time.diff(prepend=rows.time[:1])
    filtered = imm(model, Series(y, times=dt.cumsum(0)), prior_of(levels, motion, 2))
    scale = float(filtered.mean.abs().max())
    wanted = filtered.mean[:, [0, 2, 1, 3]] + torch.cat((origin, torch.zeros(2, dtype=F64)))
    known = ~tracks.filtered.mean.isnan()
    assert known[1:].all()
    torch.testing.assert_close(tracks.filtered.mean[known], wanted[known], rtol=0, atol=1e-10 * scale)
    assert tracks.innovation.shape == (len(rows.time), 2)
    complete = ~y.isnan().any(-1) & ~tracks.nis.isnan()
    assert complete.any()
    assert tracks.degrees[complete].eq(4).all()


@pytest.mark.parametrize("model", ["cv", "cv3", "cv-ca", "turn"])
@pytest.mark.parametrize("smooth", [False, True], ids=["filtered", "smoothed"])
def test_velocities_bring_the_estimates_nearer_to_the_truth(model, smooth):
    columns, truth = reported()
    levels = {"sigma": 100.0, "smooth": smooth, "model": model}
    plain = gradlogz.track(columns, **levels)
    aided = gradlogz.track(columns, sigma_velocity=2.0, **levels)

    def error(tracks):
        return (tracks.best.mean - truth).square().nanmean(0)

    assert (error(aided)[2:] < error(plain)[2:] / 4).all()
    assert (error(aided)[:2] < error(plain)[:2]).all()
    assert plain.detections.velocity is None
    assert plain.detections.unused == ("gs [kt]", "course")


def test_velocities_are_used_beside_inaccurate_times_and_of_rows_that_are_used():
    columns, _ = reported(2)
    columns["x_m"][20] += 50_000.0
    tracks = gradlogz.track(columns, sigma=30.0, jitter=0.5, sigma_velocity=2.0)
    assert tracks.detections.outlying[20]
    velocity = tracks.detections.used_velocity
    assert velocity[20].isnan().all()
    undetected = tracks.detections.position.isnan().any(-1)
    assert undetected.any()
    assert velocity[undetected].isnan().all()
    assert velocity[~undetected & ~tracks.detections.outlying].isfinite().all()


def test_courses_are_relative_to_the_north_of_their_place():
    """Against the differences of projected positions along the course."""
    plane = LocalPlane(47.0, 8.0)
    latitude = torch.tensor([47.0, 52.0, 44.0], dtype=F64)
    longitude = torch.tensor([8.0, 15.0, 1.0], dtype=F64)
    ahead = 1e-5  # degrees
    moved = plane.project(latitude + ahead, longitude) - plane.project(latitude, longitude)
    courses = plane.turned(torch.tensor([[0.0, 1.0]], dtype=F64).expand(3, 2), plane.project(latitude, longitude))
    north = moved / moved.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(courses / courses.norm(dim=-1, keepdim=True), north, rtol=0, atol=1e-8)
    torch.testing.assert_close(courses[0], torch.tensor([0.0, 1.0], dtype=F64), rtol=0, atol=1e-6)


def test_a_flight_in_degrees_has_the_velocity_that_it_reports():
    time = torch.arange(0.0, 200.0, 10.0, dtype=F64)
    latitude, longitude = 52.0 + 1e-3 * time, torch.full_like(time, 15.0)
    columns = {
        "timestamp": [10.0 * i for i in range(40)] + time.tolist(),
        "icao24": ["still"] * 40 + ["north"] * 20,
        "latitude": [47.0] * 40 + latitude.tolist(),
        "longitude": [8.0] * 40 + longitude.tolist(),
        "groundspeed": [0.0] * 40 + [111.26 / KNOT] * 20,  # a degree of latitude at 52 degrees is 111.26 km
        "track": [0.0] * 60,
    }
    units = {"groundspeed": "groundspeed:kt", "time": "timestamp:s"}
    rows = read(columns, columns=units, with_velocity=True)
    flown = rows.position[40:].diff(dim=0) / 10
    torch.testing.assert_close(rows.velocity[40:-1], flown, rtol=0, atol=0.05)
    assert float(flown[:, 0].abs().mean()) > 5  # the plane's y axis is not north there
