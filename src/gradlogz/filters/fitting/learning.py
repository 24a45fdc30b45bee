"""Fit the parameters of switching systems to series: EM, or gradient ascent of the log likelihood.

Parameters that are not named keep their values; the others start from those of the model. There may be several starts,
and modes are returned in the order of the model.

Read next: em.py (EM), gradient_fit.py (L-BFGS and standard errors), training_data.py.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputTypeError, InputValueError, check_floats, shape_of
from ..._progress import Progress, reporter
from ..._typing import Float, Tensor
from ..gaussian.smoother import Method
from ..models.switching_model import ENDS, SwitchingModel, as_arguments
from ..prior_and_series import Prior, Series, as_series, check_prior
from ..validation import prepared
from .em import run_em
from .gradient_fit import run_lbfgs, standard_errors
from .parametrization import MATRICES, NAMES, PLAIN, FitPlan, Structure, prior_fields
from .training_data import FitRun, flattened, observed_entries, valid_steps

NEAR = 0.005  # nats below the maximum: 0.1 standard errors, since l* - l = δ²/2


class Fitted(NamedTuple):
    """Result of `fit`.

    Attributes:
        model: the model with the highest log likelihood.
        prior: the prior; unchanged unless "initial" was learned.
        log_likelihood: log likelihood of all series under that model.
        history: log likelihood after each iteration of the best start, including the initial one.
        converged: whether the log likelihood that is left to gain was estimated to be below the tolerance: for
            "gradient" by the Newton decrement, for "em" by extrapolation of its gains.
        starts: final log likelihood of each start.
        standard_error: standard error of every learned parameter by name, from the curvature of the log likelihood;
            None unless errors=True. A 95 % confidence interval is the estimate ± 1.96 standard errors. Infinite for
            parameters that the series do not determine, and if the end point is not a maximum.
    """

    model: SwitchingModel
    prior: Prior
    log_likelihood: Float[Tensor, ""]
    history: Float[Tensor, "n"]
    converged: bool
    starts: Float[Tensor, "r"]
    standard_error: dict[str, Tensor] | None


@without_autocast
def fit(
    model: SwitchingModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    learn: Sequence[str] = ("transition", "Q", "R"),
    structure: Mapping[str, Structure] | None = None,
    shared: Sequence[str] = (),
    method: Literal["em", "gradient"] = "gradient",
    smoother: Method = "gpb2",
    starts: int = 1,
    max_iterations: int = 200,
    tolerance: float = 1e-7,
    errors: bool = False,
    progress: Progress = False,
    on_iteration: Callable[[int, float], None] | None = None,
    generator: torch.Generator | None = None,
) -> Fitted:
    """Fit parameters of a switching system to one or many series.

    Args:
        model: initial values; parameters that are not learned keep them.
        observations: all series, as in `imm`.
        prior: prior of all series: mean [s] or [k, s], covariance [s, s] or [k, s, s], log_mode_probability [k].
        learn: parameters to learn: "transition", "F", "Q", "H", "R", "b", "d", and "initial" for the prior.
        structure: structure of Q and R: "full" (default), "diagonal", or "scale", one factor for each mode's matrix.
        shared: parameters that all modes share; with EM, F and b require Q, and H and d require R.
        method: "gradient", gradient ascent (L-BFGS) on the log likelihood of the filter in the smoother's forward pass;
            or "em", whose iterations are simpler and more. Only EM learns from a singular Q or R with all its entries.
        smoother: "gpb2", "imm" or "kim", whose forward pass is that of "gpb2"; for "em" also "enumerate".
        starts: number of starts. The first is the model, the others are random perturbations; the best end is kept.
        max_iterations: maximum number of iterations of each start.
        tolerance: bound of the log likelihood that is left to gain when iterations end, in nats per time step; at most
            0.005 nats in all, which is a distance of 0.1 standard errors from the maximum.
        errors: whether to compute standard errors.
        progress: True for a progress bar, or a function of the finished and the maximum number of iterations.
        on_iteration: function called after each iteration with its number and the log likelihood.
        generator: random number generator of the starts.

    If only learned parameters distinguish the modes, the modes are reordered to match those of the model. Cost of an
    iteration: one or two passes of the filter and its gradient over every series, or one of the smoother, in linear
    memory. Both are compiled on the CPU if numba is installed.
    Law: tests/laws/test_parameters_are_learned.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel
    >>> walk = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[0.1]]])) for q in (0.1, 3.0)]
    >>> model = SwitchingModel.of(walk, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> y = torch.randn(30, 10, 1, generator=torch.Generator().manual_seed(0)).cumsum(1)
    >>> prior = Prior(torch.zeros(1), torch.eye(1))
    >>> fitted = fit(model, y, prior, learn=["Q"], shared=["Q"], tolerance=1e-4)
    >>> fitted.converged, bool(fitted.log_likelihood > fitted.history[0])
    (True, True)
    """
    call = "fit"
    if not isinstance(model, SwitchingModel):
        remedy = "Use imm(...).log_likelihood.backward() with an optimizer for parameters of functions."
        raise InputTypeError(call, "model", f"model must be a SwitchingModel, got {type(model).__name__}", remedy)
    plan = _fit_plan(call, model, learn, structure or {}, shared, method)
    _check_smoother(call, smoother, method)
    prior = _prior_of_modes(call, model, prior)
    series = _training_data(call, model, as_series(observations))
    exchangeable = _modes_are_exchangeable(model, plan)
    initial_model, model = model, _restricted(model, plan)
    if starts < 1 or max_iterations < 1:
        fact = f"starts={starts} and max_iterations={max_iterations}"
        raise InputValueError(
            call,
            "starts",
            f"starts and max_iterations must be at least 1, got {fact}",
            "Use starts=1 for the model only.",
        )
    report, enough = reporter(progress, "iterations"), min(tolerance * float(valid_steps(series).sum()), NEAR)
    ascend = run_em if method == "em" else run_lbfgs
    runs: list[FitRun] = []

    def after(iteration: int, log_likelihood: float) -> None:
        report(len(runs) * max_iterations + min(iteration + 1, max_iterations), starts * max_iterations)
        if on_iteration is not None:
            on_iteration(iteration, log_likelihood)

    for start in range(starts):
        start_model = model if start == 0 else _perturbed(model, plan, generator)
        runs.append(ascend(start_model, prior, series, plan, smoother, max_iterations, enough, after))
        report(len(runs) * max_iterations, starts * max_iterations)
    best = max(runs, key=lambda run: run.log_likelihood)
    learned, prior = best.model, best.prior
    if exchangeable:
        learned, prior = _in_order(initial_model, learned, prior, plan)
    standard = standard_errors(call, learned, prior, series, plan, smoother) if errors else None
    like = series.observations
    return Fitted(
        dataclasses.replace(learned, validate=model.validate),
        prior,
        log_likelihood=like.new_tensor(best.log_likelihood),
        history=like.new_tensor(best.history),
        converged=best.converged,
        starts=like.new_tensor([run.log_likelihood for run in runs]),
        standard_error=standard,
    )


# Preparation -------------------------------------------------------------------------------------------------------


def _check_smoother(call: str, smoother: str, method: str) -> None:
    known = ("gpb2", "imm", "kim", *(("enumerate",) if method == "em" else ()))
    if smoother not in known:
        problem = f"smoother must be one of {', '.join(known)} with method={method!r}, got {smoother!r}"
        raise InputValueError(call, "smoother", problem, 'Use method="em" for "enumerate".')


def _fit_plan(
    call: str,
    model: SwitchingModel,
    learn: Sequence[str],
    structure: Mapping[str, Structure],
    shared: Sequence[str],
    method: str,
) -> FitPlan:
    unknown = [name for name in learn if name not in NAMES]
    if unknown or not learn:
        condition = "learn must list names of parameters"
        raise InputValueError(call, "learn", f"{condition}, got {list(learn)}", f"Choose from {', '.join(NAMES)}.")
    if method not in ("em", "gradient"):
        raise InputValueError(
            call, "method", f'method must be "em" or "gradient", got {method!r}', 'Use "gradient" where EM is slow.'
        )
    missing = [name for name in learn if name in PLAIN and getattr(model, name) is None]
    if missing:
        remedy = f"Build the model with {missing[0]} of zeros."
        raise InputValueError(call, "model", f"the model has no {missing[0]} to learn", remedy)
    wrong = [n for n in structure if n not in MATRICES or structure[n] not in ("full", "diagonal", "scale")]
    if wrong:
        condition = 'structure must map Q or R to "full", "diagonal" or "scale"'
        raise InputValueError(
            call, "structure", f"{condition}, got {dict(structure)}", "Drop other parameters; they have no structure."
        )
    partner = {"F": "Q", "b": "Q", "H": "R", "d": "R"}
    alone = [n for n in shared if n not in learn or n in ("transition", "initial")]
    alone += [n for n in shared if n in partner and partner[n] not in shared and method == "em"]
    if alone:
        condition = "shared must list learned parameters, F and b only together with Q, H and d only with R"
        remedy = "Share the noise covariance too; EM needs it to pool modes."
        raise InputValueError(call, "shared", f"{condition}, got {list(shared)}", remedy)
    plan = FitPlan(tuple(learn), {name: structure.get(name, "full") for name in MATRICES}, tuple(shared))
    if any(t.ndim > len(ENDS[name]) + 1 for name, t in model.fields().items()):
        remedy = "Drop the target dimensions of its fields."
        raise InputValueError(call, "model", "all series must share one model, but its fields differ by target", remedy)
    changes = model.continuous or model.steps is not None
    fixed = {name for name in plan.learn if name in MATRICES and plan.structure[name] == "scale"}
    if changes and set(plan.learn) - fixed - {"initial"}:
        condition = 'for a time-varying or continuous-time model learn may list only Q and R as "scale", and "initial"'
        remedy = 'Pass learn=["Q", "R"] and structure={"Q": "scale", "R": "scale"}.'
        raise InputValueError(call, "learn", f"{condition}, got learn={list(plan.learn)}", remedy)
    if model.B is not None or model.D is not None or model.components is not None:
        remedy = "Absorb inputs into b and d, and use modes of one state size."
        raise InputValueError(call, "model", "fit does not support models with B, D or components", remedy)
    return plan


def _prior_of_modes(call: str, model: SwitchingModel, prior: Prior) -> Prior:
    """Expand the prior to one Gaussian and one probability for each mode, shared by all series."""
    check_prior(call, prior)
    k, s = model.modes, model.state_size
    mean, covariance, log_pi = prior.mean, prior.covariance, prior.log_mode_probability
    check_floats(call, **{"prior.mean": mean, "model": model.R})
    if mean.shape not in ((s,), (k, s)) or covariance.shape not in ((s, s), (k, s, s)):
        condition = f"prior.mean must be [{s}] or [{k}, {s}] and prior.covariance [{s}, {s}] or [{k}, {s}, {s}]"
        fact = f"shapes {shape_of(mean)} and {shape_of(covariance)}"
        raise InputValueError(call, "prior.mean", f"{condition}, got {fact}", "Use one prior for all series.")
    log_pi = mean.new_zeros(k).log_softmax(-1) if log_pi is None else log_pi.log_softmax(-1)
    if log_pi.shape != (k,):
        condition, fact = f"prior.log_mode_probability must be [{k}]", f"shape {shape_of(log_pi)}"
        raise InputValueError(call, "prior.log_mode_probability", f"{condition}, got {fact}", "Pass None for uniform.")
    return Prior(mean.expand(k, s), covariance.expand(k, s, s), log_pi, per="mode")


def _training_data(call: str, model: SwitchingModel, series: Series) -> Series:
    """Check the series and flatten them to [b, t, o]."""
    prepared(call, model, series, validate=model.validate)
    series = flattened(series)
    if not bool(observed_entries(series).any()):
        remedy = "Pass series with observations."
        raise InputValueError(call, "observations", "all observations are missing", remedy)
    return series


def _modes_are_exchangeable(model: SwitchingModel, plan: FitPlan) -> bool:
    """Return True if only learned parameters distinguish the modes, so that their order is arbitrary.

    Raises if initially identical modes would stay identical.
    """

    def differs(name: str) -> bool:
        field = getattr(model, name)
        if field is None or name == "transition":
            return False
        at = field.ndim - (2 if name in ("b", "d") else 3)
        return bool((field != field.narrow(at, 0, 1)).any())

    different = [name for name in ("F", "Q", "H", "R", "b", "d") if differs(name)]
    per_mode = [name for name in plan.learn if name not in (*plan.shared, "transition", "initial")]
    if model.modes > 1 and not different and per_mode:
        remedy = f"Start with different values of {per_mode[0]}."
        raise InputValueError("fit", "modes", "the modes of the initial model are identical and would stay so", remedy)
    return model.modes > 1 and bool(different) and all(name in per_mode for name in different)


def _restricted(model: SwitchingModel, plan: FitPlan) -> SwitchingModel:
    """Project the initial model onto the constraints: average shared parameters, drop off-diagonal noise."""
    fields: dict[str, Any] = {}
    for name in plan.learn:
        if name in ("transition", "initial"):
            continue
        field = getattr(model, name)
        if name in MATRICES and plan.structure[name] == "diagonal":
            field = torch.diag_embed(field.diagonal(dim1=-2, dim2=-1))
        if name in plan.shared:
            at = -len(ENDS[name])
            field = field.mean(at, keepdim=True).expand_as(field)
        if field is not getattr(model, name):
            fields[name] = field
    return dataclasses.replace(model, **fields) if fields else model


def _perturbed(model: SwitchingModel, plan: FitPlan, generator: torch.Generator | None) -> SwitchingModel:
    """Random perturbation for another start: scaled covariances, shifted maps and offsets, mixed transitions."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=model.R.dtype, device=model.R.device, generator=generator)

    fields: dict[str, Any] = {}
    for name in plan.learn:
        field: Any = getattr(model, name, None)
        if name == "transition":
            noise = normal(*field.shape).exp() * (field > 0)
            fields[name] = 0.5 * field + 0.5 * noise / noise.sum(-1, keepdim=True)
        elif name in MATRICES:
            factor = (0.7 * normal(1 if name in plan.shared else model.modes)).exp()
            fields[name] = factor[:, None, None] * field
        elif name in PLAIN:
            size = 0.3 * (field.abs().mean() + 0.1)
            fields[name] = field + size * normal(*(field[:1] if name in plan.shared else field).shape)
    return dataclasses.replace(model, **fields, validate=False)


def _in_order(
    initial_model: SwitchingModel, fitted: SwitchingModel, prior: Prior, plan: FitPlan
) -> tuple[SwitchingModel, Prior]:
    """Reorder the fitted modes to match the initial ones as closely as possible."""
    k = initial_model.modes
    cost = torch.zeros(k, k, dtype=initial_model.R.dtype, device="cpu")
    for name in plan.learn:
        if name in (*MATRICES, *PLAIN) and name not in plan.shared:
            a, b = getattr(initial_model, name).flatten(1), getattr(fitted, name).flatten(1)
            scale = torch.maximum(a.abs().mean(), b.abs().mean()).clamp(min=1e-300)
            cost = cost + ((a.unsqueeze(1) - b) / scale).square().sum(-1).cpu()
    rows = range(k)
    if k <= 7:
        order = min(itertools.permutations(rows), key=lambda p: sum(float(cost[i, p[i]]) for i in rows))
    else:  # greedy assignment: 8! permutations are too many
        taken: list[int] = []
        for i in rows:
            taken.append(min((j for j in rows if j not in taken), key=lambda j, i=i: float(cost[i, j])))  # type: ignore[misc]
        order = tuple(taken)
    places = torch.tensor(order, device=initial_model.R.device)
    fields = {}
    for name, field in fitted.fields().items():
        field = field.index_select(-len(ENDS[name]), places)
        fields[name] = field.index_select(-1, places) if name in ("transition", "rate") else field
    initial = {name: t[places] for name, t in prior_fields(prior).items()}
    return dataclasses.replace(fitted, **as_arguments(fields)), Prior(**initial, per="mode")
