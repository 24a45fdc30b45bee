"""Nonlinear motion and sensors: turns of unknown rate, range and bearing, angle differences.

    a turn of rate w, in the plane:   x' and y' turn by w dt,   x += (sin(w dt) x' - (1 - cos(w dt)) y') / w,   ...
    range and bearing:                |p - origin|,   atan2(y - origin_y, x - origin_x)
    elevation, in space:              atan2(z - origin_z, range in the plane)
    flow of a drift:                  dx = f(x) dt, integrated over a time dt

Read next: nonlinear_model.py (NonlinearModel).
"""

import math

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, has_values
from ..._typing import Tensor
from ...kernels.filters.forms import LINEAR, RANGE_BEARING, RANGE_BEARING_ELEVATION, TURN, FunctionForm
from ..scalars import Number, as_tensors
from .discretization import discretize
from .function_forms import with_form
from .nonlinear_model import Function, NonlinearMode, Residual


@without_autocast
def unknown_turn(
    dimensions: int,
    *,
    dt: Number | None = None,
    spectral_density: Number,
    rate_density: Number,
    observation_variance: Number,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> NonlinearMode:
    """Turn in the plane with the rate w as a state component: x, x', y, y', w. Positions are observed.

    Each step turns exactly by the rate at its start. Velocities have the noise of constant_velocity, and w diffuses
    with rate_density. A third axis, placed before w, moves with constant velocity. If w is known to be 0, the model is
    constant_velocity. Without dt the mode is continuous (NonlinearModel with a Generator), and the noise of the
    velocity turns too.

    >>> import torch
    >>> mode = unknown_turn(2, dt=1.0, spectral_density=0.1, rate_density=0.01, observation_variance=1.0)
    >>> quarter = torch.tensor([0.0, 1.0, 0.0, 0.0, torch.pi / 2])  # to the left
    >>> torch.allclose(mode.move(quarter)[[1, 3]], torch.tensor([0.0, 1.0]), atol=1e-6)
    True
    """
    if dimensions not in (2, 3):
        remedy = "Use constant_velocity in one dimension."
        raise InputValueError("unknown_turn", "dimensions", f"dimensions must be 2 or 3, got {dimensions}", remedy)
    numbers = {
        "dt": dt,
        "spectral_density": spectral_density,
        "rate_density": rate_density,
        "observation_variance": observation_variance,
    }
    tensors = as_tensors({name: n for name, n in numbers.items() if n is not None}, dtype=dtype, device=device)
    for name, t in tensors.items():
        if t.ndim > 0 or (has_values(t) and not bool(t >= 0)):
            fact = f"shape {tuple(t.shape)}" if t.ndim else f"{float(t):.3g}"
            remedy = "Pass one number; drop dt for continuous time."
            raise InputValueError("unknown_turn", name, f"{name} must be a nonnegative number, got {fact}", remedy)
    step = tensors.pop("dt", None)
    q, q_rate, r = tensors.values()
    dtype, device = r.dtype, r.device
    shift = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=dtype, device=device)
    corner = torch.tensor([[0.0, 0.0], [0.0, 1.0]], dtype=dtype, device=device)
    Q, Q_rate = q * corner, q_rate
    if step is not None:
        (_, Q), Q_rate = discretize(shift, Q, step), q_rate * step
    size = 2 * dimensions + 1
    move = (lambda x, dt, *_: turned(x, dt)) if step is None else lambda x, *_: turned(x, step)
    positions = torch.eye(size, dtype=dtype, device=device)[:-1:2]
    form = FunctionForm(
        TURN,
        places=tuple(range(size)),
        numbers=() if step is None else (step,),
        is_flow=step is None,
        state_size=size,
    )
    return NonlinearMode(
        with_form(move, form),
        torch.block_diag(*[Q] * dimensions, Q_rate.reshape(1, 1)),
        with_form(lambda x, *_: x[:-1:2], FunctionForm(LINEAR, matrix=positions)),
        r * torch.eye(dimensions, dtype=dtype, device=device),
        continuous=step is None,
    )


