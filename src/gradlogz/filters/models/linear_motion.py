"""Linear motion models: stochastic differential equations, discretised with step dt.

    dx = A x dt + dW,   W of spectral density C
    F = exp(A dt),   Q = ∫_0^dt exp(A u) C exp(A u)^T du                                       [vanloan78]

    random walk               A = 0                              positions diffuse
    constant velocity         p'' = noise                        velocities diffuse
    constant acceleration     p''' = noise                       accelerations diffuse
    Singer                    p''' = -p'' / tau + noise          accelerations decay                    [singer70]
    coordinated turn          p'' = omega J p' + noise           velocities turn in the plane of the first two axes

The state lists each axis with its derivatives: x, x', y, y'. Positions are observed. Spectral densities and variances
are numbers for all axes or lists with one number for each. dt is a number or one number for
each step [t]; like all parameters here it may be a tensor with gradients. Without dt the model is in continuous time,
F = A and Q = C, for a SwitchingModel with a Generator.

Read next: switching_model.py (SwitchingModel), discretization.py (the integrals), ../../../../docs/filters.md.
"""

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, has_values
from ..._typing import Tensor
from ..scalars import Number, Numbers, as_tensors
from .discretization import discretize
from .switching_model import KalmanModel

Options = dict[str, Numbers | None]


