"""Validation of a prior and a series against a model, once per call; both are expanded to full shape.

    observations [*b, t, o], NaN or masked where missing      initial mean and covariance [*b, k, ...]

Targets b broadcast against size 1 only. Values are checked once for a series, never step by step.
"""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from .._errors import (
    InputTypeError,
    InputValueError,
    check_finite,
    check_floats,
    check_logarithms,
    check_normalized,
    check_positive_semidefinite,
    has_values,
    present,
    shape_of,
)
from .._typing import Bool, Float, Int, Tensor
from .models.nonlinear_model import NOT_FINITE, NonlinearModel
from .models.switching_model import ENDS, SwitchingModel
from .moment_matching import symmetrized
from .prior_and_series import Prior, Series, check_mask, check_prior
from .results import FilterState

Model = SwitchingModel | NonlinearModel
LOGARITHMS = "Pass .log() of probabilities, or .log_softmax(-1) of logits."


class PreparedSeries(NamedTuple):
    """Parameters with inputs absorbed, observations without NaN, and the mask of observed entries (None: all)."""

    parameters: Any  # Parameters, or NonlinearParameters of such a model
    observations: Float[Tensor, "*b t o"]
    observed: Bool[Tensor, "*b t o"] | None


def prepared(call: str, model: Model, series: Series, *, validate: bool = True) -> PreparedSeries:
    """Check a series against its model and return it as the steps of a filter take it."""
    return next(prepared_parts(call, model, series, validate=validate))


def prepared_parts(
    call: str, model: Model, series: Series, *, validate: bool = True, longest: int | None = None
) -> Iterator[PreparedSeries]:
    """Yield `prepared` as one part, or for continuous time in parts of at most `longest` steps, discretised lazily."""
    y, inputs, o = series.observations, series.inputs, model.observation_size
    check_floats(call, observations=y, model=model.R)
    if y.shape[-1] != o:
        condition, remedy = f"observations must be [*b, t, o={o}]", "Match the observation size of the model."
        raise InputValueError(call, "observations", f"{condition}, got shape {shape_of(y)}", remedy)
    batch, steps = y.shape[:-2], y.shape[-2]
    model_steps = model.steps
    if model_steps not in (None, 1, steps):
        condition = f"observations must have t={model_steps} steps, as the time-varying model has"
        remedy = "Shorten the model or the series, or drop the time dimension of a constant model."
        raise InputValueError(call, "observations", f"{condition}, got shape {shape_of(y)}", remedy)
    if model_steps is not None:  # targets come before time
        check_targets(call, model, batch)
    observed = observed_mask(call, series, validate)
    if observed is not None:
        y = torch.where(observed, y, 0.0)
    if validate:
        check_finite(call, observations=y, **present(inputs=inputs))
    _check_inputs(call, model, inputs)
    dt = intervals(call, model, series, validate=validate)
    if dt is None:
        return iter((PreparedSeries(model.parameters(inputs), y, observed),))
    size = longest if longest is not None and model_steps is None else steps
    if steps <= size:
        return iter((PreparedSeries(model.at(dt).parameters(inputs), y, observed),))
    rest = (itertools.repeat(None) if t is None else t.split(size, -2) for t in (inputs, y, observed))
    parts = zip(dt.split(size, -1), *rest, strict=False)
    return (PreparedSeries(model.at(dt).parameters(inputs), y, observed) for dt, inputs, y, observed in parts)


def initial_state(call: str, model: Model, prior: Prior, batch: torch.Size) -> FilterState:
    """State at time 0 of every target and mode, checked and expanded from the prior."""
    check_model(call, model)
    check_prior(call, prior)
    k, s = model.modes, model.state_size
    mean, covariance, log_pi = prior.mean, prior.covariance, prior.log_mode_probability
    check_floats(call, **{"prior.mean": mean, "model": model.R})
    if model.validate:
        covariance = symmetrized(covariance)
        check_finite(call, **{"prior.mean": mean, "prior.covariance": covariance})
    for name, t, alone in (("prior.mean", mean, 1), ("prior.covariance", covariance, 2)):
        if t.ndim == alone + 1 and tuple(batch) == (k,) == (t.shape[0],) != (1,) and prior.per is None:
            problem = f"{name} of shape {shape_of(t)} may be one for each of {k} modes or of as many targets"
            raise InputValueError(call, name, problem, 'Pass Prior(..., per="mode") or Prior(..., per="target").')
    m = _spread(call, "prior.mean", mean, batch, k, (s,))
    P = _spread(call, "prior.covariance", covariance, batch, k, (s, s))
    if model.validate:
        check_positive_semidefinite(call, "prior.covariance", covariance)
    if (has := model.has) is not None:
        m, P = m * has, P * (has.unsqueeze(-1) & has.unsqueeze(-2))
    if log_pi is None:
        log_pi = m.new_full((*batch, k), -math.log(k))
    else:
        name, initial = "prior.log_mode_probability", log_pi
        log_pi = _spread(call, name, initial, batch, k, ())
        if initial.shape[-1] != k:
            condition, fact = f"{name} must end in k={k}, the number of modes", f"shape {shape_of(initial)}"
            raise InputValueError(
                call, name, f"{condition}, got {fact}", "Pass one for each mode, or None for uniform."
            )
        if model.validate:
            check_logarithms(call, name, initial)
            check_normalized(call, f"exp({name})", initial.logsumexp(-1), LOGARITHMS)
    return FilterState(m, P, log_pi, m.new_zeros(batch))


