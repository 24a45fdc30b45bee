"""Conversion between torch.distributions and measures.

    from_distribution(p)         distribution of the sufficient statistic of p, as a measure
    to_distribution(h, eta)      the tilted distribution P_eta, as a torch distribution

    to_distribution(from_distribution(p), 0) is p again; Exponential, Poisson and Categorical are returned as Gamma,
    Poisson and OneHotCategorical with one more coordinate.

Read next: statistic.py (the table of families), exponential.py.
"""

import torch
from torch import distributions as D

from .._errors import InputTypeError
from .._typing import Float, Tensor
from .exponential import Gamma, OneHot, Poisson
from .gaussian import Gaussian
from .measure import Measure, check_measures
from .statistic import Statistic
from .validation import arrange
from .wishart import Wishart, smat


def from_distribution(p: D.Distribution) -> Measure:
    """Distribution of the sufficient statistic of p, as a measure whose tilts are the family of p.

    Supports Normal, Exponential, Gamma, Beta, Dirichlet, Bernoulli, Categorical and Poisson. The measure of a Normal is
    on (y, y²), that of a Gamma on (log y, y); statistic.py has the table. For the distribution of y itself use
    Gaussian, Gamma and the other classes directly.

    >>> import torch
    >>> h = from_distribution(torch.distributions.Bernoulli(torch.tensor(0.5)))
    >>> torch.allclose(h.mean(torch.tensor([2.0])), torch.tensor([2.0]).sigmoid())
    True
    """
    match p:
        case D.Normal():
            precision = p.scale**-2
            return Statistic(torch.stack((p.loc * precision, -precision / 2), -1), family="normal")
        case D.Exponential():
            rate = p.rate.unsqueeze(-1)
            return Gamma(torch.ones_like(rate), rate)
        case D.Gamma() if type(p) is D.Gamma:
            return Statistic(torch.stack((p.concentration, -p.rate), -1), family="gamma")
        case D.Beta():
            return Statistic(torch.stack((p.concentration1, p.concentration0), -1), family="beta")
        case D.Dirichlet():
            return Statistic(p.concentration, family="dirichlet")
        case D.Bernoulli():
            return Statistic(p.logits.unsqueeze(-1), family="bernoulli")
        case D.Categorical():
            return OneHot(p.logits)
        case D.Poisson():
            return Poisson(p.rate.unsqueeze(-1))
    known = "Normal, Exponential, Gamma, Beta, Dirichlet, Bernoulli, Categorical or Poisson"
    remedy = "Define a measure by its log normaliser (docs/adding_a_measure.md)."
    raise InputTypeError("from_distribution", "p", f"p must be a {known}, got {type(p).__name__}", remedy)


def to_distribution(h: Measure, eta: Float[Tensor, "*bm d"]) -> D.Distribution:
    """P_eta as a torch distribution, for a Statistic, Gaussian, Gamma, Poisson, OneHot or Wishart.

    For a `Statistic` it is the distribution of y, not of its statistic. Independent coordinates become an Independent.

    >>> import torch
    >>> from gradlogz import Gaussian
    >>> to_distribution(Gaussian.diagonal(torch.zeros(2), torch.ones(2)), torch.ones(2)).mean
    tensor([1., 1.])
    """
    check_measures("to_distribution", h=h)
    (flat,), restore = arrange(h, "to_distribution", natural=("eta",), eta=eta)
    eta = restore(flat, 1)  # with the batch of the measure, also where its own has size 1
    match h:
        case Statistic():
            return _member(h.family, _beside(h.natural, eta, h) + eta)
        case Gaussian():
            return D.MultivariateNormal(h.mean(eta), h.covariance(eta))
        case Gamma():
            rate = _beside(h.rate, eta, h) - eta
            return D.Independent(D.Gamma(_beside(h.concentration, eta, h).expand_as(rate), rate), 1)
        case Poisson():
            return D.Independent(D.Poisson(h.mean(eta)), 1)
        case OneHot():
            return D.OneHotCategorical(logits=_beside(h.log_probabilities, eta, h) + eta)
        case Wishart():
            df = h.df.reshape((*h.df.shape, *(1 for _ in eta.shape[h.df.ndim : -1]))).expand(eta.shape[:-1])
            return D.Wishart(df, smat(h.mean(eta)) / df[..., None, None])
    remedy = "Use the methods sample, log_density and kl of the measure."
    condition = "measure must have a tilted distribution that torch implements"
    raise InputTypeError("to_distribution", "measure", f"{condition}, got {type(h).__name__}", remedy)


def _member(family: str, theta: Tensor) -> D.Distribution:
    """Distribution of y at natural parameter theta."""
    if family == "normal":
        variance = -0.5 / theta[..., 1]
        return D.Normal(theta[..., 0] * variance, variance.sqrt())
    if family == "gamma":
        return D.Gamma(theta[..., 0], -theta[..., 1])
    if family == "beta":
        return D.Beta(theta[..., 0], theta[..., 1])
    if family == "dirichlet":
        return D.Dirichlet(theta)
    return D.Bernoulli(logits=theta[..., 0])


def _beside(field: Tensor, eta: Tensor, h: Measure) -> Tensor:
    """Insert size-1 dimensions into a field [*b, d] for the queries of eta [*b, *m, d]."""
    batch = len(h.batch_shape)
    return field.reshape(*field.shape[:batch], *(1 for _ in eta.shape[batch:-1]), field.shape[-1])
