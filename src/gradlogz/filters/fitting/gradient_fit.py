"""Gradient ascent (L-BFGS) of the log likelihood in unconstrained parameters, and standard errors.

Read next: parametrization.py (the unconstrained parameters), learning.py.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..gaussian.enumeration import enumerate_modes
from ..gaussian.likelihood import log_likelihood
from ..gaussian.smoother import Method
from ..gaussian.switching import SwitchingFilter
from ..moment_matching import symmetric
from ..prior_and_series import Prior, Series
from ..validation import initial_state, prepared
from .lbfgs import ascend
from .parametrization import FitPlan, Free, constrained, prior_fields, unconstrained
from .training_data import CELLS, FitRun, System, chunks, observed_entries


def run_lbfgs(
    system: System,
    series: Series,
    plan: FitPlan,
    smoother: Method,
    max_iterations: int,
    enough: float,
    report: Callable[[int, float], None],
) -> FitRun:
    """Increase the log likelihood until at most `enough` is left to gain (lbfgs.py)."""
    flat = FlatParameters.of(unconstrained("fit", system, plan))
    size = _chunk(8, system, series)

    def evaluate(vector: Tensor) -> tuple[float, Tensor]:
        """Log likelihood and its gradient, in chunks of series."""
        point = vector.detach().requires_grad_()
        value, gradient = 0.0, torch.zeros_like(vector)
        for part, rows in chunks(series, size):
            at_point = constrained(system, plan, flat.parts(point)).of_series(rows)
            total = _log_likelihood(at_point, part, smoother).sum()
            gradient = gradient + torch.autograd.grad(total, point)[0]
            value += float(total.detach())
        return value, gradient

    # A log variance has the information n / 2 from n observations.
    scale = 2 / float(observed_entries(series).sum())
    start = flat.vector(flat.free)
    end = ascend(evaluate, start, scale=scale, enough=enough, max_iterations=max_iterations, report=report)
    with torch.no_grad():
        fitted = constrained(system, plan, flat.parts(end.best.place))
    return FitRun(fitted, end.best.value, end.history, end.converged)


class FlatParameters(NamedTuple):
    """Unconstrained parameters as one vector, without the logits at -inf, which stay there."""

    free: Free
    moving: dict[str, Tensor]

    @classmethod
    def of(cls, free: Free) -> "FlatParameters":
        """Mark the finite parameters as those that move."""
        return cls(free, {name: t.isfinite() for name, t in free.items()})

    def vector(self, parts: Mapping[str, Tensor], lead: int = 0) -> Float[Tensor, "*b p"]:
        """Join the moving parameters, after `lead` leading dimensions."""
        return torch.cat([parts[name].flatten(lead)[..., self.moving[name].flatten()] for name in self.free], -1)

    def parts(self, vector: Float[Tensor, "p"]) -> Free:
        """Parameters by name."""
        parts, at = {}, 0
        for name, t in self.free.items():
            n = int(self.moving[name].sum())
            parts[name] = t.clone().masked_scatter(self.moving[name], vector[at : at + n])
            at += n
        return parts


def _chunk(copies: int, system: System, series: Series) -> int:
    """Number of series whose filters fit into memory, with so many numbers kept for each."""
    modes = system.model.modes * (1 if system.clutter is None else 2)
    return max(1, CELLS // (copies * series.observations.shape[1] * modes**2 * system.model.state_size**2))


def _log_likelihood(system: System, series: Series, smoother: Method) -> Float[Tensor, "b"]:
    """Log likelihood of each series by the filter of the smoother's forward pass."""
    model, prior, series = system.as_filtered(series)
    if smoother == "enumerate":
        return enumerate_modes(model, series, prior).filtered.log_likelihood
    chosen = SwitchingFilter(model) if smoother == "imm" else SwitchingFilter(model, "gpb")
    parts = zip((prior.mean, prior.covariance, prior.log_mode_probability), (2, 3, 1), strict=True)
    batched = Prior(*(t.unsqueeze(0) if t is not None and t.ndim == n else t for t, n in parts))  # type: ignore[arg-type]
    state = initial_state("fit", model, batched, series.observations.shape[:-2])
    return log_likelihood("fit", chosen, prepared("fit", model, series, validate=False), state)


