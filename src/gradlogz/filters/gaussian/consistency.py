"""Whether a filter is what it claims: errors beside their covariances.

    NIS    v^T S^-1 v           of innovations            chi-square with o degrees of freedom, if the model is right
    NEES   e^T P^-1 e           of errors x - m           chi-square with s degrees of freedom             [barshalom01]
    gate   v^T S^-1 v <= q      what may belong to a target

Above its band a filter is too sure of itself, below it too unsure. For one mode the laws are exact; the mixture of
several has the same mean and heavier tails.

Where a covariance is singular, as of a component that is known, the inverse is that on its support, whose dimension the
degrees of freedom are; an error that leaves the support is infinitely unlikely, and so is its distance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, check_floats, has_values, shape_of
from ..._typing import Bool, Float, Tensor
from ...special.distributions import chi_square_quantile
from ..results import Filtered
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
        seen = (self.degrees > 0) | (self.value == torch.inf)
        number, degrees = seen.sum(over), torch.where(seen, self.degrees, 0.0).sum(over)
        value = torch.where(seen, self.value, 0.0).sum(over) / number
        low, high = (q / number for q in _band(degrees, self.level))
        return Consistency(value, low, high, degrees / number, self.level)


@without_autocast
def normalized_innovation(filtered: Filtered, *, level: float = 0.95) -> Consistency:
    """NIS: the squared distance of every observation from what was expected, v^T S^-1 v.

    Law: tests/laws/test_consistency_is_chi_square.py.
    """
    _check_level("normalized_innovation", "level", level)
    v, S = _found("normalized_innovation", filtered, "innovation", "innovation_covariance")
    return _beside(_distance(v, S, ~torch.isnan(v)), level)


@without_autocast
def nees(
    filtered: Filtered | Smoothed,
    truth: Float[Tensor, "*b c"],
    *,
    components: Sequence[int] | None = None,
    level: float = 0.95,
) -> Consistency:
    """NEES: the squared distance of the true state from the estimated one, (x - m)^T P^-1 (x - m).

    Args:
        truth: the states that were to be found; what is NaN is left out.
        components: those of the state that truth has, in its order, such as the positions; None for all.
        level: the probability of the band.

    Degrees are the rank of P: what is known for certain has none, and the distance is infinite where it is not true.

    >>> import torch
    >>> from gradlogz.filters import Prior, SwitchingModel, constant_velocity, imm
    >>> line = constant_velocity(1, dt=1.0, spectral_density=0.1, observation_variance=1.0)
    >>> model = SwitchingModel.of([line], transition=torch.ones(1, 1))
    >>> found = imm(model, torch.tensor([[1.0], [2.0]]), Prior(torch.zeros(2), torch.eye(2)))
    >>> nees(found, torch.tensor([[1.0], [2.0]]), components=(0,)).degrees
    tensor([1., 1.])
    """
    m, P = _found("nees", filtered, "mean", "covariance")
    check_floats("nees", truth=truth, mean=m)
    _check_level("nees", "level", level)
    s = m.shape[-1]
    own = list(range(s)) if components is None else list(components)
    if not own or len(set(own)) < len(own) or not all(isinstance(c, int) and 0 <= c < s for c in own):
        condition, fact = f"components must be different ones of 0 ... {s - 1}, one or more", f"{own}"
        raise InputValueError(
            "nees", "components", f"{condition}, got {fact}", "They are counted from 0, as the state has them."
        )
    if truth.shape != (*m.shape[:-1], len(own)):
        condition = f"truth must be {(*m.shape[:-1], len(own))}, " + (
            "as the mean is" if components is None else "of them"
        )
        remedy = "Pass the states that were to be found, or name the components= of it that are given."
        raise InputValueError("nees", "truth", f"{condition}, got shape {shape_of(truth)}", remedy)
    if isinstance(filtered, Smoothed):
        filtered = filtered.filtered
    m, P, before = m[..., own], P[..., own, :][..., own], filtered.predicted_covariance
    came = None if before is None else before.diagonal(dim1=-2, dim2=-1)[..., own]
    seen = ~torch.isnan(truth)
    return _beside(_distance(torch.where(seen, truth - m, torch.nan), P, seen, came), level)


@without_autocast
def in_gate(
    innovation: Float[Tensor, "*b o"], covariance: Float[Tensor, "*#b o o"], *, probability: float = 0.99
) -> Bool[Tensor, "*b"]:
    """Whether an observation lies in the ellipsoid that holds one of this target with the given probability.

    Which observation belongs to which target is not decided here; this says which may. Where nothing was observed the
    answer is no.

    >>> import torch
    >>> in_gate(torch.tensor([[1.0, 1.0], [3.0, 3.0]]), torch.eye(2))  # 9.21 is the 99 % point of 2 degrees of freedom
    tensor([ True, False])
    """
    check_floats("in_gate", innovation=innovation, covariance=covariance)
    if innovation.ndim == 0 or covariance.shape[-2:] != (innovation.shape[-1],) * 2:
        condition = f"covariance must end in the size of innovation {shape_of(innovation)}, twice"
        remedy = "Pass filtered.innovation and filtered.innovation_covariance."
        raise InputValueError("in_gate", "covariance", f"{condition}, got shape {shape_of(covariance)}", remedy)
    _check_level("in_gate", "probability", probability)
    value, degrees = _distance(innovation, covariance, ~torch.isnan(innovation))
    return value <= chi_square_quantile(probability, degrees)


def _found(call: str, filtered: Filtered | Smoothed, *names: str) -> list[Tensor]:
    """Fields of a result, which may have been left out of it."""
    found = [getattr(filtered, name) for name in names]
    if missing := [name for name, t in zip(names, found, strict=True) if t is None]:
        condition = f"filtered must have {' and '.join(names)}"
        remedy = "Name them in fields= of the filter, or leave that out."
        raise InputValueError(call, "filtered", f"{condition}, got no {' and no '.join(missing)}", remedy)
    return found


def _beside(distance: tuple[Tensor, Tensor], level: float) -> Consistency:
    """Distances in their bands."""
    value, degrees = distance
    return Consistency(value, *_band(degrees, level), degrees, level)


def _distance(
    error: Tensor, covariance: Tensor, seen: Tensor, variance_before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """e^T C^+ e over the entries that are seen, and the rank of C there.

    Args:
        variance_before: what the variances were computed from, whose rounding they have; None for themselves.
    """
    C, n = covariance, error.shape[-1]  # Shorthand
    with torch.no_grad():  # results do not depend on units
        variance = C.diagonal(dim1=-2, dim2=-1)
        largest = variance if variance_before is None else torch.maximum(variance, variance_before)
        unit = torch.where(largest > 0, largest, 1.0).rsqrt()
        least = 32 * n * torch.finfo(C.dtype).eps  # a variance that is rounding
    eye = torch.eye(n, dtype=C.dtype, device=C.device)
    C = torch.where(seen.unsqueeze(-1) & seen.unsqueeze(-2), C * unit.unsqueeze(-1) * unit.unsqueeze(-2), eye)
    e = (torch.where(seen, error, 0.0) * unit).unsqueeze(-1)
    degrees, gaps = seen.sum(-1).to(e.dtype), n - seen.sum(-1)
    L, failure = torch.linalg.cholesky_ex(C)
    singular = (failure != 0) | (L.diagonal(dim1=-2, dim2=-1).square() < least).any(-1)
    if not has_values(singular) or bool(singular.any()):
        inverse = torch.linalg.pinv(C, atol=least, rtol=0.0, hermitian=True)
        value = (e.mT @ inverse @ e)[..., 0, 0]
        # A direction of no variance may have one just below rounding, eight deviations of which are let pass.
        value = torch.where((e - C @ inverse @ e).norm(dim=(-2, -1)) > 8 * least**0.5, torch.inf, value)
        degrees = torch.linalg.matrix_rank(C, atol=least, rtol=0.0, hermitian=True).to(e.dtype) - gaps
    else:
        value = torch.linalg.solve_triangular(L, e, upper=False).square().sum((-2, -1))
    return torch.where(gaps < n, value, torch.nan), degrees


def _band(degrees: Tensor, level: float) -> tuple[Tensor, Tensor]:
    return chi_square_quantile((1 - level) / 2, degrees), chi_square_quantile((1 + level) / 2, degrees)


def _check_level(call: str, name: str, level: float) -> None:
    if not 0 < level < 1:
        remedy = "It is a probability, such as 0.95."
        raise InputValueError(call, name, f"{name} must be in (0, 1), got {level}", remedy)
