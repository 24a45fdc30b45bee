"""The uniform distribution on a sphere, whose attention is parallel to the query.

    h         = uniform on {|x| = r} in R^d
    G(eta)    = log[Gamma(d/2) (2/k)^(d/2-1) I_{d/2-1}(k)],  k = r |eta|       [theory 3.4]
    ∇G(eta)   = r (I_{d/2}(k) / I_{d/2-1}(k)) eta / |eta|                       parallel to eta
    ∇²G(eta)  = r² (a I + b r² eta eta^T)                                       a = A(k)/k, b = (Var t - a)/k²

The tilted distributions are von Mises-Fisher. Because the mean is parallel to the query, tokens spread evenly over a
sphere are an exact equilibrium of attention followed by projection onto the sphere (theory 4.5).

Read next: ../special/bessel.py (how the Bessel functions are computed).
"""

import dataclasses
from typing import TYPE_CHECKING

import torch

from .._errors import InputTypeError, InputValueError, check_finite, check_floats, check_positive
from .._pytree import static_field
from .._typing import Float, Tensor, as_scalar_tensor
from ..special.bessel import Radial, radial
from .measure import Measure, measure


@measure
class Sphere(Measure):
    """Uniform distribution on the sphere of R^dim with this radius, a tensor [*b] or a number; dim >= 2.

    >>> import torch
    >>> k = torch.tensor(2.0, dtype=torch.float64)
    >>> h = Sphere(3, torch.tensor(1.0, dtype=torch.float64))
    >>> torch.allclose(h.log_normalizer(torch.stack((k, 0 * k, 0 * k))), (k.sinh() / k).log())
    True
    """

    dim: int = static_field()
    radius: Float[Tensor, "*b"] = dataclasses.field(default_factory=lambda: torch.ones(()))

    if TYPE_CHECKING:  # convert a number to a tensor

        def __init__(self, dim: int, radius: float | Tensor = 1.0, *, validate: bool = True) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "radius", as_scalar_tensor(self.radius))
        check_floats("Sphere", radius=self.radius)
        if not isinstance(self.dim, int):
            raise InputTypeError(
                "Sphere", "dim", f"dim must be an int, got {type(self.dim).__name__}", "Pass the dimension d."
            )
        if self.dim < 2:
            remedy = "Use Spins or Empirical for two points on a line."
            raise InputValueError("Sphere", "dim", f"dim must be at least 2, got dim={self.dim}", remedy)
        if self.validate:
            check_finite("Sphere", radius=self.radius)
            check_positive("Sphere", radius=self.radius)

    @property
    def batch_shape(self) -> torch.Size:
        return self.radius.shape

    def log_normalizer(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return self._radial(eta).log_normalizer

    def mean(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d"]:
        r = self.radius[..., None, None]
        return r * r * self._radial(eta).first.unsqueeze(-1) * eta

    def covariance(self, eta: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m d d"]:
        _, a, b = self._radial(eta)
        r, identity = self.radius[..., None, None, None], torch.eye(self.dim, dtype=eta.dtype, device=eta.device)
        along = r * eta.unsqueeze(-1)
        return r * r * (a[..., None, None] * identity + b[..., None, None] * (along * along.mT))

    def covariance_product(
        self, eta: Float[Tensor, "*b m d"], vector: Float[Tensor, "*b m d"]
    ) -> Float[Tensor, "*b m d"]:
        _, a, b = self._radial(eta)
        r = self.radius[..., None, None]
        along = (r * eta * vector).sum(-1, keepdim=True)
        return r * r * (a.unsqueeze(-1) * vector + b.unsqueeze(-1) * along * r * eta)

    def support(self, direction: Float[Tensor, "*b m d"]) -> Float[Tensor, "*b m"]:
        return self.radius.unsqueeze(-1) * direction.norm(dim=-1)

    def sample(
        self, eta: Float[Tensor, "*b m d"], shape: tuple[int, ...] = (), *, generator: torch.Generator | None = None
    ) -> Float[Tensor, "*s m d"]:
        """Von Mises-Fisher draws: the coordinate along eta by rejection, the direction across it uniform.   [wood94]"""
        p = self.dim - 1
        k = (self.radius.unsqueeze(-1) * eta.norm(dim=-1)).expand(*shape, *eta.shape[:-1]).detach()

        def uniform() -> Tensor:
            return torch.rand(k.shape, dtype=k.dtype, device=k.device, generator=generator)

        def beta() -> Tensor:
            half = torch.full_like(k, p / 2)
            x = torch._standard_gamma(half, generator=generator)
            y = torch._standard_gamma(half, generator=generator)
            return x / (x + y)

        # Envelope of the density of the cosine w, in 1 - w throughout: for a large k the mass is near w = 1. The
        # acceptance rate is above 0.6 for every k and dimension, so the rounds needed for all draws are few.
        b = p / (2 * k + torch.hypot(2 * k, torch.full_like(k, p)))
        below_peak = 2 * b / (1 + b)  # 1 - w at the peak
        short, waiting = torch.zeros_like(k), torch.ones_like(k, dtype=torch.bool)
        while bool(waiting.any()):
            z = beta()
            below = 2 * b * z / (1 - (1 - b) * z)
            # k (w - peak) + p log[(1 - peak w) / (1 - peak²)], with 1 - peak w = (1 - peak) + peak (1 - w)
            rise = (below_peak + (1 - below_peak) * below) / (below_peak * (2 - below_peak))
            accepted = ~(k * (below_peak - below) + p * rise.log() < uniform().log())  # a NaN would loop forever
            short = torch.where(waiting & accepted, below, short)
            waiting = waiting & ~accepted
        cosine, sine = 1 - short, (short * (2 - short)).clamp(min=0).sqrt()

        # A uniform direction orthogonal to eta (any direction if eta = 0, since the distribution is isotropic).
        noise = torch.randn(*shape, *eta.shape, dtype=k.dtype, device=k.device, generator=generator)
        length = eta.detach().norm(dim=-1, keepdim=True)
        axis = eta.detach() / length.clamp(min=torch.finfo(k.dtype).tiny)
        axis = torch.where(length > 0, axis, torch.eye(self.dim, dtype=k.dtype, device=k.device)[0])
        across = noise - (noise * axis).sum(-1, keepdim=True) * axis
        across = across / across.norm(dim=-1, keepdim=True)
        unit = cosine.unsqueeze(-1) * axis + sine.unsqueeze(-1) * across
        return self.radius.detach()[..., None, None] * unit

    def _radial(self, eta: Float[Tensor, "*b m d"]) -> Radial:
        return radial(self.radius.unsqueeze(-1) ** 2 * (eta * eta).sum(-1), self.dim)