def follow_drift(drift: Function, *, steps: int = 4) -> Function:
    """Flow of dx = drift(x) dt over a time dt, by the classical Runge-Kutta method with the given number of steps.

    Inputs of the drift are held constant. For a linear drift A the error is (|A| dt)^5 / (120 steps^4); in general it
    falls with the fourth power of `steps`. Cost: 4 evaluations of the drift for each step.

    >>> import torch
    >>> flow = follow_drift(lambda x: torch.stack((x[1], -torch.sin(x[0]))), steps=16)  # a pendulum
    >>> once = flow(torch.tensor([0.5, 0.0]), torch.tensor(3.0))
    >>> twice = flow(flow(torch.tensor([0.5, 0.0]), torch.tensor(1.0)), torch.tensor(2.0))
    >>> torch.allclose(once, twice, atol=1e-4)
    True
    """
    if steps < 1:
        remedy = "Use more steps for smaller errors."
        raise InputValueError("follow_drift", "steps", f"steps must be at least 1, got {steps}", remedy)

    def flow(x: Tensor, dt: Tensor, *u: Tensor) -> Tensor:
        h = dt / steps
        for _ in range(steps):
            first = drift(x, *u)
            second = drift(x + h / 2 * first, *u)
            third = drift(x + h / 2 * second, *u)
            fourth = drift(x + h * third, *u)
            x = x + h / 6 * (first + 2 * second + 2 * third + fourth)
        return x

    return flow


def turned(state: Tensor, dt: Tensor) -> Tensor:
    """Move x, x', y, y', w along a circular arc for a time dt; components between y' and w are z, z' on a line.

    All derivatives exist at w = 0, where sin(z) / z is computed by its series.
    """
    x, vx, y, vy = state[..., :4].unbind(-1)
    w, line = state[..., -1], state[..., 4:-1]
    z = w * dt
    forward = dt * _sinc(z)  # sin(z) / w
    aside = dt * (z / 2) * _sinc(z / 2) ** 2  # (1 - cos(z)) / w
    cos, sin = torch.cos(z), torch.sin(z)
    parts = [x + forward * vx - aside * vy, cos * vx - sin * vy, y + aside * vx + forward * vy, sin * vx + cos * vy]
    if line.shape[-1]:
        height, climb = line.unbind(-1)
        parts += [height + dt * climb, climb]
    return torch.stack([*parts, w], -1)


def range_bearing(first: int = 0, second: int = 2, *, origin: tuple[float, float] = (0.0, 0.0)) -> Function:
    """Range and bearing of two state components from a sensor: sqrt(x² + y²), atan2(y, x).

    Use with residual=wrap_angles(1), because the bearing is an angle.

    >>> import torch
    >>> range_bearing()(torch.tensor([3.0, 0.0, 4.0, 0.0]))
    tensor([5.0000, 0.9273])
    """

    def observe(state: Tensor, *_: Tensor) -> Tensor:
        x, y = state[first] - origin[0], state[second] - origin[1]
        return torch.stack((torch.hypot(x, y), torch.atan2(y, x)), -1)

    return with_form(observe, FunctionForm(RANGE_BEARING, places=(first, second), numbers=origin))


def range_bearing_elevation(
    first: int = 0, second: int = 2, third: int = 4, *, origin: tuple[float, float, float] = (0.0, 0.0, 0.0)
) -> Function:
    """Range, bearing and elevation of three state components: |p|, atan2(y, x), atan2(z, sqrt(x² + y²)).

    The bearing is measured from x towards y; the elevation above the xy plane lies in [-pi/2, pi/2]. Use with
    residual=wrap_angles(1, 2). The bearing has no derivative directly above the sensor.

    >>> import torch
    >>> range_bearing_elevation()(torch.tensor([3.0, 0.0, 4.0, 0.0, 5.0, 0.0]))
    tensor([7.0711, 0.9273, 0.7854])
    """

    def observe(state: Tensor, *_: Tensor) -> Tensor:
        x, y, z = (state[c] - o for c, o in zip((first, second, third), origin, strict=True))
        flat = torch.hypot(x, y)
        return torch.stack((torch.hypot(flat, z), torch.atan2(y, x), torch.atan2(z, flat)), -1)

    return with_form(observe, FunctionForm(RANGE_BEARING_ELEVATION, places=(first, second, third), numbers=origin))


def wrap_angles(*components: int) -> Residual:
    """Difference of two observations with the given components as angles in radians, reduced to [-pi, pi).

    >>> import torch
    >>> wrap_angles(1)(torch.tensor([5.0, 3.1]), torch.tensor([4.0, -3.1]))  # a small angle, not a full turn
    tensor([ 1.0000, -0.0832])
    """

    def residual(left: Tensor, right: Tensor) -> Tensor:
        away = left - right
        parts = list(away.unbind(-1))
        for c in components:
            parts[c] = torch.remainder(parts[c] + math.pi, 2 * math.pi) - math.pi
        return torch.stack(parts, -1)

    residual.angles = components  # type: ignore[attr-defined]
    return residual


def _sinc(z: Tensor) -> Tensor:
    """sin(z) / z, with all derivatives at 0."""
    near = z.abs() < 0.1
    small = torch.where(near, z, 0.0) ** 2
    series = 1 - small / 6 * (1 - small / 20 * (1 - small / 42 * (1 - small / 72)))
    return torch.where(near, series, torch.sin(z) / torch.where(near, 1.0, z))
