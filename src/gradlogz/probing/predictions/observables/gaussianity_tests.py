"""Gaussianity statistics of tokens, and Gaussian samples over the same documents as their null.

    z         tokens on their leading principal axes, whitened by C^-1/2
    W²        = (1/n) sum_i (y_(i) - q_i)²      y: z along a direction, sorted;  q_i = Phi^-1((i - 1/2) / n)
    A²/n      = -1 - sum_i (2i-1)/n² [log Phi(y_(i)) + log Phi(-y_(n+1-i))]                                [anderson54]
    logistic  = (1/n) [log likelihood of the best logistic - that of the best normal distribution]
    null      x_i = u_document(i) + e_i,   u ~ N(0, B),  e ~ N(0, W)     B, W: covariances between and within documents

B and W are those of the analysis of variance: with document means m_d of n_d tokens, k documents and n tokens,

    W = sum_i (x_i - m_d)(x_i - m_d)ᵀ / (n - k),    B = (sum_d n_d (m_d - m)(m_d - m)ᵀ / (k - 1) - W) / n_0,
    n_0 = (n - sum_d n_d² / n) / (k - 1),           B without its negative directions

Read next: ../gaussianity.py.
"""

import math
from typing import NamedTuple

import torch

from ...._typing import Bool, Float, Int, Tensor
from ....dynamics.observables import OBSERVABLES
from ...statistics import ascending

COMPONENTS = 8  # leading axes; projections from many dimensions look Gaussian
DIRECTIONS = 16  # random directions in the span of these axes
FEW = 4  # of them for statistics that cost more than a sum of squares
RANDOM = 8  # random directions of all coordinates
SHARED = 8  # smallest number of tokens that share a mean
REPEATED = 0.25  # smallest share of tokens of repeated types for which the means of types are removed
LEFT = 1e-3  # smallest share of the variance that must remain

LARGEST, SLICED = "largest Wasserstein", "sliced Wasserstein"
AXES, PROJECTIONS = "Wasserstein of principal axes", "Wasserstein of random projections"
DARLING, LOGISTIC = "Anderson-Darling", "logistic against normal"


class ProjectedTokens(NamedTuple):
    """Tokens on `axes` whitened leading axes, then on standardised random directions of all coordinates.

    documents, groups: of each token. classes: numbers of the classes of tokens whose means are removed, in this order.
    """

    features: Float[Tensor, "n k"]
    axes: int
    documents: Int[Tensor, " n"]
    groups: Int[Tensor, " n"]
    classes: tuple[Int[Tensor, " n"], ...] = ()


def project(
    x: Float[Tensor, "n D"],
    documents: Int[Tensor, " n"],
    groups: Int[Tensor, " n"],
    classes: tuple[Int[Tensor, " n"], ...] = (),
) -> ProjectedTokens | None:
    """Project tokens for the comparison with a Gaussian, without the means of classes of tokens.

    None if the means of the classes leave almost nothing.
    """
    x = x if x.dtype == torch.float64 else x.float()
    x = x - x.mean(0, dtype=torch.float64).to(x.dtype)
    before = x.square().sum(dtype=torch.float64)
    for index in classes:
        x = without_means(x, index)
    if classes and float(x.square().sum(dtype=torch.float64)) <= LEFT * float(before):
        return None
    generator = torch.Generator().manual_seed(0)
    axes, spread = leading_axes(x, min(COMPONENTS, *x.shape), generator)
    directions = torch.randn(x.shape[1], RANDOM, generator=generator, dtype=x.dtype).to(x.device)
    # Directions of zero variance are left out.
    extends = spread > 1e-12 * spread[:1].clamp(min=torch.finfo(x.dtype).tiny)
    z = (x @ axes[:, extends]).double() / spread[extends].double().sqrt()
    p = (x @ directions).double()
    p = p / p.square().mean(0).sqrt().clamp(min=torch.finfo(x.dtype).tiny)
    return ProjectedTokens(torch.cat((z, p), 1), z.shape[1], documents, groups, classes)


