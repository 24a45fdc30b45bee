"""A Gaussian cloud under attention, by its two moments.

    x' = (I + tau beta W C B^T) x + tau W m            attention to N(m, C) is affine               [shim22, Cor. 1]
    m' = m + tau W (m + beta C B^T m)
    C' = (I + tau beta W C B^T) C (I + tau beta W C B^T)^T                                            [theory 4.4]

Without a contraction and with the identity for B, in continuous time, C(t)^-1 = C(0)^-1 - 2 beta t: the precision falls
linearly, and the cloud is infinite at 1 / (2 beta c_max). For a cloud of n tokens this holds while a token's weight on
itself is small (growth.self_weight).

Read next: contraction.py (the moments of what is contracted), growth.py (whether the Gaussian stays one).
"""

from typing import NamedTuple

import torch

from .._errors import InputTypeError, InputValueError, check_floats, shape_of
from .._typing import Float, Tensor
from .contraction import Given, contraction_of
from .evolution import Ascent


class GaussianCloud(NamedTuple):
    """The law N(mean, covariance) of infinitely many tokens; iterates as `evolve` does, without a sample."""

    mean: Float[Tensor, "*b d"]
    covariance: Float[Tensor, "*b d d"]

    def evolve(self, ascent: Ascent, *, contraction: Given = "none", steps: int = 1) -> "GaussianCloud":
        """The moments after some steps of an ascent and a contraction, tokens attending to the cloud itself.

        Exact for whitening, centring, scalars and batch norm as long as the law is Gaussian, which these keep it. Norms
        of single tokens do not: for them it is the moment closure, the law after each step replaced by the Gaussian of
        its exact moments.

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
        own = eye if ascent.residual else torch.zeros_like(eye)
        for _ in range(steps):
            A = own + tau * beta * W @ C @ B.mT
            m, C = (A @ m.unsqueeze(-1) + tau * W @ m.unsqueeze(-1)).squeeze(-1), A @ C @ A.mT
            m, C = N.moments(m, (C + C.mT) / 2)
        return GaussianCloud(m, C)

    def flow(self, time: float, *, beta: float = 1.0) -> Float[Tensor, "*b d d"]:
        """The covariance after that time of attention in continuous time: (C^-1 - 2 beta t)^-1."""
        c, V = torch.linalg.eigh(self.covariance)
        if bool((2 * beta * time * c >= 1).any()):
            fact = f"{time} and a cloud that is infinite at {float(self.blow_up_time(beta=beta).min()):.4g}"
            remedy = "Ask for an earlier time, or a smaller beta."
            raise InputValueError("GaussianCloud.flow", "time", f"time must be before the blow-up, got {fact}", remedy)
        return (V * (c / (1 - 2 * beta * time * c)).unsqueeze(-2)) @ V.mT

    def blow_up_time(self, *, beta: float = 1.0) -> Float[Tensor, "*b"]:
        """When the cloud is infinite in continuous time: 1 / (2 beta c_max), infinity for beta <= 0."""
        greatest = torch.linalg.eigvalsh(self.covariance)[..., -1]
        return torch.full_like(greatest, torch.inf) if beta <= 0 else 1 / (2 * beta * greatest)

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Float[Tensor, "*b n d"]:
        """A cloud of n tokens with this law."""
        c, V = torch.linalg.eigh(self.covariance)
        root = V * c.clamp(min=0.0).sqrt().unsqueeze(-2)
        shape = (*self.mean.shape[:-1], n, self.mean.shape[-1])
        z = torch.randn(shape, dtype=self.mean.dtype, device=self.mean.device, generator=generator)
        return self.mean.unsqueeze(-2) + z @ root.mT


def _check(cloud: GaussianCloud, ascent: Ascent) -> None:
    check_floats("GaussianCloud", mean=cloud.mean, covariance=cloud.covariance)
    d = cloud.mean.shape[-1]
    if cloud.covariance.shape[-2:] != (d, d):
        condition, fact = f"covariance must end in [{d}, {d}]", f"shape {shape_of(cloud.covariance)}"
        raise InputValueError(
            "GaussianCloud", "covariance", f"{condition}, got {fact}", "Its side is the size of the mean."
        )
    for name, given in (("keys", ascent.keys), ("feed_forward", ascent.feed_forward)):
        if given is not None:
            remedy = "Evolve a sample of it."
            raise InputTypeError("GaussianCloud", "ascent", f"ascent must have no {name}, got some", remedy)
    if ascent.causal or (ascent.B is not None and ascent.B.ndim != 2):
        fact = "a causal mask" if ascent.causal else "several heads"
        remedy = "Evolve a sample of it."
        raise InputTypeError(
            "GaussianCloud", None, f"every token must see the same law by one head, got {fact}", remedy
        )
