"""Validation of a prior and a series against a model, once; both are brought to one shape.

    observations [*b, t, o], NaN or masked where there are none      initial mean and covariance [*b, k, ...]

Targets b broadcast against size 1 only. Values are looked at once for a whole series, never step by step.
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
from .prior_and_series import Prior, Series, check_prior
from .results import FilterState

Model = SwitchingModel | NonlinearModel
LOGARITHMS = "Pass .log() of probabilities, or .log_softmax(-1) of any numbers."


class PreparedSeries(NamedTuple):
    """Parameters without inputs, observations without NaN, and where there is something to see (None: everywhere)."""

    parameters: Any  # Parameters, or NonlinearParameters of such a model
    observations: Float[Tensor, "*b t o"]
    seen: Bool[Tensor, "*b t o"] | None


def prepared(call: str, model: Model, series: Series, *, validate: bool = True) -> PreparedSeries:
    """A series that has been checked against its model, as the steps of a filter take it."""
    return next(prepared_parts(call, model, series, validate=validate))


def prepared_parts(
    call: str, model: Model, series: Series, *, validate: bool = True, longest: int | None = None
) -> Iterator[PreparedSeries]:
    """`prepared` as one part; of models of continuous time as parts of at most `longest` steps, discretised in turn."""
    y, inputs, o = series.observations, series.inputs, model.observation_size
    check_floats(call, observations=y, model=model.R)
    if y.shape[-1] != o:
        condition, remedy = f"observations must be [*b, t, o={o}]", "o is the size of an observation of the model."
        raise InputValueError(call, "observations", f"{condition}, got shape {shape_of(y)}", remedy)
    batch, steps = y.shape[:-2], y.shape[-2]
    known = model.steps
    if known not in (None, 1, steps):
        condition = f"observations must have t={known}, the steps of the model"
        remedy = "Cut the model or the series; a model that does not change has no time dimension."
        raise InputValueError(call, "observations", f"{condition}, got shape {shape_of(y)}", remedy)
    if known is not None:  # targets come before time
        _check_targets(call, model, batch)
    seen = seen_of(call, series, validate)
    if seen is not None:
        y = torch.where(seen, y, 0.0)
    if validate:
        check_finite(call, observations=y, **present(inputs=inputs))
    _check_inputs(call, model, inputs)
    dt = _lasting(call, model, series, validate)
    if dt is None:
        return iter((PreparedSeries(model.parameters(inputs), y, seen),))
    size = longest if longest is not None and known is None else steps
    rest = (itertools.repeat(None) if t is None else t.split(size, -2) for t in (inputs, y, seen))
    parts = zip(dt.split(size, -1), *rest, strict=False)
    return (PreparedSeries(model.at(dt).parameters(inputs), y, seen) for dt, inputs, y, seen in parts)


def initial_state(call: str, model: Model, prior: Prior, batch: torch.Size) -> FilterState:
    """The prior at time 0, for every target and every mode."""
    check_model(call, model)
    check_prior(call, prior)
    k, s = model.modes, model.state_size
    mean, covariance, log_pi = prior.mean, prior.covariance, prior.log_mode_probability
    check_floats(call, **{"prior.mean": mean, "model": model.R})
    if model.validate:
        check_finite(call, **{"prior.mean": mean, "prior.covariance": covariance})
    m = _spread(call, "prior.mean", mean, batch, k, (s,))
    P = _spread(call, "prior.covariance", covariance, batch, k, (s, s))
    if model.validate:
        check_positive_semidefinite(call, "prior.covariance", covariance)
    if (has := model.has) is not None:
        m, P = m * has, P * (has.unsqueeze(-1) & has.unsqueeze(-2))
    if log_pi is None:
        log_pi = m.new_full((*batch, k), -math.log(k))
    else:
        name, given = "prior.log_mode_probability", log_pi
        log_pi = _spread(call, name, given, batch, k, ())
        if given.shape[-1] != k:
            condition, fact = f"{name} must end in k={k}, the modes", f"shape {shape_of(given)}"
            raise InputValueError(call, name, f"{condition}, got {fact}", "Pass one for each mode; None is uniform.")
        if model.validate:
            check_logarithms(call, name, given)
            check_normalized(call, f"exp({name})", given.logsumexp(-1), LOGARITHMS)
    return FilterState(m, P, log_pi, m.new_zeros(batch))


def check_model(call: str, model: object) -> None:
    """What filters take."""
    if not isinstance(model, SwitchingModel | NonlinearModel):
        condition = "model must be a SwitchingModel or a NonlinearModel"
        remedy = "SwitchingModel.of([one], transition=torch.ones(1, 1)) makes one of a KalmanModel."
        raise InputTypeError(call, "model", f"{condition}, got {type(model).__name__}", remedy)


def check_state(call: str, model: Model, state: FilterState, *, depth: int) -> None:
    """A state is one that this filter has made: of its dtype, its components, its modes and its histories.

    Args:
        depth: of "gpb", 0 for "imm".
    """
    check_floats(call, **{"state.mean": state.mean, "model": model.R})
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
        condition = f"state must be one of this filter, with {wanted} of s={s} components"
        fact = f"shapes {shape_of(state.mean)} and {shape_of(state.log_probability)}"
        raise InputValueError(call, "state", f"{condition}, got {fact}", "Begin with init of the same filter.")


def check_densities(call: str, failure: Int[Tensor, "*b"]) -> None:
    """What is observed has a density in every mode: S = H P H^T + R is positive definite, and functions have values."""
    if not has_values(failure):
        return
    lost = int((failure == NOT_FINITE).sum())
    if lost:
        condition = "observe and move must be finite, with finite derivatives, where the filter goes"
        fact = f"{lost} of {failure.numel()} that are not"
        remedy = 'A bearing has no tangent at the sensor itself: begin elsewhere, or take method="ukf".'
        raise InputValueError(call, "observe", f"{condition}, got {fact}", remedy)
    bad = int((failure != 0).sum())
    if bad:
        condition = "H P H^T + R must be positive definite, so that what is observed has a density"
        fact = f"{bad} of {failure.numel()} that are not"
        raise InputValueError(call, "R", f"{condition}, got {fact}", "Give R a small positive diagonal.")


def seen_of(call: str, series: Series, validate: bool) -> Bool[Tensor, "*b t o"] | None:
    """Where there is something to see; None if everywhere, as far as can be known without validation."""
    y, mask, lengths = series.observations, series.mask, series.lengths
    seen = None
    if not validate or not has_values(y) or bool(torch.isnan(y).any()):
        seen = ~torch.isnan(y)
    if mask is not None:
        mask = mask if mask.ndim == y.ndim else mask.unsqueeze(-1).expand(y.shape)
        seen = mask if seen is None else seen & mask
    if lengths is not None:
        outside = (lengths < 0) | (lengths > y.shape[-2])
        if validate and has_values(lengths) and bool(outside.any()):
            condition, fact = f"lengths must be in 0 ... t={y.shape[-2]}", f"{int(outside.sum())} that are not"
            raise InputValueError(
                call, "lengths", f"{condition}, got {fact}", "Pass how many steps of each target were observed."
            )
        inside = torch.arange(y.shape[-2], device=y.device) < lengths.unsqueeze(-1)
        inside = inside.unsqueeze(-1).expand(y.shape)
        seen = inside if seen is None else seen & inside
    return seen


def _lasting(call: str, model: Model, series: Series, validate: bool) -> Tensor | None:
    """How long it takes from one observation to the next, the first from time 0; None for models of steps."""
    times, lengths = series.times, series.lengths
    if (times is not None) != model.continuous:
        if model.continuous:
            condition, fact = "times must be given, as the model is one of continuous time", "none"
            remedy = "Pass Series(observations, times=times)."
        else:
            condition, fact = "times must come with a model of continuous time", "one with a transition matrix"
            remedy = "Build the model with Generator(rate) in its place, or drop times=."
        raise InputValueError(call, "times", f"{condition}, got {fact}", remedy)
    if times is None:
        return None
    dt = times.diff(dim=-1, prepend=torch.zeros_like(times[..., :1]))
    if lengths is not None:  # times of what does not count need not be any
        dt = torch.where(torch.arange(dt.shape[-1], device=dt.device) < lengths.unsqueeze(-1), dt, 0.0)
    if validate:
        check_finite(call, times=dt)
        if has_values(dt) and bool((dt < 0).any()):
            fact = f"{int((dt < 0).sum())} of {dt.numel()} that are before the one before, or before 0"
            remedy = "Sort them, or pass times - times[..., :1] if the prior is at the first observation's time."
            raise InputValueError(call, "times", f"times must not go backwards, got {fact}", remedy)
    return dt


def _check_inputs(call: str, model: Model, inputs: Tensor | None) -> None:
    """A model that has inputs is given them, and of their size."""
    u = model.input_size
    if (inputs is None) != (u is None):
        if isinstance(model, NonlinearModel):
            name, fact = "input_size", f"no inputs and {u}" if inputs is None else "inputs and none"
        else:
            name, fact = "B or D", "no inputs but B or D" if inputs is None else "inputs but neither B nor D"
        condition = f"inputs must be given if and only if the model has {name}"
        raise InputValueError(
            call, "inputs", f"{condition}, got {fact}", "Inputs u enter as B u and D u, or as functions say."
        )
    if inputs is not None and inputs.shape[-1] != u:
        condition, fact = f"inputs must end in u={u}", f"shape {shape_of(inputs)}"
        raise InputValueError(call, "inputs", f"{condition}, got {fact}", "u is the number of columns of B and D.")


def _check_targets(call: str, model: Model, batch: torch.Size) -> None:
    """Fields of a model that differ from target to target have the targets of the observations."""
    for name, t in model.fields().items():
        own = t.shape[: -len(ENDS[name]) - 1]
        if own and (len(own) != len(batch) or any(a not in (1, b) for a, b in zip(own, batch, strict=True))):
            condition = f"{name} must begin with the targets {tuple(batch)} of the observations, or 1 in their place"
            remedy = "Leave targets out of a model that they share."
            raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)


def _spread(call: str, name: str, t: Tensor, batch: torch.Size, k: int, ending: tuple[int, ...]) -> Tensor:
    """[...], [k, ...] or [*b, k, ...] as [*b, k, ...]."""
    lead = t.shape[: t.ndim - len(ending)] if t.ndim >= len(ending) else torch.Size()
    full = (*batch, k)
    wrong = tuple(t.shape[len(lead) :]) != ending or len(lead) not in (0, 1, len(full))
    if wrong or any(a not in (1, b) for a, b in zip(lead[::-1], full[::-1], strict=False)):
        *forms, last = dict.fromkeys(f"[{', '.join(map(str, (*front, *ending)))}]" for front in ((), (k,), full))
        condition = f"{name} must be {', '.join(forms)} or {last}"
        remedy = "What differs between targets begins with them and then with the modes, or 1 for all modes."
        raise InputValueError(call, name, f"{condition}, got shape {shape_of(t)}", remedy)
    return t.expand(*full, *ending)
