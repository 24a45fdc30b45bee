"""Checks of the arguments of `fit`, its starts, and the order of fitted modes.

Read next: learning.py, parametrization.py (the plan), training_data.py.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..._errors import InputTypeError, InputValueError, check_positive_semidefinite, shape_of
from ..._typing import Tensor
from ..gaussian.clutter import Clutter, check_clutter
from ..models.switching_model import ENDS, Generator, SwitchingModel, as_arguments
from ..prior_and_series import Prior, Series
from ..validation import initial_state, prepared
from .parametrization import MATRICES, NAMES, PLAIN, FitPlan, Structure, prior_fields, with_zero_rows
from .training_data import OF_ALL_SERIES, flattened, observed_entries


def check_smoother(call: str, smoother: str, method: str) -> None:
    """Check that the method has this smoother."""
    known = ("gpb2", "imm", "kim", *(("enumerate",) if method == "em" else ()))
    if smoother not in known:
        problem = f"smoother must be one of {', '.join(known)} with method={method!r}, got {smoother!r}"
        raise InputValueError(call, "smoother", problem, 'Use method="em" for "enumerate".')


def plan_of(
    call: str,
    model: SwitchingModel,
    learn: Sequence[str],
    structure: Mapping[str, Structure],
    shared: Sequence[str],
    method: str,
) -> FitPlan:
    """Check which parameters are learned, and how, against the model."""
    unknown = [name for name in learn if name not in NAMES]
    if unknown or not learn:
        condition = "learn must list names of parameters"
        raise InputValueError(call, "learn", f"{condition}, got {list(learn)}", f"Choose from {', '.join(NAMES)}.")
    if method not in ("em", "gradient"):
        raise InputValueError(
            call, "method", f'method must be "em" or "gradient", got {method!r}', 'Use "gradient" where EM is slow.'
        )
    has = {"transition": not model.continuous, "rate": model.continuous}
    missing = [name for name in learn if name in PLAIN and getattr(model, name) is None]
    missing += [name for name in learn if not has.get(name, True)]
    if missing:
        other = "rate" if model.continuous else "transition"
        remedy = f'Learn "{other}".' if missing[0] in has else f"Build the model with {missing[0]} of zeros."
        raise InputValueError(call, "model", f"the model has no {missing[0]} to learn", remedy)
    wrong = [n for n in structure if n not in MATRICES or structure[n] not in ("full", "diagonal", "scale")]
    if wrong:
        condition = 'structure must map Q or R to "full", "diagonal" or "scale"'
        raise InputValueError(
            call, "structure", f"{condition}, got {dict(structure)}", "Drop other parameters; they have no structure."
        )
    partner = {"F": "Q", "b": "Q", "H": "R", "d": "R"}
    alone = [n for n in shared if n not in learn or n not in (*MATRICES, *PLAIN)]
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
    if changes and set(plan.learn) - fixed - {"initial", "initial_mean", "rate", "clutter"}:
        condition = (
            'for a time-varying or continuous-time model learn may list only Q and R as "scale", "rate", "initial", '
            '"initial_mean" and "clutter"'
        )
        remedy = 'Pass learn=["Q", "R"] and structure={"Q": "scale", "R": "scale"}.'
        raise InputValueError(call, "learn", f"{condition}, got learn={list(plan.learn)}", remedy)
    if model.B is not None or model.D is not None or model.components is not None:
        remedy = "Absorb inputs into b and d, and use modes of one state size."
        raise InputValueError(call, "model", "fit does not support models with B, D or components", remedy)
    return plan


def prior_of_modes(call: str, model: SwitchingModel, prior: Prior, batch: torch.Size, plan: FitPlan) -> Prior:
    """Expand the prior to one Gaussian and one probability for each mode, of all series or of each, [b, k, ...]."""
    state = initial_state(call, model, prior, batch)
    fields = {}
    for (name, shared), t in zip(OF_ALL_SERIES.items(), tuple(state)[:3], strict=True):
        each, original = t.reshape(-1, *t.shape[len(batch) :]), getattr(prior, name)
        lead = () if original is None else original.shape[: max(original.ndim - shared, 0)]
        fields[name] = each if any(n > 1 for n in lead) else each[0]
    varies = [name for name, t in fields.items() if t.ndim > OF_ALL_SERIES[name]]
    if "initial" in plan.learn and varies:
        problem = f"prior.{varies[0]} differs between series, but one series does not determine its initial covariance"
        remedy = 'Learn "initial_mean", or pass one prior for all series.'
        raise InputValueError(call, f"prior.{varies[0]}", problem, remedy)
    return Prior(**fields, per="mode")


def training_data(call: str, model: SwitchingModel, series: Series) -> Series:
    """Check the series and flatten them to [b, t, o]."""
    prepared(call, model, series, validate=model.validate)
    series = flattened(series)
    if not bool(observed_entries(series).any()):
        remedy = "Pass series with observations."
        raise InputValueError(call, "observations", "all observations are missing", remedy)
    return series


def outliers_of(call: str, model: SwitchingModel, clutter: Clutter | None, plan: FitPlan) -> Clutter | None:
    """Check the outliers, with numbers and arrays as tensors."""
    if clutter is None:
        if "clutter" in plan.learn:
            problem = 'learn lists "clutter", but there is no clutter='
            raise InputValueError(call, "clutter", problem, "Pass clutter=Clutter(0.01, covariance of outliers).")
        return None
    if not isinstance(clutter, Clutter):
        problem = f"clutter must be a Clutter, got {type(clutter).__name__}"
        raise InputTypeError(call, "clutter", problem, "Pass Clutter(0.01, covariance of outliers).")
    clutter = Clutter(*(t if t is None else torch.as_tensor(t).to(model.R) for t in clutter))  # type: ignore[arg-type]
    check_clutter(call, model, clutter)
    if clutter.covariance.ndim > 2 or (clutter.mean is not None and clutter.mean.ndim > 1):
        problem = f"covariance and mean of outliers must be those of all steps, got {shape_of(clutter.covariance)}"
        raise InputValueError(call, "covariance", problem, "Pass one covariance [o, o] and one mean [o].")
    check_positive_semidefinite(call, "covariance", clutter.covariance)
    if "clutter" in plan.learn and not 0 < float(clutter.probability) < 1:
        problem = f"probability must be above 0 and below 1 to be learned, got {float(clutter.probability)}"
        raise InputValueError(call, "probability", problem, "Start with such as 0.01.")
    return clutter


def modes_are_exchangeable(model: SwitchingModel, plan: FitPlan) -> bool:
    """Return True if only learned parameters distinguish the modes, so that their order is arbitrary.

    Raises if initially identical modes would stay identical.
    """

    def differs(name: str) -> bool:
        field = getattr(model, name)
        if field is None:
            return False
        at = field.ndim - (2 if name in ("b", "d") else 3)
        return bool((field != field.narrow(at, 0, 1)).any())

    different = [name for name in ("F", "Q", "H", "R", "b", "d") if differs(name)]
    per_mode = [name for name in plan.learn if name in (*MATRICES, *PLAIN) and name not in plan.shared]
    if model.modes > 1 and not different and per_mode:
        remedy = f"Start with different values of {per_mode[0]}."
        raise InputValueError("fit", "modes", "the modes of the initial model are identical and would stay so", remedy)
    return model.modes > 1 and bool(different) and all(name in per_mode for name in different)


def restricted(model: SwitchingModel, plan: FitPlan) -> SwitchingModel:
    """Project the initial model onto the constraints: average shared parameters, drop off-diagonal noise."""
    fields: dict[str, Any] = {}
    for name in plan.learn:
        if name not in (*MATRICES, *PLAIN):
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


def perturbed(model: SwitchingModel, plan: FitPlan, generator: torch.Generator | None) -> SwitchingModel:
    """Random perturbation for another start: scaled covariances, shifted maps and offsets, mixed transitions."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=model.R.dtype, device=model.R.device, generator=generator)

    fields: dict[str, Any] = {}
    for name in plan.learn:
        field: Any = getattr(model, name, None)
        if name == "transition":
            noise = normal(*field.shape).exp() * (field > 0)
            fields[name] = 0.5 * field + 0.5 * noise / noise.sum(-1, keepdim=True)
        elif name == "rate":
            assert isinstance(model.transition, Generator)  # checked by plan_of
            rates = model.transition.rate
            fields["transition"] = Generator(with_zero_rows(rates * normal(*rates.shape).exp()))
        elif name in MATRICES:
            factor = (0.7 * normal(1 if name in plan.shared else model.modes)).exp()
            fields[name] = factor[:, None, None] * field
        elif name in PLAIN:
            size = 0.3 * (field.abs().mean() + 0.1)
            fields[name] = field + size * normal(*(field[:1] if name in plan.shared else field).shape)
    return dataclasses.replace(model, **fields, validate=False)


def in_order(
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
    ends = {"mean": -2, "covariance": -3, "log_mode_probability": -1}
    initial = {name: t.index_select(ends[name], places) for name, t in prior_fields(prior).items()}
    return dataclasses.replace(fitted, **as_arguments(fields)), Prior(**initial, per="mode")