def shape(features: Float[Tensor, "*b n k"], axes: int) -> dict[str, Float[Tensor, "*b"]]:
    """Shape statistics from features: the largest W² and means of W² over directions of each kind."""
    z = _whitened(features[..., :axes])
    p = features[..., axes:] - features[..., axes:].mean(-2, keepdim=True)
    p = p / p.square().mean(-2, keepdim=True).sqrt().clamp(min=torch.finfo(p.dtype).tiny)
    y = ascending(torch.cat((z @ _directions(z), z, p), -1).mT)
    W = _wasserstein(y)
    few = y[..., :FEW, :]
    return {
        LARGEST: W[..., : DIRECTIONS + axes].amax(-1),
        SLICED: W[..., :DIRECTIONS].mean(-1),
        AXES: W[..., DIRECTIONS : DIRECTIONS + axes].mean(-1),
        PROJECTIONS: W[..., DIRECTIONS + axes :].mean(-1),
        DARLING: anderson_darling(few).mean(-1),
        LOGISTIC: logistic_against_normal(few).mean(-1),
        "skewness": OBSERVABLES["skewness"](z, None, None),
        "kurtosis": OBSERVABLES["kurtosis"](z, None, None),
    }


def largest_square(features: Float[Tensor, "*b n k"], axes: int) -> Float[Tensor, "*b"]:
    """Largest W² over the axes and their random directions; the first statistic of `shape`."""
    z = _whitened(features[..., :axes])
    return _wasserstein(ascending(torch.cat((z @ _directions(z), z), -1).mT)).amax(-1)


def gaussian_samples(projected: ProjectedTokens, draws: int, generator: torch.Generator) -> Float[Tensor, "m n k"]:
    """Gaussian samples over the same documents, with the covariances between and within documents, in float32."""
    f = projected.features
    kinds, index = projected.documents.unique(return_inverse=True)
    B, W = (_root(C).float().cpu() for C in variances(f, index))
    u = torch.randn(draws, len(kinds), f.shape[1], generator=generator) @ B
    e = torch.randn(draws, *f.shape, generator=generator) @ W
    x = (u[:, index.cpu()] + e).to(f.device)
    for index_of_class in projected.classes:
        x = without_means(x, index_of_class)
    return x


def variances(f: Float[Tensor, "n k"], index: Int[Tensor, " n"]) -> tuple[Float[Tensor, "k k"], Float[Tensor, "k k"]]:
    """Covariances between and within documents; all is within if every document has one token."""
    n, count = len(f), torch.bincount(index).to(f.dtype)
    k = len(count)
    d = f - f.mean(0)
    means = torch.zeros(k, f.shape[1], dtype=f.dtype, device=f.device).index_add(0, index, d) / count.unsqueeze(-1)
    if k == 1 or k == n:
        return torch.zeros_like(d.mT @ d), d.mT @ d / n
    r = d - means[index]
    W = r.mT @ r / (n - k)
    between = (count.unsqueeze(-1) * means).mT @ means / (k - 1)
    n_0 = (n - count.square().sum() / n) / (k - 1)
    return (between - W) / n_0, W


