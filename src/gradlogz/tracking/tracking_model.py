"""The switching model of a target with given noise levels, its prior, and the noise of every detection.

    x_t                  position and velocity, by the mode of the motion; modes switch in continuous time
    y_t = p_t + noise    covariance R_t = sigma² I + jitter² v v^T                        v: velocity of the target
    late detections      with probability `late`: late_sigma and late_jitter in place of sigma and jitter
    reported velocities  further observations of the filter, if they are used; all levels are those of the positions

An inaccurate time of a detection moves it along the velocity. v is that of a filter of the rows before (for the first
two rows, that of the second), so that R_t depends on no later detection. Late detections are modes of their own, as
outliers are (../filters/gaussian/clutter.py): one chain for the motion, and independent draws for the detections.

Read next: noise_levels.py (the levels), run_tracking.py (the filter), outliers.py.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import torch

from .._typing import Float, Tensor
from ..filters.gaussian.clutter import prior_with_clutter, with_clutter
from ..filters.gaussian.switching import imm
from ..filters.models.linear_motion import constant_acceleration, constant_velocity, coordinated_turn
from ..filters.models.switching_model import Generator, SwitchingModel
from ..filters.prior_and_series import Prior
from .detections import Detections
from .noise_levels import DIFFUSE, Levels
from .settings import TrackingSettings
from .target_batches import ROWS, TargetBatch, batches, discretized


def model_of(levels: Levels, settings: TrackingSettings, dimensions: int) -> SwitchingModel:
    """Switching model in continuous time, with the modes of the settings."""
    r = levels.sigma**2
    numbers: dict[str, Any] = {"observation_variance": r, "dtype": torch.float64}
    straight = constant_velocity(dimensions, spectral_density=levels.noise, **numbers)
    components = None
    if settings.model in ("cv", "cv3"):
        densities = [levels.manoeuvre] if settings.model == "cv" else [levels.moderate, levels.manoeuvre]
        others = [constant_velocity(dimensions, spectral_density=density, **numbers) for density in densities]
    elif settings.model == "turn":
        noise = {"spectral_density": levels.noise, **numbers}
        others = [coordinated_turn(dimensions, rate=w * levels.turn_rate, **noise) for w in (1, -1)]
    else:
        jerk = levels.manoeuvre / levels.step**2  # moves a velocity as much in one step as the manoeuvre noise does
        others = [constant_acceleration(dimensions, spectral_density=jerk, **numbers)]
        components = [[i for i in range(3 * dimensions) if i % 3 < 2], range(3 * dimensions)]
    k = 1 + len(others)
    rate = torch.zeros(k, k, dtype=torch.float64)
    durations = torch.tensor(levels.durations, dtype=torch.float64)
    rate[0, 1:] = 1 / (durations[0] * (k - 1))
    rate[1:, 0] = 1 / durations[1:]
    rate -= torch.diag_embed(rate.sum(-1))
    model = SwitchingModel.of([straight, *others], transition=Generator(rate), components=components)
    ratios = torch.tensor(levels.ratios, dtype=torch.float64)
    return dataclasses.replace(model, R=model.R * ratios.outer(ratios))


def diffuse_deviation(levels: Levels) -> float:
    """Standard deviation of the diffuse prior of a position."""
    return DIFFUSE * math.hypot(levels.sigma * max(levels.ratios), levels.jitter * levels.speed)


def prior_of(levels: Levels, model: SwitchingModel, dimensions: int) -> Prior:
    """Diffuse prior before the first detection, relative to its position: velocity N(0, (2 v₉₅)²).

    Modes have their stationary probabilities.
    """
    s = model.state_size // dimensions
    position = diffuse_deviation(levels)
    acceleration = levels.speed / levels.step / 10
    deviations = torch.tensor([position, 2 * levels.speed, acceleration][:s], dtype=torch.float64).repeat(dimensions)
    share = torch.tensor(levels.durations, dtype=torch.float64)
    share[1:] /= len(share) - 1
    mean = torch.zeros(model.state_size, dtype=torch.float64)
    return Prior(mean, deviations.square().diag(), (share / share.sum()).log())


# Noise of detections -------------------------------------------------------------------------------------------------


class DetectionNoise(NamedTuple):
    """Covariances of the errors of all rows, or of those of a batch.

    Attributes:
        ordinary: covariances of ordinary detections.
        late: covariances of late detections; None if there are none.
        share: probability that a detection is late.
    """

    ordinary: Float[Tensor, "*n d d"]
    late: Float[Tensor, "*n d d"] | None
    share: float


def velocities_of(detections: Detections, settings: TrackingSettings, levels: Levels) -> Float[Tensor, "n d"] | None:
    """Velocity of each row given the rows before it; None if times have no jitter."""
    if not levels.jitter:
        return None
    d = detections.position.shape[-1]
    isotropic = levels._replace(sigma=math.hypot(levels.sigma, levels.jitter * levels.speed), jitter=0.0)
    model = dataclasses.replace(model_of(isotropic, settings, d), validate=False)
    prior = prior_of(isotropic, model, d)
    velocities = torch.empty_like(detections.position)
    for batch in batches(detections, ROWS):
        mean = imm(discretized(model, batch.dt), batch.observations, prior, fields=("mean",)).mean
        v = mean[..., 1 :: mean.shape[-1] // d]
        known = (batch.counts >= 2).all(-1)
        first = v.gather(1, known.long().argmax(1)[:, None, None].expand(-1, 1, d))
        first = first.where(known.any(1)[:, None, None], 0.0)
        v = torch.where(known.unsqueeze(-1), v, first)
        v = torch.cat((first, v[:, :-1]), 1)
        velocities[batch.rows[batch.inside]] = v[batch.inside]
    return velocities


def noise_of(detections: Detections, levels: Levels, velocity: Float[Tensor, "n d"] | None) -> DetectionNoise | None:
    """Covariances of all rows; None if each is that of the model."""
    if velocity is None and detections.sigma is None:
        return None
    ratios = torch.tensor(levels.ratios, dtype=torch.float64)
    sigma = levels.sigma * ratios.expand_as(detections.position) if detections.sigma is None else detections.sigma
    if velocity is None:
        return DetectionNoise(sigma.square().diag_embed(), None, 0.0)
    squared = velocity.unsqueeze(-1) * velocity.unsqueeze(-2)
    ordinary = sigma.square().diag_embed() + levels.jitter**2 * squared
    late = (levels.late_sigma / levels.sigma * sigma).square().diag_embed() + levels.late_jitter**2 * squared
    return DetectionNoise(ordinary, late if levels.late else None, levels.late)


def noise_in(batch: TargetBatch, noise: DetectionNoise | None) -> DetectionNoise | None:
    """Covariances of the rows of a batch [b, t, d, d], from those of all rows; None if each is that of the model."""
    if noise is None:
        return None
    late = None if noise.late is None else noise.late[batch.rows]
    return DetectionNoise(noise.ordinary[batch.rows], late, noise.share)


def model_of_batch(model: SwitchingModel, batch: TargetBatch, noise: DetectionNoise | None) -> SwitchingModel:
    """The model for the steps of a batch; noise: `noise_in` the batch. Late detections double the modes."""
    discrete = discretized(model, batch.dt)
    if noise is None:
        return discrete
    R = noise.ordinary.unsqueeze(-3)
    discrete = dataclasses.replace(discrete, R=R.expand(*R.shape[:-3], model.modes, -1, -1))
    if noise.late is None:
        return discrete
    doubled = with_clutter(discrete, noise.share, noise.late)
    return dataclasses.replace(doubled, H=torch.cat((discrete.H, discrete.H), -3))  # late, but of the target


def with_velocity(model: SwitchingModel, dimensions: int, sigma: float) -> SwitchingModel:
    """The model of a batch with the velocities in x and y as further observations, of independent errors."""
    d, per = dimensions, model.state_size // dimensions
    rows = torch.zeros(2, model.state_size, dtype=torch.float64)
    rows[0, 1] = rows[1, per + 1] = 1.0
    H = torch.cat((model.H, rows.expand(*model.H.shape[:-2], -1, -1)), -2)
    R = torch.nn.functional.pad(model.R, (0, 2, 0, 2))
    R[..., [d, d + 1], [d, d + 1]] = sigma**2
    return dataclasses.replace(model, H=H, R=R)


def prior_of_batch(prior: Prior, noise: DetectionNoise | None) -> Prior:
    """The prior of the model of a batch."""
    return prior if noise is None or noise.late is None else prior_with_clutter(prior)


def motion_probability(log_probability: Float[Tensor, "*b k"], modes: int) -> Float[Tensor, "*b m"]:
    """Probabilities of the modes of motion, late or not."""
    return log_probability.exp().unflatten(-1, (-1, modes)).sum(-2)
