"""Contractions: normalisations of tokens and of clouds between two steps of attention.

    center        x - m                                         m, C the mean and covariance of the cloud
    scalar        (x - m) sqrt(d / tr C)                        one scale for all coordinates
    batch_norm    (x - m) / sqrt(diag C)                        one scale for each coordinate
    whitening     m* + C*^(1/2) O C^(-1/2) (x - m)              full covariance; O orthogonal            [theory 4.1]
    sphere        r x / |x|                                     each token separately; rms_norm: r = sqrt(d)
    layer_norm    gain rms_norm(x - (1·x / d) 1) + bias         on the subspace where coordinates sum to 0
    shrinkage     x / (1 + tau)                                 the damped Hopfield update               [theory 5.6]
    inverse_step  A^-1 (x - b)                                  undoes the step A x + b on Gaussian keys [theory 4.3]
    recoloring    whitening to the moments of Theorem 1         of Gaussian keys                         [theory 4.1]

On keys N(mu, Sigma) the step is (I + tau Sigma) x + tau mu, and `inverse_step` its resolvent (I + tau ∇G)^-1.
Each maps tokens and, in closed form, the moments of a Gaussian cloud.

Read next: evolution.py (attention steps), gaussian_cloud.py (closed forms).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from .._errors import InputTypeError, InputValueError, has_values, shape_of
from .._typing import Float, Tensor


class Contraction(ABC):
    """A map of clouds, and of the moments of a Gaussian to those of its image."""

    @abstractmethod
    def __call__(self, cloud: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        """The contracted cloud, [*b, n, d]."""

    @abstractmethod
    def moments(
        self, mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]
    ) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
        """Mean and covariance of the image of a Gaussian."""


@dataclass(frozen=True)
class Affine(Contraction):
    """A contraction that is affine given the moments of the cloud: x -> target + A (x - m)."""

    def __call__(self, cloud: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        mean, covariance = moments_of(cloud)
        A, target = self._map(mean, covariance)
        return target.unsqueeze(-2) + (cloud - mean.unsqueeze(-2)) @ A.mT

    def moments(
        self, mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]
    ) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
        A, target = self._map(mean, covariance)
        return target, A @ covariance @ A.mT

    @abstractmethod
    def _map(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix A and the new mean."""


@dataclass(frozen=True)
class Nothing(Affine):
    """Leave the cloud unchanged."""

    def _map(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        return torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device), mean


@dataclass(frozen=True)
class Center(Affine):
    """Subtract the mean of the cloud."""

    def _map(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        return torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device), torch.zeros_like(mean)


@dataclass(frozen=True)
class Shrinkage(Affine):
    """Divide by 1 + tau; an ascent followed by this contraction is a damped Hopfield update."""

    tau: float | Tensor

    def _map(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        eye = torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)
        if not isinstance(self.tau, Tensor):
            return eye / (1 + self.tau), mean / (1 + self.tau)
        factor = 1 / (1 + self.tau.to(mean))
        return factor[..., None, None] * eye, factor[..., None] * mean


@dataclass(frozen=True)
class InverseStep(Contraction):
    """The inverse A^-1 (x - b) of an affine step A x + b, so that step and contraction leave every cloud unchanged.

    `Ascent.inverse_step()` makes it for fixed Gaussian keys.
    """

    matrix: Float[Tensor, "*#b d d"]
    shift: Float[Tensor, "*#b d"]

    def __post_init__(self) -> None:
        _, info = torch.linalg.inv_ex(self.matrix)
        if has_values(info) and bool((info != 0).any()):
            problem = "the matrix of the step is singular, so that no contraction can undo it"
            raise InputValueError("InverseStep", "matrix", problem, "Choose another step size tau.")

    def __call__(self, cloud: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return torch.linalg.solve(self.matrix, (cloud - self.shift.unsqueeze(-2)).mT).mT

    def moments(
        self, mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]
    ) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
        new_mean = torch.linalg.solve(self.matrix, (mean - self.shift).unsqueeze(-1)).squeeze(-1)
        half = torch.linalg.solve(self.matrix, covariance)
        return new_mean, torch.linalg.solve(self.matrix, half.mT)


