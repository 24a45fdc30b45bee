"""Parameters of switching systems from series: expectation and maximisation, or the gradient of the log likelihood.

What is not named stays as it is; what is named begins where the model given has it. One of two ways leads up from
there, from one start or several, and modes come back in the order in which they were given.

Read next: em.py (expectation and maximisation), gradient_fit.py (the gradient), training_data.py.
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
from .em import maximised
from .gradient_fit import climbed, standard_errors
from .parametrization import MATRICES, NAMES, PLAIN, FitPlan, Structure, prior_fields
from .training_data import FitRun, counted, flattened, seen


class Fitted(NamedTuple):
    """What was learned.

    Attributes:
        model: the likeliest that was found.
        prior: for the filters; as given unless "initial" was learned.
        log_likelihood: of all series under that model.
        history: the log likelihood after each iteration, from the model given on; of the start that was kept.
        converged: whether the last iteration changed less than the tolerance.
        starts: the log likelihood that each start ended with.
        standard_error: of every parameter learned, by its name, from the curvature of the log likelihood; None unless
            asked for. Twice it on either side is an interval of 95 %; inf of what the series say nothing of,
            and where the end is no maximum.
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
    method: Literal["em", "gradient"] = "em",
    smoother: Method = "gpb2",
    starts: int = 1,
    max_iterations: int = 200,
    tolerance: float = 1e-7,
    errors: bool = False,
    progress: Progress = False,
    on_iteration: Callable[[int, float], None] | None = None,
    generator: torch.Generator | None = None,
) -> Fitted:
    """Learn parameters of a switching system from one series or many.

    Args:
        model: where learning begins; what is not learned stays as it is here.
        observations: all series, as of `imm`.
        prior: the same for all series: mean [s] or [k, s], covariance [s, s] or [k, s, s], log_mode_probability [k].
        learn: of "transition", "F", "Q", "H", "R", "b", "d" and "initial", the prior.
        structure: of Q and R: "full" (by default), "diagonal", or "scale", a factor of each mode's matrix.
        shared: which of them all modes have in common; F and b with Q, H and d with R.
        method: "em", or "gradient", quasi-Newton steps up the log likelihood of the filter the smoother begins with.
        smoother: "gpb2", "imm", "kim", or "enumerate" for series of a few steps.
        starts: how many: the first is the model, the others are changed at random; the likeliest end is kept.
        max_iterations: of each start; of "gradient", an iteration is ten steps.
        tolerance: nats a step that an iteration must gain.
        errors: whether to compute standard errors.
        progress: True for a text bar, or a function of the iterations done and their largest number.
        on_iteration: called after each iteration with its number and the log likelihood.

    Modes keep their order: where nothing but learned parameters tells them apart, they are brought back to the order of
    the model given. Cost of an iteration: one smoother of every series, in linear memory.
    Law: tests/laws/test_parameters_are_learned.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel
    >>> walk = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[0.1]]])) for q in (0.1, 3.0)]
    >>> model = SwitchingModel.of(walk, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> y = torch.randn(30, 10, 1, generator=torch.Generator().manual_seed(0)).cumsum(1)
    >>> prior = Prior(torch.zeros(1), torch.eye(1))
    >>> found = fit(model, y, prior, learn=["Q"], shared=["Q"], tolerance=1e-4)
    >>> found.converged, bool(found.log_likelihood > found.history[0])
    (True, True)
    """
    call = "fit"
    if not isinstance(model, SwitchingModel):
        remedy = "What functions hold is learned by the gradient: imm(...).log_likelihood.backward()."
        raise InputTypeError(call, "model", f"model must be a SwitchingModel, got {type(model).__name__}", remedy)
    plan = _planned(call, model, learn, structure or {}, shared, method)
    prior = _prior_of_modes(call, model, prior)
    series = _training_data(call, model, as_series(observations))
    free_fields = _tell_apart(model, plan)
    given, model = model, _restricted(model, plan)
    if starts < 1 or max_iterations < 1:
        fact = f"{starts} and {max_iterations}"
        raise InputValueError(
            call, "starts", f"starts and max_iterations must be at least 1, got {fact}", "1 start is the model itself."
        )
    report, enough = reporter(progress, "iterations"), tolerance * float(counted(series).sum())
    ascend = maximised if method == "em" else climbed
    runs: list[FitRun] = []

    def after(iteration: int, log_likelihood: float) -> None:
        report(len(runs) * max_iterations + min(iteration + 1, max_iterations), starts * max_iterations)
        if on_iteration is not None:
            on_iteration(iteration, log_likelihood)

    for start in range(starts):
        begun = model if start == 0 else _changed(model, plan, generator)
        runs.append(ascend(begun, prior, series, plan, smoother, max_iterations, enough, after))
        report(len(runs) * max_iterations, starts * max_iterations)
    best = max(runs, key=lambda run: run.log_likelihood)
    learned, prior = best.model, best.prior
    if free_fields:
        learned, prior = _in_order(given, learned, prior, plan)
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


