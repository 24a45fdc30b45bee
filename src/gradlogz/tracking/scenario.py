"""The built-in scenario: aircraft that fly straight and turn, seen by a radar that now and then sees nothing.

    straight for a while, a turn of 3 degrees a second, straight again, a turn the other way, straight to the end

A radar looks every 4 s or so and errs by 100 m in each coordinate. A turn of 3 degrees a second is the standard one of
aircraft.

Read next: run_tracking.py.
"""

import math

import torch

from .detections import Detections
from .settings import TrackingSettings

SPEED, SIGMA, PERIOD, MISSED = 90.0, 100.0, 4.0, 0.05  # m/s, m, s, and how often a coordinate is not seen
TURN = 3.0  # degrees a second
LEGS = ((40.0, 0), (30.0, 1), (40.0, 0), (30.0, -1), (60.0, 0))  # seconds and which way
AIRCRAFT = ("A1", "B2", "C3")
NOISE = 1.0  # of the filter, m² / s³: aircraft here fly without any


def settings_of(model: str) -> TrackingSettings:
    """What a filter of the scenario is told: the radar, and the turns if it has any."""
    return TrackingSettings(model=model, sigma=SIGMA, noise=NOISE, turn_rate=TURN if model == "turn" else None)


def flights(seed: int) -> Detections:
    """Three aircraft, with the truth behind what is seen of them: positions, then velocities."""
    generator = torch.Generator().manual_seed(seed)
    truths, times, positions = [], [], []
    for i in range(len(AIRCRAFT)):
        count = int(sum(length for length, _ in LEGS) / PERIOD)
        jitter = 0.5 * torch.rand(count, generator=generator, dtype=torch.float64)
        t = PERIOD * torch.arange(count, dtype=torch.float64) + jitter
        heading = 2 * math.pi * float(torch.rand(1, generator=generator)) + 0.5
        truth = flown(t, heading, -1 if i % 2 else 1)
        truth[:, :2] += 2000 * torch.tensor([math.cos(2.1 * i), math.sin(2.1 * i)], dtype=torch.float64)
        seen = truth[:, :2] + SIGMA * torch.randn(count, 2, generator=generator, dtype=torch.float64)
        lost = torch.rand(count, 2, generator=generator, dtype=torch.float64) < MISSED
        truths.append(truth)
        times.append(t)
        positions.append(seen.masked_fill(lost, math.nan))
    time = torch.cat(times)
    order = time.argsort()
    target = torch.arange(len(AIRCRAFT)).repeat_interleave(torch.tensor([len(t) for t in times]))
    label = [round(at, 3) for at in time[order].tolist()]
    seen, truth = torch.cat(positions)[order], torch.cat(truths)[order]
    return Detections(label, time[order], target[order], list(AIRCRAFT), seen, "s", [], truth)


def flown(t: torch.Tensor, heading: float, way: int) -> torch.Tensor:
    """Position and velocity at given times, along the legs in closed form."""
    begins, angles, points = [0.0], [heading], [torch.zeros(2, dtype=torch.float64)]
    for length, turn in LEGS:
        rate = way * turn * math.radians(TURN)
        points.append(points[-1] + moved(torch.tensor(length, dtype=torch.float64), angles[-1], rate)[..., :2])
        begins.append(begins[-1] + length)
        angles.append(angles[-1] + rate * length)
    found = torch.empty(len(t), 4, dtype=torch.float64)
    for i, (_, turn) in enumerate(LEGS):
        on = (t >= begins[i]) & ((t < begins[i + 1]) | (i == len(LEGS) - 1))
        found[on] = moved(t[on] - begins[i], angles[i], way * turn * math.radians(TURN))
        found[on, :2] += points[i]
    return found


def moved(u: torch.Tensor, heading: float, rate: float) -> torch.Tensor:
    """Where one is, and how fast, after a time u at a constant rate of turning."""
    angle = heading + rate * u
    if rate == 0:
        x, y = SPEED * u * math.cos(heading), SPEED * u * math.sin(heading)
    else:
        x = SPEED / rate * (angle.sin() - math.sin(heading))
        y = SPEED / rate * (math.cos(heading) - angle.cos())
    return torch.stack((x, y, SPEED * angle.cos(), SPEED * angle.sin()), -1)