def places_of(positions: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Group numbers of positions; neighbours are merged until SHARED tokens are in a group."""
    _, inverse, counts = positions.unique(return_inverse=True, return_counts=True)
    numbers, place, held = [], 0, 0
    for count in counts.tolist():
        numbers.append(place)
        held += count
        if held >= SHARED:
            place, held = place + 1, 0
    if held and place:
        numbers = [min(number, place - 1) for number in numbers]  # the last group joins the one before it
    return torch.tensor(numbers, device=positions.device)[inverse]


def repeated(types: Int[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """True for tokens of a type that occurs SHARED times or more."""
    _, inverse, counts = types.unique(return_inverse=True, return_counts=True)
    return counts[inverse] >= SHARED


def without_means(x: Float[Tensor, "*b n k"], places: Int[Tensor, " n"]) -> Float[Tensor, "*b n k"]:
    """(x - mean of the k tokens of its class) / sqrt(1 - 1/k), which keeps the covariance of i.i.d. tokens."""
    count = torch.bincount(places).to(x.dtype)
    sums = torch.zeros(*x.shape[:-2], len(count), x.shape[-1], dtype=x.dtype, device=x.device)
    means = sums.index_add(-2, places, x) / count.unsqueeze(-1)
    factor = (count / (count - 1).clamp(min=1.0)).sqrt()
    return (x - means.index_select(-2, places)) * factor[places].unsqueeze(-1)


def leading_axes(
    x: Float[Tensor, "n D"], k: int, generator: torch.Generator, *, rounds: int = 8
) -> tuple[Float[Tensor, "D k"], Float[Tensor, " k"]]:
    """Leading principal axes of centred tokens and their variances, by subspace iteration.

    Axes with nearly equal variances may be mixed with omitted ones; every choice is a valid projection.
    """
    wide = min(k + 8, *x.shape)
    single = (x / x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)).float()
    Q = torch.randn(x.shape[1], wide, generator=generator).to(x.device)
    for _ in range(rounds):
        Q = torch.linalg.qr(single.mT @ (single @ Q)).Q
    Q = torch.linalg.qr(Q.to(x.dtype)).Q
    y = x @ Q
    values, vectors = torch.linalg.eigh(y.mT @ y / len(x))
    return (Q @ vectors).flip(-1)[:, :k], values.flip(-1)[:k].clamp(min=0.0)


def anderson_darling(y: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """Anderson-Darling A² / n of sorted standardised numbers."""
    n = y.shape[-1]
    weight = (2 * torch.arange(1, n + 1, dtype=y.dtype, device=y.device) - 1) / n**2
    return -1 - (weight * (torch.special.log_ndtr(y) + torch.special.log_ndtr(-y.flip(-1)))).sum(-1)


def logistic_against_normal(y: Float[Tensor, "*b n"], *, rounds: int = 6) -> Float[Tensor, "*b"]:
    """Log likelihood ratio per token of the best logistic to the best normal distribution.

        -log f = log 4s + 2 log cosh u,   u = (y - m) / 2s

    Maximum by Fisher scoring; the information of m and log s is 1 / 3s² and (3 + π²) / 9.
    """
    m = y.mean(-1, keepdim=True)
    spread = (y - m).square().mean(-1, keepdim=True).clamp(min=torch.finfo(y.dtype).tiny)
    s = spread.sqrt() * (math.sqrt(3) / math.pi)
    for _ in range(rounds):
        u = (y - m) / (2 * s)
        t = u.tanh()
        m = m + 3 * s * t.mean(-1, keepdim=True)
        s = s * ((2 * (u * t).mean(-1, keepdim=True) - 1) * (9 / (3 + math.pi**2))).exp()
    u = ((y - m) / (2 * s)).abs()
    log_cosh = u + torch.log1p((-2 * u).exp()) - math.log(2)
    logistic = -(4 * s).log().squeeze(-1) - 2 * log_cosh.mean(-1)
    normal = -(2 * math.pi * math.e * spread).log().squeeze(-1) / 2
    return logistic - normal


def _directions(z: Tensor) -> Tensor:
    """Random unit directions, the same for all samples with this number of axes."""
    generator = torch.Generator().manual_seed(1)
    directions = torch.randn(z.shape[-1], DIRECTIONS, generator=generator, dtype=torch.float64)
    return (directions / directions.norm(dim=0)).to(z)


def _wasserstein(y: Float[Tensor, "*b n"]) -> Float[Tensor, "*b"]:
    """W² of sorted numbers to N(0, 1)."""
    n = y.shape[-1]
    quantiles = torch.special.ndtri((torch.arange(n, dtype=torch.float64) + 0.5) / n).to(y)
    return (y - quantiles).square().mean(-1)


def _whitened(z: Float[Tensor, "*b n k"]) -> Float[Tensor, "*b n k"]:
    """z C^-1/2, the whitening closest to the identity, so that subsamples keep the axes."""
    d = z - z.mean(-2, keepdim=True)
    values, vectors = torch.linalg.eigh(d.mT @ d / z.shape[-2])
    scale = values.clamp(min=1e-6 * values[..., -1:]).clamp(min=torch.finfo(z.dtype).tiny).rsqrt()
    return d @ ((vectors * scale.unsqueeze(-2)) @ vectors.mT)


def _root(C: Float[Tensor, "k k"]) -> Float[Tensor, "k k"]:
    """Symmetric root of the positive part of a matrix."""
    values, vectors = torch.linalg.eigh(C)
    return (vectors * values.clamp(min=0.0).sqrt()) @ vectors.mT