# What learning begins with -----------------------------------------------------------------------------------------


def _planned(
    call: str,
    model: SwitchingModel,
    learn: Sequence[str],
    structure: Mapping[str, Structure],
    shared: Sequence[str],
    method: str,
) -> FitPlan:
    unknown = [name for name in learn if name not in NAMES]
    if unknown or not learn:
        condition = f"learn must name some of {', '.join(NAMES)}"
        raise InputValueError(call, "learn", f"{condition}, got {list(learn)}", "What is not named stays as it is.")
    if method not in ("em", "gradient"):
        raise InputValueError(
            call, "method", f'method must be "em" or "gradient", got {method!r}', "em needs no step size."
        )
    missing = [name for name in learn if name in PLAIN and getattr(model, name) is None]
    if missing:
        remedy = "Give zeros to begin with."
        raise InputValueError(call, "model", f"the model must have {missing[0]} to learn it, got None", remedy)
    wrong = [n for n in structure if n not in MATRICES or structure[n] not in ("full", "diagonal", "scale")]
    if wrong:
        condition = 'structure must say "full", "diagonal" or "scale" of Q and R'
        raise InputValueError(
            call, "structure", f"{condition}, got {dict(structure)}", "Other parameters have no structure."
        )
    partner = {"F": "Q", "b": "Q", "H": "R", "d": "R"}
    alone = [n for n in shared if n not in learn or n in ("transition", "initial")]
    alone += [n for n in shared if n in partner and partner[n] not in shared and method == "em"]
    if alone:
        condition = "shared must name parameters that are learned, F and b together with Q, H and d together with R"
        remedy = "What weighs the errors of several modes must be common to them too."
        raise InputValueError(call, "shared", f"{condition}, got {list(shared)}", remedy)
    plan = FitPlan(tuple(learn), {name: structure.get(name, "full") for name in MATRICES}, tuple(shared))
    if any(t.ndim > len(ENDS[name]) + 1 for name, t in model.fields().items()):
        remedy = "Learn from series that share a model."
        raise InputValueError(call, "model", "the model must be one for all series, got one for each target", remedy)
    changes = model.continuous or model.steps is not None
    fixed = {name for name in plan.learn if name in MATRICES and plan.structure[name] == "scale"}
    if changes and set(plan.learn) - fixed - {"initial"}:
        condition = 'learn must be Q and R as "scale", or "initial", of a model that changes in time'
        remedy = 'Pass learn=["Q", "R"] and structure={"Q": "scale", "R": "scale"}.'
        raise InputValueError(call, "learn", f"{condition}, got learn={list(plan.learn)}", remedy)
    if model.B is not None or model.D is not None or model.components is not None:
        remedy = "Fold inputs into b and d; learn modes of one size."
        raise InputValueError(call, "model", "the model must have no inputs and no components, got some", remedy)
    return plan


