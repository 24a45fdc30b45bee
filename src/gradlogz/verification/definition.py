"""Statistics of a measure by definition: the right-hand sides of the statements, without the library.

    Z       = sum_n w_n exp<x_n, eta>            over the points of a measure, or over the nodes of a quadrature rule
    mean    = sum_n p_n x_n,  p_n = w_n exp<x_n, eta> / Z
    cov     = sum_n p_n x_n x_n^T - mean mean^T

Integrals are trapezoidal sums of analytic, decaying integrands on the whole line, exact to rounding error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import torch

from .._typing import Float, Tensor
from ..measures import Measure
from .statement import gap

FLOAT = torch.float64


_DRAW: ContextVar[int] = ContextVar("draw", default=0)


@contextmanager
def other_numbers(draw: int) -> Iterator[None]:
    """Evaluate statements at other random points within this context; draw 0 is the default."""
    token = _DRAW.set(draw)
    try:
        yield
    finally:
        _DRAW.reset(token)


def generator(seed: int) -> torch.Generator:
    """Random generator for this seed and the current draw of `other_numbers`."""
    return torch.Generator().manual_seed(seed + 1000 * _DRAW.get())


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, reproducible from the seed."""
    return torch.randn(shape, generator=generator(seed), dtype=FLOAT)


def uniform(low: float, high: float, *shape: int, seed: int = 0) -> Tensor:
    """Numbers evenly distributed between two bounds, reproducible from the seed."""
    return low + (high - low) * torch.rand(shape, generator=generator(seed), dtype=FLOAT)


def number(*values: float) -> Tensor:
    """A float64 tensor of these values."""
    return torch.tensor(values if len(values) > 1 else values[0], dtype=FLOAT)


def spread(d: int, *, seed: int = 0) -> Float[Tensor, "d d"]:
    """Random covariance matrix, [d, d]."""
    a = normal(d, d, seed=seed)
    return a @ a.T / d + 0.3 * torch.eye(d, dtype=FLOAT)


def power(matrix: Float[Tensor, "d d"], exponent: float) -> Float[Tensor, "d d"]:
    """A power of a symmetric positive matrix, such as its root."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * values**exponent) @ vectors.T


class Nodes(NamedTuple):
    """Points with log masses: a discrete measure, or a quadrature rule for a continuous one."""

    points: Float[Tensor, "n d"]
    log_masses: Float[Tensor, "n"]


class Definition(NamedTuple):
    """The statistics of a discrete measure at natural parameters eta [m, d]."""

    log_normalizer: Float[Tensor, "m"]
    probabilities: Float[Tensor, "m n"]
    mean: Float[Tensor, "m d"]
    covariance: Float[Tensor, "m d d"]


def by_definition(nodes: Nodes, eta: Float[Tensor, "m d"]) -> Definition:
    """Z, p, mean and covariance as sums over nodes."""
    x, log_w = nodes
    s = eta @ x.T + log_w
    peak = s.amax(-1, keepdim=True)
    Z = (s - peak).exp().sum(-1, keepdim=True)
    p = (s - peak).exp() / Z
    mean = p @ x
    second = torch.einsum("mn,nd,ne->mde", p, x, x)
    return Definition((Z.log() + peak).squeeze(-1), p, mean, second - mean.unsqueeze(-1) * mean.unsqueeze(-2))


def softmax_average(
    eta: Float[Tensor, "m d"], points: Float[Tensor, "n d"], beta: float = 1.0, log_weights: Tensor | None = None
) -> Float[Tensor, "m d"]:
    """Attention to points, Σ_j a_ij x_j with a_ij ∝ w_j exp(beta <eta_i, x_j>), by sums."""
    logits = beta * eta @ points.T + (0.0 if log_weights is None else log_weights)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights @ points / weights.sum(-1, keepdim=True)


def line(low: float, high: float, count: int = 2001) -> tuple[Tensor, Tensor]:
    """Evenly spaced points of an interval and the logarithm of their spacing."""
    y = torch.linspace(low, high, count, dtype=FLOAT)
    return y, (y[1] - y[0]).log()


def plane(low: float, high: float, count: int = 201) -> tuple[Tensor, Tensor]:
    """A square grid [n, 2] and the logarithm of the area of its cells."""
    y, log_step = line(low, high, count)
    return torch.cartesian_prod(y, y), 2 * log_step


def gaussian_nodes(mu: Float[Tensor, "2"], Sigma: Float[Tensor, "2 2"], ends: float = 14.0, count: int = 41) -> Nodes:
    """Quadrature nodes of N(mu, Sigma) in the plane, up to `ends` standard deviations."""
    z, log_area = plane(-ends, ends, count)
    return Nodes(mu + z @ power(Sigma, 0.5), log_area - (z**2).sum(-1) / 2 - number(2 * torch.pi).log())


def distance(h: Measure, nodes: Nodes, eta: Float[Tensor, "m d"]) -> float:
    """Largest residual of all statistics of a measure against sums over these nodes, relative to their scales."""
    truth, flipped = by_definition(nodes, eta), by_definition(nodes, eta.flip(0))
    v, w = normal(*eta.shape, seed=11), normal(*eta.shape, seed=12)
    G, p, mean, cov = truth
    size = float(mean.abs().max() + cov.abs().max().sqrt())
    scale = 1 + float(G.abs().max()) + float(eta.abs().max()) * size
    away = nodes.points - mean.unsqueeze(-2)
    third = torch.einsum(
        "mn,mnd,mn,mn->md", p, away, (away @ v.unsqueeze(-1))[..., 0], (away @ w.unsqueeze(-1))[..., 0]
    )
    kl = flipped.log_normalizer - G - (mean * (eta.flip(0) - eta)).sum(-1)
    return max(
        gap(h.log_normalizer(eta), G, scale),
        gap(h.mean(eta), mean, scale * size),
        gap(h.covariance(eta), cov, scale * size**2),
        gap(h.covariance_product(eta, v), (cov @ v.unsqueeze(-1))[..., 0], 8 * scale * size**2),
        gap(h.third_cumulant(eta, v, w), third, 64 * scale * (size**3 + float(third.abs().max()))),
        gap(h.relative_entropy(eta), (eta * mean).sum(-1) - G, scale),
        gap(h.kl(eta, eta.flip(0)), kl, 4 * scale),
        gap(h.log_density(v, eta), (v * eta).sum(-1) - G, 4 * scale),
        gap((cov @ h.natural_gradient(eta).unsqueeze(-1))[..., 0], _within(cov, mean), 1e3 * scale * size),
    )


def _within(cov: Tensor, mean: Tensor) -> Tensor:
    """Projection of the mean on the range of the covariance."""
    values, vectors = torch.linalg.eigh(cov)
    basis = vectors * (values > 1e-9 * values[..., -1:]).unsqueeze(-2)
    return (basis @ (basis.mT @ mean.unsqueeze(-1))).squeeze(-1)
