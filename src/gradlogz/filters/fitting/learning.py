"""Fit the parameters of switching systems to series: EM, or gradient ascent of the log likelihood.

Parameters that are not named keep their values; the others start from those of the model. There may be several starts,
and modes are returned in the order of the model.

Read next: em.py (EM), gradient_fit.py (L-BFGS and standard errors), training_data.py.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputTypeError, InputValueError
from ..._progress import Progress, reporter
from ..._typing import Float, Tensor
from ..gaussian.clutter import Clutter
from ..gaussian.smoother import Method
from ..models.switching_model import SwitchingModel
from ..prior_and_series import Prior, Series, as_series
from .em import run_em
from .gradient_fit import run_lbfgs, standard_errors
from .parametrization import Structure, prior_fields
from .preparation import (
    check_smoother,
    in_order,
    modes_are_exchangeable,
    outliers_of,
    perturbed,
    plan_of,
    prior_of_modes,
    restricted,
    training_data,
)
from .training_data import OF_ALL_SERIES, FitRun, System, valid_steps

NEAR = 0.005  # nats below the maximum: 0.1 standard errors, since l* - l = δ²/2


class Fitted(NamedTuple):
    """Result of `fit`.

    Attributes:
        model: the model with the highest log likelihood.
        prior: the prior; unchanged unless "initial" or "initial_mean" was learned.
        log_likelihood: log likelihood of all series under that model.
        history: log likelihood after each iteration of the best start, including the initial one.
        converged: whether the log likelihood that is left to gain was estimated to be below the tolerance: for
            "gradient" by the Newton decrement, for "em" by extrapolation of its gains.
        starts: final log likelihood of each start.
        standard_error: standard error of every learned parameter by name, from the curvature of the log likelihood;
            None unless errors=True. A 95 % confidence interval is the estimate ± 1.96 standard errors. Infinite for
            parameters that the series do not determine, and if the end point is not a maximum.
        clutter: the outliers, with the learned probability; None unless clutter= was passed.
    """

    model: SwitchingModel
    prior: Prior
    log_likelihood: Float[Tensor, ""]
    history: Float[Tensor, "n"]
    converged: bool
    starts: Float[Tensor, "r"]
    standard_error: dict[str, Tensor] | None
    clutter: Clutter | None


@without_autocast
def fit(
    model: SwitchingModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    learn: Sequence[str] = ("transition", "Q", "R"),
    structure: Mapping[str, Structure] | None = None,
    shared: Sequence[str] = (),
    clutter: Clutter | None = None,
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
        prior: prior of all series, or of each: any shape that `imm` takes.
        learn: parameters to learn: "transition", "F", "Q", "H", "R", "b", "d"; "rate" for the rates of a Generator;
            "initial" for the prior of all series; "initial_mean" for its mean only, one for each series if the prior
            has one for each, and one for all modes unless it differs between them; "clutter" for the probability of
            outliers.
        structure: structure of Q and R: "full" (default), "diagonal", or "scale", one factor for each mode's matrix.
        shared: parameters that all modes share; with EM, F and b require Q, and H and d require R.
        clutter: for series with outliers: the model is then that of `with_clutter`, so that outliers have little
            influence on the parameters. None if every observation belongs to the model.
        method: "gradient", gradient ascent (L-BFGS) on the log likelihood of the filter in the smoother's forward pass;
            or "em", whose iterations are simpler and more. Only EM learns from a singular Q or R with all its entries.
        smoother: "gpb2", "imm" or "kim", whose forward pass is that of "gpb2"; for "em" also "enumerate".
        starts: number of starts. The first is the model, the others are random perturbations; the best end is kept.
        max_iterations: maximum number of iterations of each start.
        tolerance: bound of the log likelihood that is left to gain when iterations end, in nats per time step; at most
            0.005 nats in all, which is a distance of 0.1 standard errors from the maximum (EM with an approximate
            smoother: from its fixed point).
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
    series = as_series(observations)
    plan = plan_of(call, model, learn, structure or {}, shared, method)
    check_smoother(call, smoother, method)
    batch = series.observations.shape[:-2]
    series = training_data(call, model, series)
    plan = plan._replace(one_mean=prior.mean.ndim == 1 or prior.mean.shape[-2] == 1)
    system = System(
        restricted(model, plan),
        prior_of_modes(call, model, prior, batch, plan),
        outliers_of(call, model, clutter, plan),
    )
    exchangeable = modes_are_exchangeable(model, plan)
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
        begin = system if start == 0 else system._replace(model=perturbed(system.model, plan, generator))
        runs.append(ascend(begin, series, plan, smoother, max_iterations, enough, after))
        report(len(runs) * max_iterations, starts * max_iterations)
    best = max(runs, key=lambda run: run.log_likelihood)
    learned = best.system
    if exchangeable:
        ordered, initial = in_order(model, learned.model, learned.prior, plan)
        learned = learned._replace(model=ordered, prior=initial)
    standard = standard_errors(call, learned, series, plan, smoother) if errors else None
    like = series.observations
    return Fitted(
        dataclasses.replace(learned.model, validate=model.validate),
        _in_batch(learned.prior, batch),
        log_likelihood=like.new_tensor(best.log_likelihood),
        history=like.new_tensor(best.history),
        converged=best.converged,
        starts=like.new_tensor([run.log_likelihood for run in runs]),
        standard_error=standard,
        clutter=learned.clutter,
    )


def _in_batch(prior: Prior, batch: torch.Size) -> Prior:
    """The prior with the targets of the observations in place of flattened ones."""
    fields = prior_fields(prior)
    return Prior(
        **{n: t.reshape(*batch, *t.shape[1:]) if t.ndim > OF_ALL_SERIES[n] else t for n, t in fields.items()},
        per="mode",
    )


torch.serialization.add_safe_globals([Fitted])  # for torch.load with weights_only=True
