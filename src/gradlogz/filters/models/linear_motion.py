"""The usual models of motion, as linear systems in continuous time that are looked at now and then.

    dx = A x dt + dW,   W of spectral density C
    F = exp(A dt),   Q = ∫_0^dt exp(A u) C exp(A u)^T du                                       [vanloan78]

    random walk               A = 0                              positions diffuse
    constant velocity         p'' = noise                        velocities diffuse
    constant acceleration     p''' = noise                       accelerations diffuse
    Singer                    p''' = -p'' / tau + noise          accelerations forget themselves        [singer70]
    coordinated turn          p'' = omega J p' + noise           velocities turn in the plane of the first two

A state lists dimension after dimension, each with its derivatives: x, x', y, y'. Positions are observed. dt may be one
number or one for each step [t], and like all other numbers here may be a tensor with gradients. Without dt a model is
that of continuous time, F = A and Q = C, to be looked at whenever something is observed (SwitchingModel with a
Generator).

Read next: switching_model.py (assembling them), discretization.py (the integrals), ../../../../docs/filters.md.
"""

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, has_values
from ..._typing import Tensor
from ..scalars import Number, as_tensors
from .discretization import discretize
from .switching_model import KalmanModel

Numbers = dict[str, Number | None]


@without_autocast
def random_walk(
    dimensions: int,
    *,
    dt: Number | None = None,
    spectral_density: Number,
    observation_variance: Number,
    derivatives: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Positions that diffuse: p' = noise of the given spectral density. Further derivatives are held at 0."""
    noise: Numbers = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _chain("random_walk", 1, dimensions, derivatives, noise, dtype, device)


@without_autocast
def constant_velocity(
    dimensions: int,
    *,
    dt: Number | None = None,
    spectral_density: Number,
    observation_variance: Number,
    derivatives: int = 2,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Velocities that diffuse: p'' = noise of the given spectral density.

    derivatives=3 adds accelerations that are held at 0, so that the model can be switched with constant_acceleration.

    >>> import torch
    >>> model = constant_velocity(1, dt=2.0, spectral_density=3.0, observation_variance=0.1)
    >>> model.F
    tensor([[1., 2.],
            [0., 1.]])
    >>> torch.allclose(model.Q, 3 * torch.tensor([[8 / 3, 2.0], [2.0, 2.0]]))
    True
    """
    noise: Numbers = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _chain("constant_velocity", 2, dimensions, derivatives, noise, dtype, device)


@without_autocast
def constant_acceleration(
    dimensions: int,
    *,
    dt: Number | None = None,
    spectral_density: Number,
    observation_variance: Number,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Accelerations that diffuse: p''' = noise of the given spectral density."""
    noise: Numbers = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _chain("constant_acceleration", 3, dimensions, 3, noise, dtype, device)


@without_autocast
def singer(
    dimensions: int,
    *,
    dt: Number | None = None,
    correlation_time: Number,
    acceleration_variance: Number,
    observation_variance: Number,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Accelerations that last for a time tau: p''' = -p'' / tau + noise of density 2 variance / tau.   [singer70]

    For long tau it is constant_acceleration with that density, for short tau constant_velocity with 2 variance tau.
    """
    numbers: Numbers = {
        "dt": dt,
        "correlation_time": correlation_time,
        "acceleration_variance": acceleration_variance,
        "observation_variance": observation_variance,
    }
    step, (tau, variance, r) = _numbers("singer", dimensions, numbers, dtype, device)
    A, C = _shift(3, r) - _corner(3, 1 / tau), _corner(3, 2 * variance / tau)
    return _assembled(*_looked_at(A, C, step), dimensions, r, continuous=step is None)


@without_autocast
def coordinated_turn(
    dimensions: int,
    *,
    dt: Number | None = None,
    rate: Number,
    spectral_density: Number,
    observation_variance: Number,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Velocities that turn at a known rate in radians, from the first dimension to the second, and diffuse.

    A third dimension moves with constant velocity. Rate 0 is constant_velocity.
    """
    numbers: Numbers = {
        "dt": dt,
        "rate": rate,
        "spectral_density": spectral_density,
        "observation_variance": observation_variance,
    }
    step, (omega, q, r) = _numbers("coordinated_turn", dimensions, numbers, dtype, device)
    if dimensions < 2:
        remedy = "Nothing turns on a line; use constant_velocity."
        raise InputValueError("coordinated_turn", "dimensions", f"dimensions must be 2 or 3, got {dimensions}", remedy)
    eye = torch.eye(dimensions, dtype=r.dtype, device=r.device)
    turn = torch.zeros(2 * dimensions, 2 * dimensions, dtype=r.dtype, device=r.device)
    turn[1, 3], turn[3, 1] = -1, 1  # x'' = -omega y', y'' = omega x'
    A = torch.kron(eye, _shift(2, r)) + omega * turn
    F, Q = _looked_at(A, torch.kron(eye, _corner(2, q)), step)
    return KalmanModel(F, Q, torch.kron(eye, _first(2, r)), r * eye, continuous=step is None)


def _chain(
    call: str,
    own: int,
    dimensions: int,
    derivatives: int,
    numbers: Numbers,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> KalmanModel:
    """Integrators in a row, noise in the last of them; what the state has beyond is 0."""
    step, (q, r) = _numbers(call, dimensions, numbers, dtype, device)
    if derivatives < own:
        condition, remedy = f"derivatives must be at least {own}", "They count the position as the first."
        raise InputValueError(call, "derivatives", f"{condition}, got {derivatives}", remedy)
    if derivatives > own and step is None:
        condition, remedy = f"derivatives must be {own} without dt", "SwitchingModel.of has components= for the rest."
        raise InputValueError(call, "derivatives", f"{condition}, got {derivatives}", remedy)
    F, Q = _looked_at(_shift(own, r), _corner(own, q), step)
    lacking = derivatives - own
    pad = (0, lacking, 0, lacking)
    F, Q = torch.nn.functional.pad(F, pad), torch.nn.functional.pad(Q, pad)
    return _assembled(F, Q, dimensions, r, continuous=step is None)


def _looked_at(A: Tensor, C: Tensor, step: Tensor | None) -> tuple[Tensor, Tensor]:
    """F and Q of a step, or drift and density as they are."""
    return (A, C) if step is None else discretize(A, C, step)


def _assembled(F: Tensor, Q: Tensor, dimensions: int, variance: Tensor, *, continuous: bool) -> KalmanModel:
    """The same motion in each dimension."""
    eye = torch.eye(dimensions, dtype=F.dtype, device=F.device)
    H = torch.kron(eye, _first(F.shape[-1], F))
    return KalmanModel(torch.kron(eye, F), torch.kron(eye, Q), H, variance * eye, continuous=continuous)


def _shift(derivatives: int, like: Tensor) -> Tensor:
    """Each derivative drives the one before it."""
    return torch.diag(torch.ones(derivatives - 1, dtype=like.dtype, device=like.device), 1)


def _corner(derivatives: int, value: Tensor) -> Tensor:
    """A number in the last place of the diagonal."""
    return torch.nn.functional.pad(value.reshape(1, 1), (derivatives - 1, 0, derivatives - 1, 0))


def _first(derivatives: int, like: Tensor) -> Tensor:
    """The row that sees the position."""
    return torch.eye(1, derivatives, dtype=like.dtype, device=like.device)


def _numbers(
    call: str,
    dimensions: int,
    numbers: Numbers,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor | None, list[Tensor]]:
    """dt, and the rest, as tensors of one dtype, those given as tensors deciding which; but a rate none is negative."""
    if not 1 <= dimensions <= 3:
        raise InputValueError(
            call, "dimensions", f"dimensions must be 1, 2 or 3, got {dimensions}", "Space has no more."
        )
    tensors = as_tensors({name: n for name, n in numbers.items() if n is not None}, dtype=dtype, device=device)
    for name, t in tensors.items():
        if t.ndim > (name == "dt"):
            condition = f"{name} must be a number" + (" or one for each step" if name == "dt" else "")
            raise InputValueError(
                call, name, f"{condition}, got shape {tuple(t.shape)}", "Dimensions share what they are."
            )
        strictly = name in ("dt", "correlation_time")
        if name == "rate" or not has_values(t):
            continue
        if not bool(((t > 0) if strictly else (t >= 0)).all()):
            condition = f"{name} must be {'positive' if strictly else 'nonnegative'}"
            fact = f"a smallest one of {float(t.min()):.3g}"
            raise InputValueError(call, name, f"{condition}, got {fact}", "Times and variances are.")
    return tensors.pop("dt", None), list(tensors.values())
