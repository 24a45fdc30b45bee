"""Consistency of a filter: errors compared with their covariances.

    NIS    v^T S^-1 v           innovations v             chi-square with o degrees of freedom, if the model is correct
    NEES   e^T P^-1 e           errors e = x - m          chi-square with s degrees of freedom             [barshalom01]
    gate   v^T S^-1 v <= q      observations that can belong to a target

Values above the band mean that the filter is overconfident, values below that it is underconfident. The chi-square
distribution is exact for one mode; a mixture of several has the same mean and heavier tails, unless its scores
(innovation_scores.py) are used.

For a singular covariance, as of a component that is known exactly, the pseudo-inverse is used and the degrees of
freedom are its rank; an error outside its range has an infinite distance.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, check_floats, has_values, shape_of
from ..._typing import Bool, Float, Tensor
from ...special.distributions import chi_square_quantile
from ..results import Filtered
from ..scalars import from_array
from .innovation_scores import innovation_scores
from .smoother import Smoothed


class Consistency(NamedTuple):
    """Squared distances and the band that contains them with probability `level`; NaN where nothing was observed."""

    value: Float[Tensor, "*b"]
    low: Float[Tensor, "*b"]
    high: Float[Tensor, "*b"]
    degrees: Float[Tensor, "*b"]
    level: float

    @property
    def holds(self) -> Bool[Tensor, "*b"]:
        """True where the value lies inside the band."""
        return (self.low <= self.value) & (self.value <= self.high)

    def mean(self, *dimensions: int) -> "Consistency":
        """Average over independent runs or times, with the band of an average; over all dimensions by default.

        A sum of chi-squares is chi-square with the sum of their degrees. Missing observations are left out.
        """
        over = dimensions or tuple(range(self.value.ndim))
        observed = (self.degrees > 0) | (self.value == torch.inf)
        number, degrees = observed.sum(over), torch.where(observed, self.degrees, 0.0).sum(over)
        value = torch.where(observed, self.value, 0.0).sum(over) / number
        low, high = (q / number for q in _band(degrees, self.level))
        return Consistency(value, low, high, degrees / number, self.level)


@without_autocast
def normalized_innovation(filtered: Filtered, *, level: float = 0.95, mixture: bool = False) -> Consistency:
    """Normalised innovation squared (NIS) of every observation, v^T S^-1 v, with its band.

    Args:
        filtered: result of a filter.
        level: probability of the band.
        mixture: whether the squared `innovation_scores` take the place of v^T S^-1 v. They are chi-square for any
            number of modes, and equal it for one.

    Law: tests/laws/test_consistency_is_chi_square.py.
    """
    _check_level("normalized_innovation", "level", level)
    if mixture:
        z = innovation_scores(filtered)
        degrees = (~z.isnan()).sum(-1).to(z.dtype)
        return _with_band((z.square().nansum(-1).masked_fill(degrees == 0, torch.nan), degrees), level)
    v, S = _required_fields("normalized_innovation", filtered, "innovation", "innovation_covariance")
    return _with_band(_distance(v, S, ~torch.isnan(v)), level)


@without_autocast
def nees(
    filtered: Filtered | Smoothed,
    truth: Float[Tensor, "*b c"],
    *,
    components: Sequence[int] | None = None,
    level: float = 0.95,
) -> Consistency:
    """Normalised estimation error squared (NEES), (x - m)^T P^-1 (x - m), with its band.

    Args:
        truth: true states, or the given components of them; NaN entries are left out.
        components: indices of the state components in `truth`, such as positions; None for all.
        level: probability of the band.

    The degrees of freedom are the rank of P: a component of variance 0 adds none, and its distance is infinite if it is
    wrong.

    >>> import torch
    >>> from gradlogz.filters import Prior, SwitchingModel, constant_velocity, imm
    >>> line = constant_velocity(1, dt=1.0, spectral_density=0.1, observation_variance=1.0)
    >>> model = SwitchingModel.of([line], transition=torch.ones(1, 1))
    >>> filtered = imm(model, torch.tensor([[1.0], [2.0]]), Prior(torch.zeros(2), torch.eye(2)))
    >>> nees(filtered, torch.tensor([[1.0], [2.0]]), components=(0,)).degrees
    tensor([1., 1.])
    """
    m, P = _required_fields("nees", filtered, "mean", "covariance")
    check_floats("nees", truth=truth, mean=m)
    _check_level("nees", "level", level)
    s = m.shape[-1]
    indices = list(range(s)) if components is None else list(components)
    if not indices or len(set(indices)) < len(indices) or not all(isinstance(c, int) and 0 <= c < s for c in indices):
        condition, fact = f"components must be different indices from 0 to {s - 1}", f"{indices}"
        raise InputValueError(
            "nees", "components", f"{condition}, got {fact}", "Pass at least one index of the state, from 0."
        )
    if truth.shape != (*m.shape[:-1], len(indices)):
        condition = f"truth must be {(*m.shape[:-1], len(indices))}, " + (
            "as the mean is" if components is None else "with the given components"
        )
        remedy = "Pass the true states, or pass components= if truth holds only some."
        raise InputValueError("nees", "truth", f"{condition}, got shape {shape_of(truth)}", remedy)
    if isinstance(filtered, Smoothed):
        filtered = filtered.filtered
    m, P, before = m[..., indices], P[..., indices, :][..., indices], filtered.predicted_covariance
    variance_before = None if before is None else before.diagonal(dim1=-2, dim2=-1)[..., indices]
    observed = ~torch.isnan(truth)
    return _with_band(_distance(torch.where(observed, truth - m, torch.nan), P, observed, variance_before), level)


@without_autocast
def in_gate(
    innovation: Float[Tensor, "*b o"], covariance: Float[Tensor, "*#b o o"], *, probability: float = 0.99
) -> Bool[Tensor, "*b"]:
    """Return True where an observation lies in the ellipsoid that contains the target's with the given probability.

    The gate lists candidates for data association; it does not decide between them. False where nothing was observed.

    >>> import torch
    >>> in_gate(torch.tensor([[1.0, 1.0], [3.0, 3.0]]), torch.eye(2))  # 9.21 is the 99 % point of 2 degrees of freedom
    tensor([ True, False])
    """
    innovation, covariance = from_array(innovation), from_array(covariance)
    check_floats("in_gate", innovation=innovation, covariance=covariance)
    if innovation.ndim == 0 or covariance.shape[-2:] != (innovation.shape[-1],) * 2:
        condition = f"covariance must be [*b, o, o] for an innovation of shape {shape_of(innovation)}"
        remedy = "Pass filtered.innovation and filtered.innovation_covariance."
        raise InputValueError("in_gate", "covariance", f"{condition}, got shape {shape_of(covariance)}", remedy)
    _check_level("in_gate", "probability", probability)
    value, degrees = _distance(innovation, covariance, ~torch.isnan(innovation))
    return value <= chi_square_quantile(probability, degrees)


def _required_fields(call: str, filtered: Filtered | Smoothed, *names: str) -> list[Tensor]:
    """Fields of a result; raises if they were not computed."""
    fields = [getattr(filtered, name) for name in names]
    if missing := [name for name, t in zip(names, fields, strict=True) if t is None]:
        problem = f"filtered needs {' and '.join(names)}, but {' and '.join(missing)} was not computed"
        remedy = "Name these fields in fields= of the filter, or drop fields=."
        raise InputValueError(call, "filtered", problem, remedy)
    return fields


def _with_band(distance: tuple[Tensor, Tensor], level: float) -> Consistency:
    """Distances and degrees of freedom with their band."""
    value, degrees = distance
    return Consistency(value, *_band(degrees, level), degrees, level)


def _distance(
    error: Tensor, covariance: Tensor, observed: Tensor, variance_before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Squared distance e^T C^+ e over the observed entries, and the rank of C there.

    Args:
        variance_before: variances from which C was computed and which set its rounding error; None for those of C.
    """
    C, n = covariance, error.shape[-1]  # Shorthand
    with torch.no_grad():  # scale to units in which the result is invariant
        variance = C.diagonal(dim1=-2, dim2=-1)
        largest = variance if variance_before is None else torch.maximum(variance, variance_before)
        unit = torch.where(largest > 0, largest, 1.0).rsqrt()
        least = 32 * n * torch.finfo(C.dtype).eps  # variances below this are rounding error
    eye = torch.eye(n, dtype=C.dtype, device=C.device)
    C = torch.where(observed.unsqueeze(-1) & observed.unsqueeze(-2), C * unit.unsqueeze(-1) * unit.unsqueeze(-2), eye)
    e = (torch.where(observed, error, 0.0) * unit).unsqueeze(-1)
    degrees, gaps = observed.sum(-1).to(e.dtype), n - observed.sum(-1)
    L, failure = torch.linalg.cholesky_ex(C)
    singular = (failure != 0) | (L.diagonal(dim1=-2, dim2=-1).square() < least).any(-1)
    if not has_values(singular) or bool(singular.any()):
        inverse = torch.linalg.pinv(C, atol=least, rtol=0.0, hermitian=True)
        value = (e.mT @ inverse @ e)[..., 0, 0]
        # A variance counted as 0 may lie just below rounding error, so errors of up to eight deviations pass.
        value = torch.where((e - C @ inverse @ e).norm(dim=(-2, -1)) > 8 * least**0.5, torch.inf, value)
        degrees = torch.linalg.matrix_rank(C, atol=least, rtol=0.0, hermitian=True).to(e.dtype) - gaps
    else:
        value = torch.linalg.solve_triangular(L, e, upper=False).square().sum((-2, -1))
    return torch.where(gaps < n, value, torch.nan), degrees


def _band(degrees: Tensor, level: float) -> tuple[Tensor, Tensor]:
    return chi_square_quantile((1 - level) / 2, degrees), chi_square_quantile((1 + level) / 2, degrees)


def _check_level(call: str, name: str, level: float) -> None:
    if not 0 < level < 1:
        remedy = "Pass a probability such as 0.95."
        raise InputValueError(call, name, f"{name} must be in (0, 1), got {level}", remedy)
