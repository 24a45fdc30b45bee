"""Mean and covariance of a Gaussian cloud under attention, in closed form.

    x' = (I + tau beta W C B^T) x + tau W m            attention to N(m, C) is affine               [shim22, Cor. 1]
    m' = m + tau W (m + beta C B^T m)
    C' = (I + tau beta W C B^T) C (I + tau beta W C B^T)^T                                            [theory 4.4]

Without a contraction and with B = I, in continuous time C(t)^-1 = C(0)^-1 - 2 beta t: the precision falls linearly, and
the cloud diverges at time 1 / (2 beta c_max). For n tokens this holds while the weight of a token on itself is small
(growth.self_weight).

Read next: contraction.py (moments under a contraction), growth.py (stability of the Gaussian).
"""

from typing import NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from .contraction import ContractionLike, contraction_of
from .evolution import Ascent


class GaussianCloud(NamedTuple):
    """The distribution N(mean, covariance) of infinitely many tokens, evolved by its moments instead of a sample."""

    mean: Float[Tensor, "*b d"]
    covariance: Float[Tensor, "*b d d"]

    def evolve(self, ascent: Ascent, *, contraction: ContractionLike = "none", steps: int = 1) -> "GaussianCloud":
        """The moments after `steps` steps of an ascent and a contraction, with the tokens as keys.

        Exact for whitening, `center`, `scalar` and `batch_norm`, under which the cloud stays Gaussian. For
        normalisations of single tokens it is a moment closure: after each step the distribution is replaced by the
        Gaussian with the same moments.

        Law: tests/laws/test_a_gaussian_cloud_is_the_limit_of_its_samples.py.
        """
        _check(self, ascent)
        m, C = self
        N = contraction_of(contraction, ascent.tau)
        d = m.shape[-1]
        eye = torch.eye(d, dtype=m.dtype, device=m.device)
        B = eye if ascent.B is None else ascent.B
        W = B if ascent.W_v is None else ascent.W_v
        tau, beta = (
            torch.as_tensor(t, dtype=m.dtype, device=m.device)[..., None, None] for t in (ascent.tau, ascent.beta)
        )
        skip = eye if ascent.residual else torch.zeros_like(eye)
        for _ in range(steps):
            A = skip + tau * beta * W @ C @ B.mT
            m, C = (A @ m.unsqueeze(-1) + tau * W @ m.unsqueeze(-1)).squeeze(-1), A @ C @ A.mT
            m, C = N.moments(m, (C + C.mT) / 2)
        return GaussianCloud(m, C)

    def flow(self, time: float, *, beta: float = 1.0) -> Float[Tensor, "*b d d"]:
        """The covariance (C^-1 - 2 beta t)^-1 after time t of attention in continuous time."""
        c, V = torch.linalg.eigh(self.covariance)
        if bool((2 * beta * time * c >= 1).any()):
            limit = float(self.blow_up_time(beta=beta).min())
            problem = f"time must be before the blow-up at {limit:.4g}, got {time}"
            raise InputValueError("GaussianCloud.flow", "time", problem, "Use an earlier time or a smaller beta.")
        return (V * (c / (1 - 2 * beta * time * c)).unsqueeze(-2)) @ V.mT

    def blow_up_time(self, *, beta: float = 1.0) -> Float[Tensor, "*b"]:
        """Time 1 / (2 beta c_max) at which the cloud diverges in continuous time; infinite for beta <= 0."""
        greatest = torch.linalg.eigvalsh(self.covariance)[..., -1]
        return torch.full_like(greatest, torch.inf) if beta <= 0 else 1 / (2 * beta * greatest)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "*b n d"]:
        """A cloud of n tokens drawn from this distribution, [*b, n, d]."""
        c, V = torch.linalg.eigh(self.covariance)
        root = V * c.clamp(min=0.0).sqrt().unsqueeze(-2)
        shape = (*self.mean.shape[:-1], n, self.mean.shape[-1])
        z = torch.randn(shape, dtype=self.mean.dtype, device=self.mean.device, generator=generator)
        return self.mean.unsqueeze(-2) + z @ root.mT


def _check(cloud: GaussianCloud, ascent: Ascent) -> None:
    check_floats("GaussianCloud", mean=cloud.mean, covariance=cloud.covariance)
    d = cloud.mean.shape[-1]
    if cloud.covariance.shape[-2:] != (d, d):
        condition, fact = f"covariance must be [*b, {d}, {d}]", f"shape {shape_of(cloud.covariance)}"
        raise InputValueError(
            "GaussianCloud", "covariance", f"{condition}, got {fact}", "Match the dimension of the mean."
        )
    for name, value in (("keys", ascent.keys), ("feed_forward", ascent.feed_forward)):
        if value is not None:
            problem = f"ascent with {name}= has no closed form for a Gaussian"
            raise InputTypeError("GaussianCloud", "ascent", problem, "Evolve a sample of the cloud.")
    if ascent.causal or (ascent.B is not None and ascent.B.ndim != 2):
        problem = (
            f"ascent with {'a causal mask' if ascent.causal else 'several heads'} has no closed form for a Gaussian"
        )
        raise InputTypeError("GaussianCloud", "ascent", problem, "Evolve a sample of the cloud.")