def check_model(call: str, model: object) -> None:
    """Raise InputTypeError unless `model` is one that filters accept."""
    if not isinstance(model, SwitchingModel | NonlinearModel):
        condition = "model must be a SwitchingModel or a NonlinearModel"
        remedy = "Wrap a KalmanModel: SwitchingModel.of([mode], transition=torch.ones(1, 1))."
        raise InputTypeError(call, "model", f"{condition}, got {type(model).__name__}", remedy)


def check_state(call: str, model: Model, state: FilterState, *, depth: int) -> None:
    """Check that a state was created by this filter: dtype, state size, number of modes and histories.

    Args:
        depth: depth of "gpb"; 0 for "imm".
    """
    check_floats(call, **{"state.mean": state.mean, "model": model.R})
    if state.filter not in (None, filter_name(depth)):
        problem = f"state must come from this filter, {filter_name(depth)}, but it comes from {state.filter}"
        raise InputValueError(call, "state", problem, "Start with init of the same filter.")
    k, s = model.modes, model.state_size
    gaussians, histories = state.mean.shape[-2], state.log_probability.shape[-1]
    if depth == 1:
        fits = (gaussians, histories) == (1, k)
    else:
        deep = {k**n for n in range(1, max(depth, 2))}
        fits = gaussians == histories and gaussians in deep
    if not fits or state.mean.shape[-1] != s:
        wanted = (
            "1 Gaussian" if depth == 1 else f"k={k} Gaussians" if depth < 3 else f"k, k², ... k^{depth - 1} Gaussians"
        )
        condition = f"state must come from this filter, with {wanted} of size s={s}"
        fact = f"shapes {shape_of(state.mean)} and {shape_of(state.log_probability)}"
        raise InputValueError(call, "state", f"{condition}, got {fact}", "Start with init of the same filter.")


def filter_name(depth: int) -> str:
    """Name of a filter: "imm" for depth 0, else "gpb" with its depth."""
    return "imm" if depth == 0 else f"gpb{depth}"


def check_observation(call: str, model: Model, observation: Tensor, batch: torch.Size) -> None:
    """Check that there is one observation for each target of a state."""
    if observation.shape != (*batch, model.observation_size):
        condition = f"observation must be {(*batch, model.observation_size)} for this state and model"
        remedy = "Start with init(batch_shape=...) for a batch of targets."
        raise InputValueError(call, "observation", f"{condition}, got shape {shape_of(observation)}", remedy)


def without_gaps(
    call: str, y: Float[Tensor, "*b o"], mask: Tensor | None, *, validate: bool
) -> tuple[Float[Tensor, "*b o"], Bool[Tensor, "*b o"] | None]:
    """Observations of one step with 0 in place of what is missing, and the mask of what is not (None: all)."""
    if mask is not None:
        check_mask(call, mask, y)
    steps = Series(y.unsqueeze(-2), mask=None if mask is None else mask.unsqueeze(y.ndim - 1))
    observed = observed_mask(call, steps, validate)
    if observed is None:
        filled = y
    else:
        observed = observed.squeeze(-2)
        filled = torch.where(observed, y, 0.0)
    if validate:
        check_finite(call, observation=filled)
    return filled, observed


def check_densities(call: str, failure: Int[Tensor, "*b"], R: Float[Tensor, "*r o o"]) -> None:
    """Check that S = H P H^T + R is positive definite in every mode and that functions are finite."""
    if not has_values(failure):
        return
    lost = int((failure == NOT_FINITE).sum())
    if lost:
        problem = (
            f"observe or move is not finite, or has no finite derivative, in {lost} of {failure.numel()} evaluations"
        )
        remedy = 'Use method="ukf", or a prior away from points such as the sensor, where a bearing has no derivative.'
        raise InputValueError(call, "observe", problem, remedy)
    bad = int((failure != 0).sum())
    if bad:
        problem = f"H P H^T + R must be positive definite, but {bad} of {failure.numel()} are not"
        if not bool(torch.linalg.cholesky_ex(R.detach()).info.any()):  # R is not to blame
            problem += ", although R is: the covariance P of the state has grown beyond the precision of its dtype"
            remedy = "Check F and Q for modes that grow without bound, rescale the state, or use a narrower prior."
            raise InputValueError(call, "model", problem, remedy)
        raise InputValueError(call, "R", problem, "Add a small positive diagonal to R.")


