"""Mean and covariance of a Gaussian cloud under attention, in closed form.

    x' = (I + tau beta W C B^T) x + tau W m            attention to N(m, C) is affine               [shim22, Cor. 1]
    m' = m + tau W (m + beta C B^T m)
    C' = (I + tau beta W C B^T) C (I + tau beta W C B^T)^T                                            [theory 4.4]

Without a contraction and with B = I, in continuous time C(t)^-1 = C(0)^-1 - 2 beta t: the precision falls linearly, and
the cloud diverges at time 1 / (2 beta c_max). For n tokens this holds while the weight of a token on itself is small
(growth.self_weight).

With fixed Gaussian keys N(mu, Sigma) the same step has mu and Sigma in place of m and C, and stays affine. With other
fixed keys, points or a measure, the moments after a step are integrals over N(m, C), computed by quadrature in at most
four dimensions: a moment closure.

Read next: attention_step.py (the affine step), contraction.py (moments under a contraction), growth.py (stability).
"""

from typing import NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from ..measures.gaussian import Gaussian
from .attention_step import gaussian_moments
from .contraction import ContractionLike, contraction_of
from .evolution import Ascent

ENDS, AXIS = 8.5, 201  # standard deviations and nodes of the quadrature in each dimension
NODES = 1 << 18  # in all dimensions together
LARGEST = 4  # dimensions in which such a grid is fine enough


class GaussianCloud(NamedTuple):
    """The distribution N(mean, covariance) of infinitely many tokens, evolved by its moments instead of a sample."""

    mean: Float[Tensor, "*b d"]
    covariance: Float[Tensor, "*b d d"]

    def evolve(self, ascent: Ascent, *, contraction: ContractionLike = "none", steps: int = 1) -> "GaussianCloud":
        """The moments after `steps` steps of an ascent and a contraction.

        Exact for Gaussian keys or the tokens as keys, and whitening, `center`, `scalar`, `batch_norm`, `shrinkage`,
        `inverse_step` or `recoloring`, under which the cloud stays Gaussian. For normalisations of single tokens, and
        for other fixed keys in at most four dimensions, it is a moment closure: after each step the distribution is
        replaced by the Gaussian with the same moments.

        Law: tests/laws/test_a_gaussian_cloud_is_the_limit_of_its_samples.py.
        """
        _check(self, ascent)
        m, C = self
        N = contraction_of(contraction, ascent.tau, ascent)
        for _ in range(steps):
            if ascent.keys is None or isinstance(ascent.keys, Gaussian):
                keys = (m, C) if ascent.keys is None else gaussian_moments(ascent.keys)
                A, b, noise = ascent.affine(*keys)
                m, C = (A @ m.unsqueeze(-1)).squeeze(-1) + b, A @ C @ A.mT
                C = C if noise is None else C + noise
            else:
                m, C = _integrated(m, C, ascent)
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
    fixed = ascent.keys is not None and not isinstance(ascent.keys, Gaussian)
    for name, present in (
        ("feed_forward=", ascent.feed_forward is not None),
        ("heads=", ascent.heads is not None),
        ("causal=", ascent.causal),
        ("draws= from keys that are not Gaussian", fixed and ascent.draws is not None),
        (f"keys that are not Gaussian in more than {LARGEST} dimensions", fixed and d > LARGEST),
    ):
        if present:
            problem = f"ascent with {name} has no closed form for a Gaussian"
            raise InputTypeError("GaussianCloud", "ascent", problem, "Evolve a sample of the cloud.")


def _integrated(m: Tensor, C: Tensor, ascent: Ascent) -> tuple[Tensor, Tensor]:
    """Moments after a step, integrated over N(m, C) on a grid along the axes of C."""
    d = m.shape[-1]
    # The trapezoidal rule converges exponentially: log normalisers are analytic in a strip around the real axis.
    axis = torch.linspace(-ENDS, ENDS, min(AXIS, int(NODES ** (1 / d))), dtype=m.dtype, device=m.device)
    grid = torch.cartesian_prod(*[axis] * d).reshape(-1, d)
    w = (-grid.square().sum(-1) / 2).softmax(-1).unsqueeze(-1)
    values, vectors = torch.linalg.eigh(C)
    root = vectors * values.clamp(min=0.0).sqrt().unsqueeze(-2)
    x = m.unsqueeze(-2) + grid @ root.mT
    tau = torch.as_tensor(ascent.tau, dtype=m.dtype, device=m.device)[..., None, None]
    y = tau * ascent.direction(x)[0] + (x if ascent.residual else 0.0)
    mean = (w * y).sum(-2)
    centered = y - mean.unsqueeze(-2)
    return mean, (w * centered).mT @ centered