def standard_errors(call: str, system: System, series: Series, plan: FitPlan, smoother: Method) -> dict[str, Tensor]:
    """Standard errors of the parameters, from those of the unconstrained parameters by the delta method.

    The information matrix is the negative Hessian of the log likelihood, or the sum of squared scores if there are more
    than ten times as many series as parameters. For "enumerate" it is that of the exact likelihood.
    """
    flat = FlatParameters.of(unconstrained(call, system, plan))
    free, point = flat.free, flat.vector(flat.free)
    count = len(point)
    if len(series.observations) > 10 * count:  # so that no parameter belongs to one series
        information = torch.zeros(count, count, dtype=point.dtype, device=point.device)
        for part, rows in chunks(series, _chunk(32, system, series)):
            per_series = {
                name: t.expand(len(part.observations), *t.shape).clone().requires_grad_() for name, t in free.items()
            }
            each_system = constrained(system.of_series(rows), plan, per_series)
            likelihood = _log_likelihood(each_system, part, smoother).sum()
            scores = torch.autograd.grad(likelihood, list(per_series.values()))
            each = flat.vector(dict(zip(per_series, scores, strict=True)), 1)
            information = information + each.mT @ each
    else:
        information = -_hessian(system, series, plan, smoother, flat)
    # Directions without information, as of modes of probability 0, have infinite standard errors.
    curvature, ways = torch.linalg.eigh(symmetric(information))
    identified = curvature > count * torch.finfo(point.dtype).eps * curvature.abs().amax()
    covariance = (ways * torch.where(identified, 1 / torch.where(identified, curvature, 1.0), 0.0)) @ ways.mT
    unidentified = ways * ~identified

    def values(vector: Tensor) -> tuple[Tensor, ...]:
        return tuple(_estimates(constrained(system, plan, flat.parts(vector)), plan).values())

    names = list(_estimates(system, plan))
    slopes = torch.autograd.functional.jacobian(values, point)

    def error(J: Tensor) -> Tensor:
        known = torch.einsum("...a,ab,...b->...", J, covariance, J).clamp(min=0).sqrt()
        unknown = (J @ unidentified).norm(dim=-1) > torch.finfo(point.dtype).eps ** 0.5 * J.norm(dim=-1)
        return known.masked_fill(unknown, torch.inf)

    return {name: error(J) for name, J in zip(names, slopes, strict=True)}


def _estimates(system: System, plan: FitPlan) -> dict[str, Tensor]:
    """Learned parameters by name."""
    model, prior, clutter = system
    named = {name: t for name, t in model.fields().items() if name in plan.learn}
    if "initial" in plan.learn:
        named |= prior_fields(prior)
    if "initial_mean" in plan.learn:
        named["initial_mean"] = prior.mean
    if clutter is not None and "clutter" in plan.learn:
        named["clutter"] = clutter.probability
    return named


def _hessian(
    system: System, series: Series, plan: FitPlan, smoother: Method, flat: FlatParameters
) -> Float[Tensor, "p p"]:
    """Second derivatives of the log likelihood: central differences of its gradient.

    Unconstrained parameters are of order one (logarithms), so that a step h = eps^(1/4) has a truncation error of about
    h² = eps^(1/2) and a rounding error below it.
    """
    point = flat.vector(flat.free)
    h = torch.finfo(point.dtype).eps ** 0.25

    def gradient(vector: Tensor) -> Tensor:
        at = vector.detach().requires_grad_()
        total = _log_likelihood(constrained(system, plan, flat.parts(at)), series, smoother).sum()
        return torch.autograd.grad(total, at)[0]

    steps = h * torch.eye(len(point), dtype=point.dtype, device=point.device)
    return torch.stack([(gradient(point + step) - gradient(point - step)) / (2 * h) for step in steps])