def observed_mask(call: str, series: Series, validate: bool) -> Bool[Tensor, "*b t o"] | None:
    """Mask of observed entries from NaN, mask and lengths; None if validation finds none missing."""
    y, mask, lengths = series.observations, series.mask, series.lengths
    observed = None
    if not validate or not has_values(y) or bool(torch.isnan(y).any()):
        observed = ~torch.isnan(y)
    if mask is not None:
        mask = mask if mask.ndim == y.ndim else mask.unsqueeze(-1).expand(y.shape)
        observed = mask if observed is None else observed & mask
    if lengths is not None:
        outside = (lengths < 0) | (lengths > y.shape[-2])
        if validate and has_values(lengths) and bool(outside.any()):
            problem = f"lengths must be between 0 and t={y.shape[-2]}, but {int(outside.sum())} are not"
            raise InputValueError(call, "lengths", problem, "Pass the number of steps of each target.")
        inside = torch.arange(y.shape[-2], device=y.device) < lengths.unsqueeze(-1)
        inside = inside.unsqueeze(-1).expand(y.shape)
        observed = inside if observed is None else observed & inside
    return observed


def intervals(call: str, model: Model, series: Series, *, validate: bool) -> Float[Tensor, "*#b t"] | None:
    """Time intervals between observations, the first one from time 0; None for discrete-time models."""
    times, lengths = series.times, series.lengths
    if (times is not None) != model.continuous:
        if model.continuous:
            problem = "times= is missing, and this model is continuous in time (Generator)"
            remedy = "Pass Series(observations, times=times)."
        else:
            problem = "times= needs a continuous-time model, but this model has a transition matrix"
            remedy = "Build it with Generator(rate), or drop times=."
        raise InputValueError(call, "times", problem, remedy)
    if times is None:
        return None
    # One step is from time 0; only longer series have differences.
    dt = times if times.shape[-1] == 1 else times.diff(dim=-1, prepend=torch.zeros_like(times[..., :1]))
    if lengths is not None:  # times after the end of a series are ignored
        dt = torch.where(torch.arange(dt.shape[-1], device=dt.device) < lengths.unsqueeze(-1), dt, 0.0)
    if validate:
        check_finite(call, times=dt)
        if has_values(dt) and bool((dt < 0).any()):
            problem = f"times must not decrease or start before 0, but {int((dt < 0).sum())} of {dt.numel()} steps do"
            remedy = "Sort them, or pass times - times[..., :1] if the prior is at the time of the first observation."
            raise InputValueError(call, "times", problem, remedy)
    return dt


def _check_inputs(call: str, model: Model, inputs: Tensor | None) -> None:
    """Check that inputs are given if and only if the model has them, with the right size."""
    u = model.input_size
    if (inputs is None) != (u is None):
        if isinstance(model, NonlinearModel):
            name, absent = f"input_size={u}", "no input_size"
        else:
            name, absent = "B or D", "neither B nor D"
        if inputs is None:
            problem, remedy = (
                f"inputs= is missing, and the model has {name}",
                "Pass Series(observations, inputs=inputs).",
            )
        else:
            problem, remedy = f"inputs= is given, but the model has {absent}", "Drop inputs=, or add them to the model."
        raise InputValueError(call, "inputs", problem, remedy)
    if inputs is not None and inputs.shape[-1] != u:
        condition, fact = f"inputs must end in u={u}", f"shape {shape_of(inputs)}"
        raise InputValueError(call, "inputs", f"{condition}, got {fact}", "Match the input size of the model.")


def check_targets(call: str, model: Model, batch: torch.Size) -> None:
    """Check that model fields that differ between targets have the batch shape, and that time is no target."""
    for name, t in model.fields().items():
        if t.ndim == len(ENDS[name]) + 1 and tuple(batch) == (t.shape[0],) != (1,) and model.per is None:
            problem = f"{name} of shape {shape_of(t)} may be one for each of {t.shape[0]} steps or of as many targets"
            remedy = 'Build the model with per="time" or per="target".'
            raise InputValueError(call, name, problem, remedy)
        lead = t.shape[: -len(ENDS[name]) - 1]
        if lead and (len(lead) != len(batch) or any(a not in (1, b) for a, b in zip(lead, batch, strict=True))):
            condition = f"{name} must start with the target dimensions {tuple(batch)} of the observations, or 1"
            remedy = "Drop the target dimensions of a model that all targets share."
            raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)


def _spread(call: str, name: str, t: Tensor, batch: torch.Size, k: int, ending: tuple[int, ...]) -> Tensor:
    """Expand [...], [k, ...] or [*b, k, ...] to [*b, k, ...]."""
    lead = t.shape[: t.ndim - len(ending)] if t.ndim >= len(ending) else torch.Size()
    full = (*batch, k)
    wrong = tuple(t.shape[len(lead) :]) != ending or len(lead) not in (0, 1, len(full))
    if wrong or any(a not in (1, b) for a, b in zip(lead[::-1], full[::-1], strict=False)):
        *forms, last = dict.fromkeys(f"[{', '.join(map(str, (*front, *ending)))}]" for front in ((), (k,), full))
        condition = f"{name} must be {', '.join(forms)} or {last}"
        remedy = "Put targets first, then modes; use size 1 for values shared by all modes."
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
    return t.expand(*full, *ending)
