"""Gradient ascent (L-BFGS) of the log likelihood in unconstrained parameters, and standard errors.

Read next: parametrization.py (the unconstrained parameters), learning.py.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..gaussian.likelihood import log_likelihood
from ..gaussian.smoother import Method
from ..gaussian.switching import SwitchingFilter
from ..models.switching_model import SwitchingModel
from ..moment_matching import symmetric
from ..prior_and_series import Prior, Series
from ..validation import initial_state, prepared
from .lbfgs import ascend
from .parametrization import FitPlan, Free, constrained, prior_fields, unconstrained
from .training_data import CELLS, FitRun, chunks, observed_entries


def run_lbfgs(
    model: SwitchingModel,
    prior: Prior,
    series: Series,
    plan: FitPlan,
    smoother: Method,
    max_iterations: int,
    enough: float,
    report: Callable[[int, float], None],
) -> FitRun:
    """Increase the log likelihood until at most `enough` is left to gain (lbfgs.py)."""
    flat = FlatParameters.of(unconstrained("fit", model, prior, plan))
    size = max(1, CELLS // (8 * series.observations.shape[1] * model.modes**2 * model.state_size**2))

    def evaluate(vector: Tensor) -> tuple[float, Tensor]:
        """Log likelihood and its gradient, in chunks of series."""
        point = vector.detach().requires_grad_()
        value, gradient = 0.0, torch.zeros_like(vector)
        for part in chunks(series, size):
            total = _log_likelihood(*constrained(model, prior, plan, flat.parts(point)), part, smoother).sum()
            gradient = gradient + torch.autograd.grad(total, point)[0]
            value += float(total.detach())
        return value, gradient

    # A log variance has the information n / 2 from n observations.
    scale = 2 / float(observed_entries(series).sum())
    start = flat.vector(flat.free)
    end = ascend(evaluate, start, scale=scale, enough=enough, max_iterations=max_iterations, report=report)
    with torch.no_grad():
        fitted = constrained(model, prior, plan, flat.parts(end.best.place))
    return FitRun(*fitted, end.best.value, end.history, end.converged)


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


def _log_likelihood(model: SwitchingModel, prior: Prior, series: Series, smoother: Method) -> Float[Tensor, "b"]:
    """Log likelihood of each series by the filter of the smoother's forward pass."""
    chosen = SwitchingFilter(model) if smoother == "imm" else SwitchingFilter(model, "gpb")
    parts = zip((prior.mean, prior.covariance, prior.log_mode_probability), (2, 3, 1), strict=True)
    batched = Prior(*(t.unsqueeze(0) if t is not None and t.ndim == n else t for t, n in parts))  # type: ignore[arg-type]
    state = initial_state("fit", model, batched, series.observations.shape[:-2])
    return log_likelihood("fit", chosen, prepared("fit", model, series, validate=False), state)


def standard_errors(
    call: str, model: SwitchingModel, prior: Prior, series: Series, plan: FitPlan, smoother: Method
) -> dict[str, Tensor]:
    """Standard errors of the parameters, from those of the unconstrained parameters by the delta method.

    The information matrix is the negative Hessian of the log likelihood, or the sum of squared scores if there are more
    than ten times as many series as parameters.
    """
    flat = FlatParameters.of(unconstrained(call, model, prior, plan))
    free, point = flat.free, flat.vector(flat.free)
    count = len(point)
    if len(series.observations) > 10 * count:
        information = torch.zeros(count, count, dtype=point.dtype, device=point.device)
        size = max(1, CELLS // (32 * series.observations.shape[1] * model.modes**2 * model.state_size**2))
        for part in chunks(series, size):
            per_series = {
                name: t.expand(len(part.observations), *t.shape).clone().requires_grad_() for name, t in free.items()
            }
            likelihood = _log_likelihood(*constrained(model, prior, plan, per_series), part, smoother).sum()
            scores = torch.autograd.grad(likelihood, list(per_series.values()))
            each = flat.vector(dict(zip(per_series, scores, strict=True)), 1)
            information = information + each.mT @ each
    else:
        information = -_hessian(model, prior, series, plan, smoother, flat)
    # Directions without information, as of modes of probability 0, have infinite standard errors.
    curvature, ways = torch.linalg.eigh(symmetric(information))
    identified = curvature > count * torch.finfo(point.dtype).eps * curvature.abs().amax()
    covariance = (ways * torch.where(identified, 1 / torch.where(identified, curvature, 1.0), 0.0)) @ ways.mT
    unidentified = ways * ~identified

    def values(vector: Tensor) -> tuple[Tensor, ...]:
        made, initial = constrained(model, prior, plan, flat.parts(vector))
        named = {name: getattr(made, name) for name in plan.learn if name != "initial"}
        return tuple((named | (prior_fields(initial) if "initial" in plan.learn else {})).values())

    names = [name for name in plan.learn if name != "initial"]
    names += list(prior_fields(prior)) if "initial" in plan.learn else []
    slopes = torch.autograd.functional.jacobian(values, point)

    def error(J: Tensor) -> Tensor:
        known = torch.einsum("...a,ab,...b->...", J, covariance, J).clamp(min=0).sqrt()
        unknown = (J @ unidentified).norm(dim=-1) > torch.finfo(point.dtype).eps ** 0.5 * J.norm(dim=-1)
        return known.masked_fill(unknown, torch.inf)

    return {name: error(J) for name, J in zip(names, slopes, strict=True)}


def _hessian(
    model: SwitchingModel, prior: Prior, series: Series, plan: FitPlan, smoother: Method, flat: FlatParameters
) -> Float[Tensor, "p p"]:
    """Second derivatives of the log likelihood: central differences of its gradient.

    Unconstrained parameters are of order one (logarithms), so that a step h = eps^(1/4) has a truncation error of about
    h² = eps^(1/2) and a rounding error below it.
    """
    point = flat.vector(flat.free)
    h = torch.finfo(point.dtype).eps ** 0.25

    def gradient(vector: Tensor) -> Tensor:
        at = vector.detach().requires_grad_()
        total = _log_likelihood(*constrained(model, prior, plan, flat.parts(at)), series, smoother).sum()
        return torch.autograd.grad(total, at)[0]

    steps = h * torch.eye(len(point), dtype=point.dtype, device=point.device)
    return torch.stack([(gradient(point + step) - gradient(point - step)) / (2 * h) for step in steps])