@dataclass(frozen=True)
class Scalar(Affine):
    """Subtract the mean and scale the average variance of the coordinates to 1."""

    def _map(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        d = mean.shape[-1]
        trace = covariance.diagonal(dim1=-2, dim2=-1).sum(-1)
        _check_spread("scalar", trace, "distinct tokens")
        eye = torch.eye(d, dtype=mean.dtype, device=mean.device)
        return (d / trace).sqrt()[..., None, None] * eye, torch.zeros_like(mean)


@dataclass(frozen=True)
class BatchNorm(Affine):
    """Subtract the mean and scale the variance of every coordinate to 1."""

    def _map(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        variances = covariance.diagonal(dim1=-2, dim2=-1)
        _check_spread("batch_norm", variances.amin(-1), "variance in every coordinate")
        return torch.diag_embed(variances.rsqrt()), torch.zeros_like(mean)


@dataclass(frozen=True)
class Whitening(Affine):
    """Map the mean and covariance to those of a target, by default 0 and the identity.

    The square roots of a covariance differ by an orthogonal O: "zca" has O = I, "monge" moves the tokens least, "pca"
    rotates to the principal axes, "cholesky" is triangular. A Gaussian cloud has the same distribution under all.
    """

    kind: Literal["zca", "pca", "cholesky", "monge"] = "zca"
    mean: Tensor | None = None
    covariance: Tensor | None = None

    def _map(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        target = torch.zeros_like(mean) if self.mean is None else self.mean.expand_as(mean)
        values, vectors = torch.linalg.eigh(covariance)
        d, eps = values.shape[-1], torch.finfo(values.dtype).eps
        _check_spread("whitening", values[..., 0] - d * eps * values[..., -1], f"a covariance of full rank {d}")
        root = _power(covariance, 0.5) if self.kind == "monge" else None
        wanted = None if self.covariance is None else self.covariance.expand_as(covariance)
        if self.kind == "monge" and root is not None:
            inverse = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT
            between = covariance if wanted is None else root @ wanted @ root
            return inverse @ _power(between, 0.5) @ inverse, target
        if self.kind == "zca":
            whiten = (vectors * values.rsqrt().unsqueeze(-2)) @ vectors.mT
        elif self.kind == "pca":
            whiten = values.rsqrt().unsqueeze(-1) * _signed(vectors).mT
        else:
            whiten = torch.linalg.inv(torch.linalg.cholesky(covariance))
        return whiten if wanted is None else _power(wanted, 0.5) @ whiten, target


@dataclass(frozen=True)
class SphereProjection(Contraction):
    """Project every token to a sphere, by default of radius sqrt(d). A token at 0 stays there."""

    radius: float | None = None

    def __call__(self, cloud: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        return self._radius(cloud) * torch.nn.functional.normalize(cloud, dim=-1, eps=torch.finfo(cloud.dtype).tiny)

    def moments(
        self, mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]
    ) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
        r = self._radius(mean)
        first, second = projected_moments(mean, covariance)
        return r * first, r**2 * (second - first.unsqueeze(-1) * first.unsqueeze(-2))

    def _radius(self, like: Tensor) -> float:
        return math.sqrt(like.shape[-1]) if self.radius is None else self.radius


@dataclass(frozen=True)
class LayerNorm(Contraction):
    """Subtract the mean of the coordinates of each token, scale its length to sqrt(d); then gain and bias.

    Args:
        gain: factor of each coordinate [d]; default: 1.
        bias: added to each coordinate [d]; default: 0.
        eps: added to the mean square of the coordinates; closed-form moments need 0.
        centres: False for RMSNorm, which does not subtract the mean.
    """

    gain: Float[Tensor, " d"] | None = None
    bias: Float[Tensor, " d"] | None = None
    eps: float = 0.0
    centres: bool = True

    def __call__(self, cloud: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        gain, bias = self._parameters(cloud)
        x = cloud - cloud.mean(-1, keepdim=True) if self.centres else cloud
        if self.eps == 0:
            return gain * SphereProjection()(x) + bias
        return gain * x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() + bias

    def moments(
        self, mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]
    ) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
        if self.eps != 0:
            problem = f"the moments of a Gaussian have a closed form for eps = 0 only, got {self.eps}"
            raise InputValueError("LayerNorm.moments", "eps", problem, "Leave eps out.")
        d = mean.shape[-1]
        P = torch.eye(d, dtype=mean.dtype, device=mean.device) - self.centres / d
        m, C = SphereProjection().moments(mean @ P, P @ covariance @ P)
        gain, bias = self._parameters(mean)
        return gain * m + bias, gain.unsqueeze(-1) * C * gain

    def _parameters(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Gain and bias, checked and in the dtype of the tokens."""
        d = like.shape[-1]
        for name, t in (("gain", self.gain), ("bias", self.bias)):
            if t is not None and t.shape != (d,):
                problem = f"{name} must have one entry for each of {d} coordinates, got shape {shape_of(t)}"
                raise InputValueError("LayerNorm", name, problem, "Match the dimension of the cloud.")
        gain = like.new_ones(d) if self.gain is None else self.gain.to(like)
        return gain, like.new_zeros(d) if self.bias is None else self.bias.to(like)


@dataclass(frozen=True)
class Composed(Contraction):
    """Apply several contractions in order."""

    parts: tuple[Contraction, ...]

    def __call__(self, cloud: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        for part in self.parts:
            cloud = part(cloud)
        return cloud

    def moments(
        self, mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]
    ) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
        for part in self.parts:
            mean, covariance = part.moments(mean, covariance)
        return mean, covariance


@dataclass(frozen=True)
class _Function(Contraction):
    """A contraction defined by a user's function of the cloud."""

    function: Callable[[Tensor], Tensor]

    def __call__(self, cloud: Float[Tensor, "*b n d"]) -> Float[Tensor, "*b n d"]:
        image = self.function(cloud)
        if not isinstance(image, Tensor) or image.shape != cloud.shape:
            fact = f"shape {shape_of(image)}" if isinstance(image, Tensor) else type(image).__name__
            condition = f"contraction must return a cloud of the same shape {shape_of(cloud)}"
            raise InputValueError(
                "evolve", "contraction", f"{condition}, got {fact}", "Return one token for each token of the cloud."
            )
        return image

    def moments(self, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
        problem = "contraction has no closed form for a Gaussian, because it is a function of tokens"
        remedy = "Pass a contraction by name, or evolve a sample of the cloud."
        raise InputTypeError("GaussianCloud", "contraction", problem, remedy)


NAMES: dict[str, Contraction] = {
    "none": Nothing(),
    "center": Center(),
    "scalar": Scalar(),
    "batch_norm": BatchNorm(),
    "zca": Whitening("zca"),
    "pca": Whitening("pca"),
    "cholesky": Whitening("cholesky"),
    "monge": Whitening("monge"),
    "sphere": SphereProjection(1.0),
    "rms_norm": SphereProjection(),
    "layer_norm": LayerNorm(),
}

STEP_NAMES = ("shrinkage", "inverse_step", "recoloring")  # contractions that depend on the step

ContractionLike = str | Contraction | Callable[[Tensor], Tensor] | tuple["ContractionLike", ...]


@runtime_checkable
class GaussianStep(Protocol):
    """A step on Gaussian keys, and the contractions that it determines."""

    def inverse_step(self) -> Contraction: ...
    def recoloring(self) -> Contraction: ...


def contraction_of(contraction: ContractionLike, tau: float | Tensor, step: GaussianStep | None = None) -> Contraction:
    """The contraction for a name, a function, a `Contraction`, or a tuple of these, applied in order.

    step: the ascent that the contraction follows, for `inverse_step` and `recoloring`.
    """
    if isinstance(contraction, Contraction):
        return contraction
    if isinstance(contraction, tuple | list):
        return Composed(tuple(contraction_of(part, tau, step) for part in contraction))
    if isinstance(contraction, str):
        if contraction == "shrinkage":
            return Shrinkage(tau)
        if step is not None and contraction in STEP_NAMES:
            return step.inverse_step() if contraction == "inverse_step" else step.recoloring()
        if contraction not in NAMES:
            remedy = f"Use one of {', '.join([*NAMES, *STEP_NAMES])}, or a function."
            raise InputValueError("evolve", "contraction", f"contraction {contraction!r} is not a known name", remedy)
        return NAMES[contraction]
    if not callable(contraction):
        remedy = "Pass a name, a function of a cloud, or a tuple of these."
        raise InputTypeError(
            "evolve",
            "contraction",
            f"contraction must be a name or a function, got {type(contraction).__name__}",
            remedy,
        )
    return _Function(contraction)


def moments_of(cloud: Float[Tensor, "*b n d"]) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
    """Mean and covariance of the tokens, with weights 1 / n."""
    mean = cloud.mean(-2)
    centered = cloud - mean.unsqueeze(-2)
    return mean, centered.mT @ centered / cloud.shape[-2]


def projected_moments(
    mean: Float[Tensor, "*b d"], covariance: Float[Tensor, "*b d d"]
) -> tuple[Float[Tensor, "*b d"], Float[Tensor, "*b d d"]]:
    """E[u] and E[u u^T] of u = y / |y| for y ~ N(mean, covariance), which may be singular.

        E[u]     = pi^(-1/2) ∫ t^(-1/2) det(R)^(1/2) exp(-t <m, R m>) R m dt             R(t) = (I + 2 t C)^-1
        E[u u^T] =           ∫          det(R)^(1/2) exp(-t <m, R m>) (C R + R m m^T R) dt        [theory 4.4]

    In log t the integrands are analytic in a strip of half width pi and decay on both sides, so the trapezoidal rule is
    exact to rounding.
    """
    c, V = torch.linalg.eigh(covariance)
    c, m = c.clamp(min=0.0), (V.mT @ mean.unsqueeze(-1)).squeeze(-1)
    step, ends = 0.4, 90.0
    z = torch.arange(-ends, ends + step, step, dtype=c.dtype, device=c.device)
    size = 2 * (c.amax(-1) + m.square().sum(-1))
    _check_spread("sphere", size, "tokens away from 0")
    t = z.exp() / size.unsqueeze(-1)  # [*b, nodes]
    r = 1 / (1 + 2 * t.unsqueeze(-1) * c.unsqueeze(-2))  # [*b, nodes, d]
    rm = r * m.unsqueeze(-2)
    log_weight = 0.5 * r.log().sum(-1) - t * (rm * m.unsqueeze(-2)).sum(-1) + t.log() + math.log(step)
    first = ((log_weight - 0.5 * t.log()).exp() / math.sqrt(math.pi)).unsqueeze(-2) @ rm
    w = log_weight.exp().unsqueeze(-1)
    second = torch.diag_embed((w * r * c.unsqueeze(-2)).sum(-2)) + (w * rm).mT @ rm
    return (first @ V.mT).squeeze(-2), V @ second @ V.mT


def _power(matrix: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values.clamp(min=0.0).pow(exponent).unsqueeze(-2)) @ vectors.mT


def _signed(vectors: Tensor) -> Tensor:
    """Eigenvectors with the sign chosen so that the largest entry is positive."""
    largest = vectors.gather(-2, vectors.abs().argmax(-2, keepdim=True))
    return vectors * torch.where(largest < 0, -1.0, 1.0)


def _check_spread(name: str, spread: Tensor, needed: str) -> None:
    if not torch.compiler.is_compiling() and bool((spread <= 0).any()):
        problem = f"{name} needs a cloud with {needed}, but {int((spread <= 0).sum())} of {spread.numel()} lack this"
        remedy = "Use more tokens than dimensions, or a contraction of single tokens such as rms_norm."
        raise InputValueError("evolve", "cloud", problem, remedy)