def _prior_of_modes(call: str, model: SwitchingModel, prior: Prior) -> Prior:
    """The prior with a Gaussian and a probability of each mode, the same for all series."""
    check_prior(call, prior)
    k, s = model.modes, model.state_size
    mean, covariance, log_pi = prior.mean, prior.covariance, prior.log_mode_probability
    check_floats(call, **{"prior.mean": mean, "model": model.R})
    if mean.shape not in ((s,), (k, s)) or covariance.shape not in ((s, s), (k, s, s)):
        condition = f"prior.mean must be [{s}] or [{k}, {s}] and prior.covariance [{s}, {s}] or [{k}, {s}, {s}]"
        fact = f"shapes {shape_of(mean)} and {shape_of(covariance)}"
        raise InputValueError(call, "prior.mean", f"{condition}, got {fact}", "All series have one prior.")
    log_pi = mean.new_zeros(k).log_softmax(-1) if log_pi is None else log_pi.log_softmax(-1)
    if log_pi.shape != (k,):
        condition, fact = f"prior.log_mode_probability must be [{k}]", f"shape {shape_of(log_pi)}"
        raise InputValueError(call, "prior.log_mode_probability", f"{condition}, got {fact}", "None is uniform.")
    return Prior(mean.expand(k, s), covariance.expand(k, s, s), log_pi)


def _training_data(call: str, model: SwitchingModel, series: Series) -> Series:
    """Series as [b, t, o], checked once."""
    prepared(call, model, series, validate=model.validate)
    series = flattened(series)
    if not bool(seen(series).any()):
        remedy = "Pass series with observations."
        raise InputValueError(call, "observations", "observations must hold something seen, got gaps alone", remedy)
    return series


def _tell_apart(model: SwitchingModel, plan: FitPlan) -> bool:
    """Whether learned parameters alone tell modes apart, so that their order is a matter of chance.

    Modes that nothing tells apart at the beginning would stay alike for ever.
    """

    def differs(name: str) -> bool:
        field = getattr(model, name)
        if field is None or name == "transition":
            return False
        at = field.ndim - (2 if name in ("b", "d") else 3)
        return bool((field != field.narrow(at, 0, 1)).any())

    different = [name for name in ("F", "Q", "H", "R", "b", "d") if differs(name)]
    own = [name for name in plan.learn if name not in (*plan.shared, "transition", "initial")]
    if model.modes > 1 and not different and own:
        remedy = f"Begin with different {own[0]}."
        raise InputValueError(
            "fit", "modes", "modes must differ at the beginning, got modes that are all alike", remedy
        )
    return model.modes > 1 and bool(different) and all(name in own for name in different)


def _restricted(model: SwitchingModel, plan: FitPlan) -> SwitchingModel:
    """The start as what is learned allows it: what modes share as their average, diagonal noise without the rest."""
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
        fields[name] = field
    return dataclasses.replace(model, **fields)


def _changed(model: SwitchingModel, plan: FitPlan, generator: torch.Generator | None) -> SwitchingModel:
    """Another start: matrices scaled by up to four times either way, maps and offsets moved, the chain loosened."""

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
    given: SwitchingModel, found: SwitchingModel, prior: Prior, plan: FitPlan
) -> tuple[SwitchingModel, Prior]:
    """Modes in the order in which they are nearest to those given."""
    k = given.modes
    cost = torch.zeros(k, k, dtype=given.R.dtype, device="cpu")
    for name in plan.learn:
        if name in (*MATRICES, *PLAIN) and name not in plan.shared:
            a, b = getattr(given, name).flatten(1), getattr(found, name).flatten(1)
            scale = torch.maximum(a.abs().mean(), b.abs().mean()).clamp(min=1e-300)
            cost = cost + ((a.unsqueeze(1) - b) / scale).square().sum(-1).cpu()
    rows = range(k)
    if k <= 7:
        order = min(itertools.permutations(rows), key=lambda p: sum(float(cost[i, p[i]]) for i in rows))
    else:  # the nearest first: 8! orders are too many to look at
        taken: list[int] = []
        for i in rows:
            taken.append(min((j for j in rows if j not in taken), key=lambda j, i=i: float(cost[i, j])))  # type: ignore[misc]
        order = tuple(taken)
    places = torch.tensor(order, device=given.R.device)
    fields = {}
    for name, field in found.fields().items():
        field = field.index_select(-len(ENDS[name]), places)
        fields[name] = field.index_select(-1, places) if name in ("transition", "rate") else field
    initial = {name: t[places] for name, t in prior_fields(prior).items()}
    return dataclasses.replace(found, **as_arguments(fields)), Prior(**initial)
