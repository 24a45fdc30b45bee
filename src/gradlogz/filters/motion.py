"""The usual models of motion, as linear systems in continuous time that are looked at now and then.

    dx = A x dt + dW,   W of spectral density C
    F = exp(A dt),   Q = ∫_0^dt exp(A u) C exp(A u)^T du                                       [vanloan78]

    random walk               A = 0                              positions diffuse
    constant velocity         p'' = noise                        velocities diffuse
    constant acceleration     p''' = noise                       accelerations diffuse
    Singer                    p''' = -p'' / tau + noise          accelerations forget themselves        [singer70]
    coordinated turn          p'' = omega J p' + noise           velocities turn in the plane of the first two

A state lists dimension after dimension, each with its derivatives: x, x', y, y'. Positions are observed. dt may be one
number or one for each step [t], and like all other numbers here may be a tensor with gradients.

Read next: model.py (assembling them), ../../../docs/filters.md.
"""

import torch

from .._errors import has_values, sentence
from .._typing import Float, Tensor
from .model import KalmanModel

Number = float | Tensor

DOUBLINGS, TERMS = 8, 20  # of steps up to 256 times the fastest time of A; 1/20! is 4e-19


def random_walk(
    dimensions: int,
    *,
    dt: Number,
    spectral_density: Number,
    observation_variance: Number,
    derivatives: int = 1,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> KalmanModel:
    """Positions that diffuse: p' = noise of the given spectral density. Further derivatives are held at 0."""
    noise = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _chain("random_walk", 1, dimensions, derivatives, noise, dtype, device)


def constant_velocity(
    dimensions: int,
    *,
    dt: Number,
    spectral_density: Number,
    observation_variance: Number,
    derivatives: int = 2,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
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
    noise = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _chain("constant_velocity", 2, dimensions, derivatives, noise, dtype, device)


def constant_acceleration(
    dimensions: int,
    *,
    dt: Number,
    spectral_density: Number,
    observation_variance: Number,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> KalmanModel:
    """Accelerations that diffuse: p''' = noise of the given spectral density."""
    noise = {"dt": dt, "spectral_density": spectral_density, "observation_variance": observation_variance}
    return _chain("constant_acceleration", 3, dimensions, 3, noise, dtype, device)


def singer(
    dimensions: int,
    *,
    dt: Number,
    correlation_time: Number,
    acceleration_variance: Number,
    observation_variance: Number,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> KalmanModel:
    """Accelerations that last for a time tau: p''' = -p'' / tau + noise of density 2 variance / tau.   [singer70]

    For long tau it is constant_acceleration with that density, for short tau constant_velocity with 2 variance tau.
    """
    numbers = {
        "dt": dt,
        "correlation_time": correlation_time,
        "acceleration_variance": acceleration_variance,
        "observation_variance": observation_variance,
    }
    step, tau, variance, r = _numbers("singer", dimensions, numbers, dtype, device)
    A, C = _shift(3, step), _corner(3, 2 * variance / tau)
    A = A - _corner(3, 1 / tau)
    return _assembled(*discretize(A, C, step), dimensions, r)


def coordinated_turn(
    dimensions: int,
    *,
    dt: Number,
    rate: Number,
    spectral_density: Number,
    observation_variance: Number,
    dtype: torch.dtype | None = None,
    device: torch.device | None = None,
) -> KalmanModel:
    """Velocities that turn at a known rate in radians, from the first dimension to the second, and diffuse.

    A third dimension moves with constant velocity. Rate 0 is constant_velocity.
    """
    numbers = {
        "dt": dt,
        "rate": rate,
        "spectral_density": spectral_density,
        "observation_variance": observation_variance,
    }
    step, omega, q, r = _numbers("coordinated_turn", dimensions, numbers, dtype, device)
    if dimensions < 2:
        remedy = "Nothing turns on a line; use constant_velocity."
        raise ValueError(sentence("coordinated_turn", "dimensions must be 2 or 3", f"{dimensions}", remedy))
    eye = torch.eye(dimensions, dtype=step.dtype, device=step.device)
    turn = torch.zeros(2 * dimensions, 2 * dimensions, dtype=step.dtype, device=step.device)
    turn[1, 3], turn[3, 1] = -1, 1  # x'' = -omega y', y'' = omega x'
    A = torch.kron(eye, _shift(2, step)) + omega * turn
    F, Q = discretize(A, torch.kron(eye, _corner(2, q)), step)
    H = torch.kron(eye, _first(2, step))
    return KalmanModel(F, Q, H, r * eye)


def discretize(
    drift: Float[Tensor, "s s"], density: Float[Tensor, "s s"], dt: Float[Tensor, "*t"]
) -> tuple[Float[Tensor, "*t s s"], Float[Tensor, "*t s s"]]:
    """F = exp(A dt) and Q = ∫_0^dt exp(A u) C exp(A u)^T du.   [vanloan78]

        exp([[A, C], [0, -A^T]] h) = [[F_h, Q_h F_h^-T], [0, F_h^-T]],     Q_2h = F_h Q_h F_h^T + Q_h

    The first for a step so short that F^-T is harmless, the second, doubling, for the rest of the way.
    """
    A, C, h = drift, density, dt[..., None, None] / 2**DOUBLINGS  # Shorthand
    eye, s = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), A.shape[-1]
    block = h * torch.cat((torch.cat((A, C), -1), torch.cat((torch.zeros_like(A), -A.mT), -1)), -2)
    term = total = block
    for n in range(2, TERMS):  # torch.linalg.matrix_exp is not as accurate: its errors reach 1e-10 here
        term = term @ block / n
        total = total + term
    E, Q = total[..., :s, :s], total[..., :s, s:]  # E = F - I, which keeps the digits of short steps
    Q = Q @ (eye + E).mT
    for _ in range(DOUBLINGS):
        F = eye + E
        E, Q = 2 * E + E @ E, F @ Q @ F.mT + Q
    return eye + E, (Q + Q.mT) / 2


def _chain(
    call: str,
    own: int,
    dimensions: int,
    derivatives: int,
    numbers: dict[str, Number],
    dtype: torch.dtype | None,
    device: torch.device | None,
) -> KalmanModel:
    """Integrators in a row, noise in the last of them; what the state has beyond is 0."""
    step, q, r = _numbers(call, dimensions, numbers, dtype, device)
    if derivatives < own:
        condition, remedy = f"derivatives must be at least {own}", "They count the position as the first."
        raise ValueError(sentence(call, condition, f"{derivatives}", remedy))
    F, Q = discretize(_shift(own, step), _corner(own, q), step)
    lacking = derivatives - own
    pad = (0, lacking, 0, lacking)
    return _assembled(torch.nn.functional.pad(F, pad), torch.nn.functional.pad(Q, pad), dimensions, r)


def _assembled(F: Tensor, Q: Tensor, dimensions: int, variance: Tensor) -> KalmanModel:
    """The same motion in each dimension."""
    eye = torch.eye(dimensions, dtype=F.dtype, device=F.device)
    return KalmanModel(torch.kron(eye, F), torch.kron(eye, Q), torch.kron(eye, _first(F.shape[-1], F)), variance * eye)


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
    numbers: dict[str, Number],
    dtype: torch.dtype | None,
    device: torch.device | None,
) -> list[Tensor]:
    """Numbers as tensors of one dtype, those given as tensors deciding which; all but a rate must not be negative."""
    if not 1 <= dimensions <= 3:
        raise ValueError(sentence(call, "dimensions must be 1, 2 or 3", f"{dimensions}", "Space has no more."))
    given = [n for n in numbers.values() if isinstance(n, Tensor)]
    dtype = dtype or (given[0].dtype if given else torch.get_default_dtype())
    device = device or (given[0].device if given else None)
    tensors = {name: torch.as_tensor(n, dtype=dtype, device=device) for name, n in numbers.items()}
    for name, t in tensors.items():
        if t.ndim > (name == "dt"):
            condition = f"{name} must be a number" + (" or one for each step" if name == "dt" else "")
            raise ValueError(sentence(call, condition, f"shape {tuple(t.shape)}", "Dimensions share what they are."))
        strictly = name in ("dt", "correlation_time")
        if name == "rate" or not has_values(t):
            continue
        if not bool(((t > 0) if strictly else (t >= 0)).all()):
            condition = f"{name} must be {'positive' if strictly else 'nonnegative'}"
            fact = f"a smallest one of {float(t.min()):.3g}"
            raise ValueError(sentence(call, condition, fact, "Times and variances are."))
    return list(tensors.values())
