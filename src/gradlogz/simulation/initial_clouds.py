"""Initial clouds of a simulation, and its attention step.

    gaussian     N(0, 1)                          independent coordinates
    uniform      on [-sqrt 3, sqrt 3]             independent coordinates of mean 0 and variance 1
    laplace      variance 1                       independent coordinates, heavy tails
    exponential  mean 0, variance 1               independent coordinates, skewed
    sphere       uniform on a sphere              radius 1 with the contraction `sphere`, else sqrt(d)
    circle       uniform on the unit circle of the first two coordinates

Read next: settings.py (the parameters), run_simulation.py (the evolution of the clouds).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from .._typing import Float, Tensor
from ..dynamics.evolution import Ascent
from ..measures.gaussian import Gaussian
from ..measures.measure import Measure
from ..measures.sphere import Sphere
from .matrix_text import matrix_of, vector_of
from .settings import SimulationSettings

Sampler = Callable[[int, int, torch.Generator], Tensor]


def _uniform(n: int, d: int, generator: torch.Generator) -> Tensor:
    return torch.rand(n, d, generator=generator, dtype=torch.float64)


def _gaussian(n: int, d: int, generator: torch.Generator) -> Tensor:
    return torch.randn(n, d, generator=generator, dtype=torch.float64)


def _exponential(n: int, d: int, generator: torch.Generator) -> Tensor:
    return -torch.log1p(-_uniform(n, d, generator))


def _laplace(n: int, d: int, generator: torch.Generator) -> Tensor:
    return _exponential(n, d, generator) * (2 * torch.randint(0, 2, (n, d), generator=generator) - 1) / math.sqrt(2)


def _circle(n: int, d: int, generator: torch.Generator) -> Tensor:
    angle = 2 * math.pi * _uniform(n, 1, generator)
    return torch.cat((angle.cos(), angle.sin(), torch.zeros(n, d - 2, dtype=torch.float64)), -1)


SAMPLERS: dict[str, Sampler] = {
    "gaussian": _gaussian,
    "uniform": lambda n, d, generator: math.sqrt(3) * (2 * _uniform(n, d, generator) - 1),
    "laplace": _laplace,
    "exponential": lambda n, d, generator: _exponential(n, d, generator) - 1,
    "sphere": lambda n, d, generator: torch.nn.functional.normalize(_gaussian(n, d, generator), dim=-1),
    "circle": _circle,
}


def starts(settings: SimulationSettings) -> Float[Tensor, "b n d"]:
    """Initial clouds, one for each seed."""
    return torch.stack([_draw(settings, settings.tokens, settings.seed + i) for i in range(settings.seeds)])


def ascent_of(settings: SimulationSettings) -> Ascent:
    """The attention step of these settings; fixed keys have the seed `seed - 1`, keys drawn in each step `seed - 2`."""
    s, B, W = settings, None, None
    keys: Tensor | Measure | None = key_measure_of(s)
    if (s.qk_matrix, s.ov_matrix) != ("1", "qk"):
        B = matrix_of(s.qk_matrix, s.dim)
        W = None if s.ov_matrix == "qk" else matrix_of(s.ov_matrix, s.dim)
    if s.heads > 1:
        blocks = torch.eye(s.heads, dtype=torch.float64).repeat_interleave(s.dim // s.heads, 1)
        B = torch.diag_embed(blocks)
        W = s.heads * B  # heads are averaged; the factor makes their sum the identity
    if s.keys:
        initial = s.initial if s.initial in ("sphere", "circle") else "gaussian"
        keys = _draw(replace(s, initial=initial), s.keys, s.seed - 1)
    generator = torch.Generator().manual_seed((s.seed - 2) % 2**63)
    return Ascent(
        tau=s.tau, beta=s.beta, B=B, W_v=W, keys=keys, causal=s.causal, residual=s.residual, natural=s.natural,
        draws=s.draws or None, generator=generator if s.draws else None,
    )  # fmt: skip


def key_variance(settings: SimulationSettings) -> float:
    """Variance of each coordinate of the fixed keys."""
    on_unit_sphere = settings.initial == "sphere" and _has_unit_sphere(settings)
    return 1 / settings.dim if on_unit_sphere else 1.0


def key_measure_of(settings: SimulationSettings) -> Measure | None:
    """The measure in place of the keys, or None."""
    s = settings
    if s.key_measure == "sphere":
        radius = 1.0 if _has_unit_sphere(s) else math.sqrt(s.dim)
        return Sphere(s.dim, torch.tensor(radius, dtype=torch.float64))
    mean, covariance = vector_of(s.key_mean, s.dim), matrix_of(s.key_covariance, s.dim)
    if s.key_measure == "none" or mean is None or covariance is None:
        return None
    return Gaussian(mean, covariance)


def _draw(settings: SimulationSettings, n: int, seed: int) -> Tensor:
    cloud = SAMPLERS[settings.initial](n, settings.dim, torch.Generator().manual_seed(seed % 2**63))
    return cloud if settings.initial != "sphere" or _has_unit_sphere(settings) else math.sqrt(settings.dim) * cloud


def _has_unit_sphere(settings: SimulationSettings) -> bool:
    """True if spheres have radius 1, as that of the last contraction, and not sqrt(d)."""
    return settings.contraction.split("+")[-1] == "sphere"
