"""The built-in scenario: three aircraft with straight legs and turns, detected by a radar.

    straight 40 s, turn 30 s at 3 degrees/s, straight 40 s, turn 30 s the other way, straight 60 s

The radar has a period of about 4 s, an error of 100 m (standard deviation) in each coordinate, and misses 5 % of the
coordinates. 3 degrees/s is the standard turn rate of aircraft.

Read next: run_tracking.py.
"""

import math

import torch

from .detections import Detections
from .settings import TrackingSettings

SPEED, SIGMA, PERIOD, MISSED = 90.0, 100.0, 4.0, 0.05  # m/s, m, s, probability of a missed coordinate
TURN = 3.0  # degrees per second
LEGS = ((40.0, 0), (30.0, 1), (40.0, 0), (30.0, -1), (60.0, 0))  # duration in seconds, direction of the turn
AIRCRAFT = ("A1", "B2", "C3")
NOISE = 1.0  # process noise of the filter, m²/s³; the simulated flights have none


def settings_of(model: str) -> TrackingSettings:
    """Settings of a filter for the scenario: radar noise, process noise, and the turn rate of the model `turn`."""
    return TrackingSettings(model=model, sigma=SIGMA, noise=NOISE, turn_rate=TURN if model == "turn" else None)


def flights(seed: int) -> Detections:
    """Detections of three aircraft, with their true positions and velocities."""
    generator = torch.Generator().manual_seed(seed)
    truths, times, positions = [], [], []
    for i in range(len(AIRCRAFT)):
        count = int(sum(length for length, _ in LEGS) / PERIOD)
        jitter = 0.5 * torch.rand(count, generator=generator, dtype=torch.float64)
        t = PERIOD * torch.arange(count, dtype=torch.float64) + jitter
        heading = 2 * math.pi * float(torch.rand(1, generator=generator)) + 0.5
        truth = flown(t, heading, -1 if i % 2 else 1)
        truth[:, :2] += 2000 * torch.tensor([math.cos(2.1 * i), math.sin(2.1 * i)], dtype=torch.float64)
        detected = truth[:, :2] + SIGMA * torch.randn(count, 2, generator=generator, dtype=torch.float64)
        missed = torch.rand(count, 2, generator=generator, dtype=torch.float64) < MISSED
        truths.append(truth)
        times.append(t)
        positions.append(detected.masked_fill(missed, math.nan))
    time = torch.cat(times)
    order = time.argsort()
    target = torch.arange(len(AIRCRAFT)).repeat_interleave(torch.tensor([len(t) for t in times]))
    label = [round(at, 3) for at in time[order].tolist()]
    position, truth = torch.cat(positions)[order], torch.cat(truths)[order]
    return Detections(label, time[order], target[order], list(AIRCRAFT), position, "s", [], truth, "m")


def flown(t: torch.Tensor, heading: float, way: int) -> torch.Tensor:
    """True positions and velocities at times t, [n, 4], in closed form."""
    begins, angles, points = [0.0], [heading], [torch.zeros(2, dtype=torch.float64)]
    for length, turn in LEGS:
        rate = way * turn * math.radians(TURN)
        points.append(points[-1] + moved(torch.tensor(length, dtype=torch.float64), angles[-1], rate)[..., :2])
        begins.append(begins[-1] + length)
        angles.append(angles[-1] + rate * length)
    states = torch.empty(len(t), 4, dtype=torch.float64)
    for i, (_, turn) in enumerate(LEGS):
        on = (t >= begins[i]) & ((t < begins[i + 1]) | (i == len(LEGS) - 1))
        states[on] = moved(t[on] - begins[i], angles[i], way * turn * math.radians(TURN))
        states[on, :2] += points[i]
    return states


def moved(u: torch.Tensor, heading: float, rate: float) -> torch.Tensor:
    """Position and velocity after a time u at a constant turn rate."""
    angle = heading + rate * u
    if rate == 0:
        x, y = SPEED * u * math.cos(heading), SPEED * u * math.sin(heading)
    else:
        x = SPEED / rate * (angle.sin() - math.sin(heading))
        y = SPEED / rate * (math.cos(heading) - angle.cos())
    return torch.stack((x, y, SPEED * angle.cos(), SPEED * angle.sin()), -1)