@without_autocast
def random_walk(
    dimensions: int,
    *,
    dt: Number | None = None,
    spectral_density: Numbers,
    observation_variance: Numbers,
    derivatives: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Random walk of the position: p' = noise of the given spectral density. Further derivatives are held at 0."""
    noise: Options = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _integrators("random_walk", 1, dimensions, derivatives, noise, dtype, device)


@without_autocast
def constant_velocity(
    dimensions: int,
    *,
    dt: Number | None = None,
    spectral_density: Numbers,
    observation_variance: Numbers,
    derivatives: int = 2,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Nearly constant velocity: p'' = noise of the given spectral density.

    derivatives=3 adds accelerations held at 0, so that the model can be combined with constant_acceleration.

    >>> import torch
    >>> model = constant_velocity(1, dt=2.0, spectral_density=3.0, observation_variance=0.1)
    >>> model.F
    tensor([[1., 2.],
            [0., 1.]])
    >>> torch.allclose(model.Q, 3 * torch.tensor([[8 / 3, 2.0], [2.0, 2.0]]))
    True
    """
    noise: Options = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _integrators("constant_velocity", 2, dimensions, derivatives, noise, dtype, device)


@without_autocast
def constant_acceleration(
    dimensions: int,
    *,
    dt: Number | None = None,
    spectral_density: Numbers,
    observation_variance: Numbers,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Nearly constant acceleration: p''' = noise of the given spectral density."""
    noise: Options = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _integrators("constant_acceleration", 3, dimensions, 3, noise, dtype, device)


@without_autocast
def singer(
    dimensions: int,
    *,
    dt: Number | None = None,
    correlation_time: Number,
    acceleration_variance: Numbers,
    observation_variance: Numbers,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Singer model, acceleration with correlation time tau: p''' = -p'' / tau + noise of density 2 variance / tau.

    For large tau it tends to constant_acceleration with that density, for small tau to constant_velocity with density
    2 variance tau.   [singer70]
    """
    numbers: Options = {
        "dt": dt,
        "correlation_time": correlation_time,
        "acceleration_variance": acceleration_variance,
        "observation_variance": observation_variance,
    }
    step, (tau, variance, r) = _numbers("singer", dimensions, numbers, dtype, device)
    A = _shift(3, r) - _corner(3, 1 / tau)
    return _in_each_dimension(A, 3, 2 * variance / tau, step, dimensions, r)


@without_autocast
def coordinated_turn(
    dimensions: int,
    *,
    dt: Number | None = None,
    rate: Number,
    spectral_density: Numbers,
    observation_variance: Numbers,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> KalmanModel:
    """Coordinated turn at a known rate, in radians per unit of time, from the first axis towards the second.

    Velocities also have noise of the given spectral density. A third axis moves with constant velocity. Rate 0 is
    constant_velocity.
    """
    numbers: Options = {
        "dt": dt,
        "rate": rate,
        "spectral_density": spectral_density,
        "observation_variance": observation_variance,
    }
    step, (omega, q, r) = _numbers("coordinated_turn", dimensions, numbers, dtype, device)
    if dimensions < 2:
        remedy = "Use constant_velocity in one dimension."
        raise InputValueError("coordinated_turn", "dimensions", f"dimensions must be 2 or 3, got {dimensions}", remedy)
    eye = torch.eye(dimensions, dtype=r.dtype, device=r.device)
    turn = torch.zeros(2 * dimensions, 2 * dimensions, dtype=r.dtype, device=r.device)
    turn[1, 3], turn[3, 1] = -1, 1  # x'' = -omega y', y'' = omega x'
    A = torch.kron(eye, _shift(2, r)) + omega * turn
    F, Q = _discretized(A, torch.kron(q * eye, _corner(2, r.new_ones(()))), step)
    return KalmanModel(F, Q, torch.kron(eye, _first(2, r)), r * eye, continuous=step is None)


def _integrators(
    call: str,
    order: int,
    dimensions: int,
    derivatives: int,
    numbers: Options,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> KalmanModel:
    """A chain of `order` integrators driven by noise, for each axis; further derivatives are 0."""
    step, (q, r) = _numbers(call, dimensions, numbers, dtype, device)
    if derivatives < order:
        condition, remedy = f"derivatives must be at least {order}", "Count the position as the first."
        raise InputValueError(call, "derivatives", f"{condition}, got {derivatives}", remedy)
    if derivatives > order and step is None:
        condition, remedy = f"derivatives must be {order} without dt", "Use components= of SwitchingModel.of instead."
        raise InputValueError(call, "derivatives", f"{condition}, got {derivatives}", remedy)
    return _in_each_dimension(_shift(order, r), derivatives, q, step, dimensions, r)


def _discretized(A: Tensor, C: Tensor, step: Tensor | None) -> tuple[Tensor, Tensor]:
    """F and Q of a step, or drift and density unchanged without one."""
    return (A, C) if step is None else discretize(A, C, step)


def _in_each_dimension(
    A: Tensor, derivatives: int, density: Tensor, step: Tensor | None, dimensions: int, variance: Tensor
) -> KalmanModel:
    """Block-diagonal model with the same motion along each axis, and noise of one density or one for each axis."""
    n = A.shape[-1]
    axes = density.unbind() if density.ndim else [density]
    blocks = [_discretized(A, _corner(n, q), step) for q in axes]
    pad = (0, derivatives - n, 0, derivatives - n)
    F, *_ = (torch.nn.functional.pad(F, pad) for F, _ in blocks)
    noise = [torch.nn.functional.pad(Q, pad) for _, Q in blocks]
    eye = torch.eye(dimensions, dtype=F.dtype, device=F.device)
    if density.ndim:
        Q = sum(
            (torch.kron(torch.diag(e), q) for e, q in zip(eye, noise, strict=True)), torch.zeros_like(F[..., :1, :1])
        )
    else:
        Q = torch.kron(eye, noise[0])
    H = torch.kron(eye, _first(derivatives, F))
    return KalmanModel(torch.kron(eye, F), Q, H, variance * eye, continuous=step is None)


def _shift(derivatives: int, like: Tensor) -> Tensor:
    """Shift matrix: each derivative drives the one before it."""
    return torch.diag(torch.ones(derivatives - 1, dtype=like.dtype, device=like.device), 1)


def _corner(derivatives: int, value: Tensor) -> Tensor:
    """Matrix of zeros with `value` in the last diagonal entry."""
    return torch.nn.functional.pad(value.reshape(1, 1), (derivatives - 1, 0, derivatives - 1, 0))


def _first(derivatives: int, like: Tensor) -> Tensor:
    """Row of H that observes the position."""
    return torch.eye(1, derivatives, dtype=like.dtype, device=like.device)


def _numbers(
    call: str,
    dimensions: int,
    numbers: Options,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
) -> tuple[Tensor | None, list[Tensor]]:
    """Validate the parameters and return dt and the others as tensors of one dtype."""
    if not 1 <= dimensions <= 3:
        raise InputValueError(
            call, "dimensions", f"dimensions must be 1, 2 or 3, got {dimensions}", "Pass the number of spatial axes."
        )
    tensors = as_tensors({name: n for name, n in numbers.items() if n is not None}, dtype=dtype, device=device)
    for name, t in tensors.items():
        by_axis = name in ("spectral_density", "observation_variance", "acceleration_variance")
        if t.ndim > (name == "dt" or by_axis) or (by_axis and t.ndim and t.shape[0] != dimensions):
            more = " or one number for each step" if name == "dt" else f" or {dimensions} numbers, one for each axis"
            condition = f"{name} must be a scalar" + (more if name == "dt" or by_axis else "")
            raise InputValueError(call, name, f"{condition}, got shape {tuple(t.shape)}", "Use one value for all axes.")
        strictly = name in ("dt", "correlation_time")
        if name == "rate" or not has_values(t):
            continue
        if not bool(((t > 0) if strictly else (t >= 0)).all()):
            condition = f"{name} must be {'positive' if strictly else 'nonnegative'}"
            fact = f"{float(t.min()):.3g}"
            raise InputValueError(call, name, f"{condition}, got {fact}", "Check its sign.")
    return tensors.pop("dt", None), list(tensors.values())
