"""Whether a filter is what it claims: errors beside their covariances.

    NIS    v^T S^-1 v           of innovations            chi-square with o degrees of freedom, if the model is right
    NEES   e^T P^-1 e           of errors x - m           chi-square with s degrees of freedom             [barshalom01]
    gate   v^T S^-1 v <= q      what may belong to a target

Above its band a filter is too sure of itself, below it too unsure. For one mode the laws are exact; the mixture of
several has the same mean and heavier tails.
"""

from typing import NamedTuple

import torch

from .._errors import check_floats, sentence, shape_of
from .._typing import Bool, Float, Tensor
from .result import Filtered
from .smoother import Smoothed


class Consistency(NamedTuple):
    """Squared distances beside where they lie with the probability asked for; NaN where nothing was observed."""

    value: Float[Tensor, "*b"]
    low: Float[Tensor, "*b"]
    high: Float[Tensor, "*b"]
    degrees: Float[Tensor, "*b"]
    level: float

    @property
    def holds(self) -> Bool[Tensor, "*b"]:
        """Whether each lies in its band."""
        return (self.low <= self.value) & (self.value <= self.high)

    def mean(self, *dimensions: int) -> "Consistency":
        """Averages over independent runs or times, in the band of an average; all dimensions if none is named.

        A sum of chi-squares is chi-square with the sum of their degrees. What was not observed is left out.
        """
        over = dimensions or tuple(range(self.value.ndim))
        seen = self.degrees > 0
        number, degrees = seen.sum(over), torch.where(seen, self.degrees, 0.0).sum(over)
        value = torch.where(seen, self.value, 0.0).sum(over) / number
        low, high = (q / number for q in _band(degrees, self.level))
        return Consistency(value, low, high, degrees / number, self.level)


def normalized_innovation(filtered: Filtered, *, level: float = 0.95) -> Consistency:
    """NIS: the squared distance of every observation from what was expected, v^T S^-1 v.

    Law: tests/laws/test_consistency_is_chi_square.py.
    """
    return _consistency("normalized_innovation", filtered.innovation, filtered.innovation_covariance, level, gaps=True)


def nees(filtered: Filtered | Smoothed, truth: Float[Tensor, "*b s"], *, level: float = 0.95) -> Consistency:
    """NEES: the squared distance of the true state from the estimated one, (x - m)^T P^-1 (x - m)."""
    check_floats("nees", truth=truth, mean=filtered.mean)
    if truth.shape != filtered.mean.shape:
        condition = f"truth must be {shape_of(filtered.mean)}, as the mean is"
        raise ValueError(
            sentence("nees", condition, f"shape {shape_of(truth)}", "Pass the states that were to be found.")
        )
    return _consistency("nees", truth - filtered.mean, filtered.covariance, level, gaps=False)


def gate(
    innovation: Float[Tensor, "*b o"], covariance: Float[Tensor, "*#b o o"], *, probability: float = 0.99
) -> Bool[Tensor, "*b"]:
    """Whether an observation lies in the ellipsoid that holds one of this target with the given probability.

    Which observation belongs to which target is not decided here; this says which may. Where nothing was observed the
    answer is no.

    >>> import torch
    >>> gate(torch.tensor([[1.0, 1.0], [3.0, 3.0]]), torch.eye(2))  # 9.21 is the 99 % point of 2 degrees of freedom
    tensor([ True, False])
    """
    check_floats("gate", innovation=innovation, covariance=covariance)
    if innovation.ndim == 0 or covariance.shape[-2:] != (innovation.shape[-1],) * 2:
        condition = f"covariance must end in the size of innovation {shape_of(innovation)}, twice"
        remedy = "Pass filtered.innovation and filtered.innovation_covariance."
        raise ValueError(sentence("gate", condition, f"shape {shape_of(covariance)}", remedy))
    _check_level("gate", "probability", probability)
    value, degrees = _distance(innovation, covariance, gaps=True)
    return value <= chi_square_quantile(probability, degrees)


def chi_square_quantile(probability: float, degrees: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """q with P(chi-square <= q) = probability; 0 for no degrees of freedom.

    Halving intervals of log q, once for each number of degrees that occurs.
    """
    occurring, index = degrees.double().unique(return_inverse=True)
    half = occurring.clamp(min=1) / 2
    low, high = torch.full_like(half, -80.0), (half + 1).log() + 6.0
    # In logarithms: small probabilities of few degrees have quantiles near 0, which keep their digits so.
    for _ in range(64):
        middle = (low + high) / 2
        if probability > 0.5:  # the smaller tail has the digits
            below = torch.special.gammaincc(half, middle.exp()) > 1 - probability
        else:
            below = torch.special.gammainc(half, middle.exp()) < probability
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    quantile = torch.where(occurring > 0, 2 * ((low + high) / 2).exp(), 0.0)
    return quantile[index].to(degrees.dtype)


def _consistency(call: str, error: Tensor, covariance: Tensor, level: float, *, gaps: bool) -> Consistency:
    _check_level(call, "level", level)
    value, degrees = _distance(error, covariance, gaps=gaps)
    return Consistency(value, *_band(degrees, level), degrees, level)


def _distance(error: Tensor, covariance: Tensor, *, gaps: bool) -> tuple[Tensor, Tensor]:
    """e^T C^-1 e over the entries that are there, and how many they are."""
    if not gaps:
        L = torch.linalg.cholesky_ex(covariance).L
        z = torch.linalg.solve_triangular(L, error.unsqueeze(-1), upper=False).squeeze(-1)
        return (z * z).sum(-1), torch.full_like(z[..., 0], error.shape[-1])
    seen = ~torch.isnan(error)
    eye = torch.eye(error.shape[-1], dtype=error.dtype, device=error.device)
    L = torch.linalg.cholesky_ex(torch.where(seen.unsqueeze(-1) & seen.unsqueeze(-2), covariance, eye)).L
    z = torch.linalg.solve_triangular(L, torch.where(seen, error, 0.0).unsqueeze(-1), upper=False).squeeze(-1)
    degrees = seen.sum(-1).to(error.dtype)
    return torch.where(degrees > 0, (z * z).sum(-1), torch.nan), degrees


def _band(degrees: Tensor, level: float) -> tuple[Tensor, Tensor]:
    return chi_square_quantile((1 - level) / 2, degrees), chi_square_quantile((1 + level) / 2, degrees)


def _check_level(call: str, name: str, level: float) -> None:
    if not 0 < level < 1:
        remedy = "It is a probability, such as 0.95."
        raise ValueError(sentence(call, f"{name} must be in (0, 1)", f"{level}", remedy))
