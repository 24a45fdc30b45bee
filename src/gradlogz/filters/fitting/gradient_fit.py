"""Gradient ascent (L-BFGS) of the log likelihood in unconstrained parameters, and standard errors.

Read next: parametrization.py (the unconstrained parameters), learning.py.
"""

import math
from collections.abc import Callable, Mapping

import torch

from ..._typing import Float, Tensor
from ..gaussian.smoother import Method
from ..gaussian.switching import SwitchingFilter
from ..models.switching_model import SwitchingModel
from ..moment_matching import symmetric
from ..prior_and_series import Prior, Series
from .parametrization import FitPlan, Free, constrained, prior_fields, unconstrained
from .training_data import CELLS, FitRun, chunks, valid_steps


class _LostError(ArithmeticError):
    """A step to a log likelihood that is not finite, as for noise of variance 0."""


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
    """Iterate ten L-BFGS steps at a time until the log likelihood changes by at most `enough`."""
    free = {name: t.requires_grad_() for name, t in unconstrained("fit", model, prior, plan).items()}
    # Ten steps an iteration: with single steps torch's line search restarts each time and makes no progress.
    steps = torch.optim.LBFGS(free.values(), lr=1.0, max_iter=10, history_size=20, line_search_fn="strong_wolfe")
    size = max(1, CELLS // (8 * series.observations.shape[1] * model.modes**2 * model.state_size**2))
    scale = float(valid_steps(series).sum())
    best = (-torch.inf, {name: t.detach().clone() for name, t in free.items()})

    def total() -> float:
        """Negative log likelihood per step, and its gradient, in chunks of series."""
        steps.zero_grad()
        value = 0.0
        for part in chunks(series, size):
            loss = -_log_likelihood(*constrained(model, prior, plan, free), part, smoother).sum() / scale
            loss.backward()  # type: ignore[no-untyped-call]
            value += float(loss.detach())
        nonlocal best
        if not math.isfinite(value):
            raise _LostError
        if -value > best[0]:
            best = (-value, {name: t.detach().clone() for name, t in free.items()})
        for t in free.values():
            assert t.grad is not None  # every parameter enters the likelihood
            t.grad = t.grad.nan_to_num(0.0, 0.0, 0.0)  # logits at -inf have NaN gradients
        return value

    history, converged = [], False
    for i in range(max_iterations):
        try:
            history.append(-float(steps.step(total)) * scale)  # type: ignore[no-untyped-call]
        except _LostError:
            break
        report(i, history[-1])
        converged = i > 0 and abs(history[-1] - history[-2]) <= enough
        if converged:
            break
    with torch.no_grad():
        fitted = constrained(model, prior, plan, best[1])
        value = sum(float(_log_likelihood(*fitted, part, smoother).sum()) for part in chunks(series, size))
    return FitRun(*fitted, value, [*history, value], converged)


def _log_likelihood(model: SwitchingModel, prior: Prior, series: Series, smoother: Method) -> Float[Tensor, "b"]:
    """Log likelihood of each series by the filter of the smoother's forward pass."""
    chosen = SwitchingFilter(model) if smoother == "imm" else SwitchingFilter(model, "gpb")
    parts = zip((prior.mean, prior.covariance, prior.log_mode_probability), (2, 3, 1), strict=True)
    batched = Prior(*(t.unsqueeze(0) if t is not None and t.ndim == n else t for t, n in parts))  # type: ignore[arg-type]
    return chosen.filter(series, batched).log_likelihood


def standard_errors(
    call: str, model: SwitchingModel, prior: Prior, series: Series, plan: FitPlan, smoother: Method
) -> dict[str, Tensor]:
    """Standard errors of the parameters, from those of the unconstrained parameters by the delta method.

    The information matrix is the negative Hessian of the log likelihood, or the sum of squared scores if there are more
    than ten times as many series as parameters.
    """
    free = unconstrained(call, model, prior, plan)
    moving = {name: t.isfinite() for name, t in free.items()}
    count = sum(int(m.sum()) for m in moving.values())

    def flat(parts: Mapping[str, Tensor], lead: int = 0) -> Tensor:
        return torch.cat([parts[name].flatten(lead)[..., moving[name].flatten()] for name in free], -1)

    def read(vector: Tensor) -> Free:
        parts, at = {}, 0
        for name, t in free.items():
            n = int(moving[name].sum())
            values = t.clone().masked_scatter(moving[name], vector[at : at + n])
            parts[name], at = values, at + n
        return parts

    point = flat(free)
    if len(series.observations) > 10 * count:
        information = torch.zeros(count, count, dtype=point.dtype, device=point.device)
        size = max(1, CELLS // (32 * series.observations.shape[1] * model.modes**2 * model.state_size**2))
        for part in chunks(series, size):
            per_series = {
                name: t.expand(len(part.observations), *t.shape).clone().requires_grad_() for name, t in free.items()
            }
            likelihood = _log_likelihood(*constrained(model, prior, plan, per_series), part, smoother).sum()
            scores = torch.autograd.grad(likelihood, list(per_series.values()))
            each = flat(dict(zip(per_series, scores, strict=True)), 1)
            information = information + each.mT @ each
    else:

        def total(vector: Tensor) -> Tensor:
            return _log_likelihood(*constrained(model, prior, plan, read(vector)), series, smoother).sum()

        information = -torch.autograd.functional.hessian(total, point)
    # Directions without information, as of modes of probability 0, have infinite standard errors.
    curvature, ways = torch.linalg.eigh(symmetric(information))
    identified = curvature > count * torch.finfo(point.dtype).eps * curvature.abs().amax()
    covariance = (ways * torch.where(identified, 1 / torch.where(identified, curvature, 1.0), 0.0)) @ ways.mT
    unidentified = ways * ~identified

    def values(vector: Tensor) -> tuple[Tensor, ...]:
        made, initial = constrained(model, prior, plan, read(vector))
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
