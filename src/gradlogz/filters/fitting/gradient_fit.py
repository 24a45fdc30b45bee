"""The gradient of the log likelihood: quasi-Newton steps of free numbers, and the curvature at their end.

Read next: parametrization.py (the free numbers), learning.py.
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
from .parametrization import FitPlan, Free, constrained, freed, prior_fields
from .training_data import CELLS, FitRun, chunks, counted


class _LostError(ArithmeticError):
    """A step beyond what numbers can hold, as where noise of 0 would make the likelihood infinite."""


def climbed(
    model: SwitchingModel,
    prior: Prior,
    series: Series,
    plan: FitPlan,
    smoother: Method,
    max_iterations: int,
    enough: float,
    report: Callable[[int, float], None],
) -> FitRun:
    """Iterations of ten quasi-Newton steps of the free numbers."""
    free = {name: t.requires_grad_() for name, t in freed("fit", model, prior, plan).items()}
    # One step an iteration would do, but torch's line search does not move on from where it begins anew each time.
    steps = torch.optim.LBFGS(free.values(), lr=1.0, max_iter=10, history_size=20, line_search_fn="strong_wolfe")
    size = max(1, CELLS // (8 * series.observations.shape[1] * model.modes**2 * model.state_size**2))
    scale = float(counted(series).sum())
    best = (-torch.inf, {name: t.detach().clone() for name, t in free.items()})

    def total() -> float:
        """Minus the log likelihood a step, and its gradient, some series at a time."""
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
            assert t.grad is not None  # every free number has a part in the likelihood
            t.grad = t.grad.nan_to_num(0.0, 0.0, 0.0)  # of logits at -inf
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
        found = constrained(model, prior, plan, best[1])
        value = sum(float(_log_likelihood(*found, part, smoother).sum()) for part in chunks(series, size))
    return FitRun(*found, value, [*history, value], converged)


def _log_likelihood(model: SwitchingModel, prior: Prior, series: Series, smoother: Method) -> Float[Tensor, "b"]:
    """Of each series, by the filter that the smoother begins with."""
    chosen = SwitchingFilter(model) if smoother == "imm" else SwitchingFilter(model, "gpb")
    parts = zip((prior.mean, prior.covariance, prior.log_mode_probability), (2, 3, 1), strict=True)
    of_targets = Prior(*(t.unsqueeze(0) if t is not None and t.ndim == n else t for t, n in parts))  # type: ignore[arg-type]
    return chosen.filter(series, of_targets).log_likelihood


def standard_errors(
    call: str, model: SwitchingModel, prior: Prior, series: Series, plan: FitPlan, smoother: Method
) -> dict[str, Tensor]:
    """Of the parameters themselves: the inverse information of the free numbers, carried over by the delta method.

    The information is minus the Hessian of the log likelihood; of more series than ten times the free numbers, the sum
    of the squares of their scores.
    """
    free = freed(call, model, prior, plan)
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
            own = {
                name: t.expand(len(part.observations), *t.shape).clone().requires_grad_() for name, t in free.items()
            }
            likelihood = _log_likelihood(*constrained(model, prior, plan, own), part, smoother).sum()
            scores = torch.autograd.grad(likelihood, list(own.values()))
            each = flat(dict(zip(own, scores, strict=True)), 1)
            information = information + each.mT @ each
    else:

        def total(vector: Tensor) -> Tensor:
            return _log_likelihood(*constrained(model, prior, plan, read(vector)), series, smoother).sum()

        information = -torch.autograd.functional.hessian(total, point)
    # Directions of which the series say nothing, as of modes that are never there, have no error that could be said.
    curvature, ways = torch.linalg.eigh(symmetric(information))
    told = curvature > count * torch.finfo(point.dtype).eps * curvature.abs().amax()
    covariance = (ways * torch.where(told, 1 / torch.where(told, curvature, 1.0), 0.0)) @ ways.mT
    silent = ways * ~told

    def values(vector: Tensor) -> tuple[Tensor, ...]:
        made, initial = constrained(model, prior, plan, read(vector))
        named = {name: getattr(made, name) for name in plan.learn if name != "initial"}
        return tuple((named | (prior_fields(initial) if "initial" in plan.learn else {})).values())

    names = [name for name in plan.learn if name != "initial"]
    names += list(prior_fields(prior)) if "initial" in plan.learn else []
    slopes = torch.autograd.functional.jacobian(values, point)

    def error(J: Tensor) -> Tensor:
        known = torch.einsum("...a,ab,...b->...", J, covariance, J).clamp(min=0).sqrt()
        unknown = (J @ silent).norm(dim=-1) > torch.finfo(point.dtype).eps ** 0.5 * J.norm(dim=-1)
        return known.masked_fill(unknown, torch.inf)

    return {name: error(J) for name, J in zip(names, slopes, strict=True)}
