"""Unconstrained parametrisation of models, for gradient ascent.

    transition    softmax of logits, rows sum to one; probabilities 0 stay 0
    Q, R          full: L L^T with exp on the diagonal of L;  diagonal: exp;  scale: exp(l) times the initial matrix
    F, H, b, d    unchanged
    rate          logarithms of the rates of switches; rates 0 stay 0, and rows sum to zero
    initial       mean unchanged, covariance as L L^T, mode probabilities as a softmax
    initial_mean  unchanged, of all series or of each
    clutter       logit of the probability of outliers

Parameters shared by modes are stored once. Leading dimensions (targets) are preserved.

Read next: learning.py.
"""

from typing import Any, Literal, NamedTuple

import torch

from ..._errors import InputValueError
from ..._pytree import replaced
from ..._typing import Tensor
from ..models.switching_model import ENDS, Generator
from ..prior_and_series import Prior
from .training_data import System

Structure = Literal["full", "diagonal", "scale"]
MATRICES = ("Q", "R")
PLAIN = ("F", "H", "b", "d")
NAMES = ("transition", "rate", *MATRICES, *PLAIN, "initial", "initial_mean", "clutter")


class FitPlan(NamedTuple):
    """Names of the learned parameters, their structure, and which of them modes share; also the initial mean."""

    learn: tuple[str, ...]
    structure: dict[str, Structure]
    shared: tuple[str, ...]
    one_mean: bool = False


Free = dict[str, Tensor]


def prior_fields(prior: Prior) -> dict[str, Tensor]:
    """Tensors of a prior with mode probabilities, by name."""
    assert prior.log_mode_probability is not None  # set by fit
    names = ("mean", "covariance", "log_mode_probability")
    return {name: getattr(prior, name) for name in names}


def unconstrained(call: str, system: System, plan: FitPlan) -> Free:
    """Unconstrained parameters of a system."""
    model, prior, clutter = system
    free: Free = {}
    for name in plan.learn:
        if name == "transition":
            assert isinstance(model.transition, Tensor)  # checked by fit
            T = model.transition
            free[name] = _logarithm(T)
        elif name == "rate":
            assert isinstance(model.transition, Generator)  # checked by fit
            free[name] = _logarithm(model.transition.rate)  # those on the diagonal are negative
        elif name == "clutter":
            assert clutter is not None  # checked by fit
            free[name] = clutter.probability.logit()
        elif name == "initial_mean":
            free[name] = prior.mean.narrow(-2, 0, 1) if plan.one_mean else prior.mean
        elif name in MATRICES:
            free[name] = _root(call, name, _once(plan, name, getattr(model, name)), plan.structure[name])
        elif name in PLAIN:
            free[name] = _once(plan, name, getattr(model, name))
        else:
            free["mean"] = prior.mean
            free["covariance"] = _root(call, "covariance", prior.covariance, "full")
            assert prior.log_mode_probability is not None  # set by fit
            free["log_mode_probability"] = prior.log_mode_probability
    return {name: t.detach().clone() for name, t in free.items()}


def constrained(system: System, plan: FitPlan, free: Free) -> System:
    """System of unconstrained parameters; leading target dimensions give one model for each target."""
    model, prior, clutter = system
    fields: dict[str, Any] = {}
    for name in plan.learn:
        if name == "transition":
            fields[name] = _timed(free[name].softmax(-1), name)
        elif name == "rate":
            fields["transition"] = replaced(model.transition, rate=_timed(with_zero_rows(free[name].exp()), name))
        elif name == "clutter":
            assert clutter is not None  # checked by fit
            clutter = clutter._replace(probability=free[name].sigmoid())
        elif name in MATRICES:
            made = _squared(free[name], getattr(model, name), plan.structure[name])
            fields[name] = _timed(_many(plan, name, made, model.modes), name)
        elif name in PLAIN:
            fields[name] = _timed(_many(plan, name, free[name], model.modes), name)
    if "initial" in plan.learn:
        prior = Prior(
            free["mean"],
            _squared(free["covariance"], prior.covariance, "full"),
            free["log_mode_probability"].log_softmax(-1),
            per="mode",
        )
    if "initial_mean" in plan.learn:
        mean = free["initial_mean"]
        prior = replaced(prior, mean=mean.expand(*mean.shape[:-2], model.modes, -1))
    model = replaced(model, **fields, validate=False)  # the checks of a new model cost as much as a filter
    return System(model, prior, clutter)


def with_zero_rows(rates: Tensor) -> Tensor:
    """Rates of switches with the diagonal for which rows sum to zero."""
    off = rates - torch.diag_embed(rates.diagonal(dim1=-2, dim2=-1))
    return off - torch.diag_embed(off.sum(-1))


def _logarithm(t: Tensor) -> Tensor:
    """Logarithm where t > 0, -inf elsewhere."""
    return torch.where(t > 0, t, 1.0).log().masked_fill(t <= 0, -torch.inf)


def _once(plan: FitPlan, name: str, field: Tensor) -> Tensor:
    """Keep one copy of a parameter that modes share."""
    at = -len(ENDS[name])
    return field.narrow(at, 0, 1) if name in plan.shared else field


def _many(plan: FitPlan, name: str, field: Tensor, modes: int) -> Tensor:
    at = field.ndim - len(ENDS[name])
    return field.expand(*field.shape[:at], modes, *field.shape[at + 1 :]) if name in plan.shared else field


def _timed(field: Tensor, name: str) -> Tensor:
    """Insert a time dimension after the targets, if there are any."""
    ending = len(ENDS[name])
    return field.unsqueeze(-ending - 1) if field.ndim == ending + 1 else field


def _root(call: str, name: str, matrix: Tensor, structure: Structure) -> Tensor:
    if structure == "scale":
        return matrix.new_zeros(matrix.shape[-3], 1, 1)
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    if structure == "diagonal":
        _check_regular(call, name, bool((diagonal <= 0).any()))
        return diagonal.log()
    L, info = torch.linalg.cholesky_ex(matrix)
    _check_regular(call, name, int(info.max()) > 0)
    return L.tril(-1) + torch.diag_embed(L.diagonal(dim1=-2, dim2=-1).log())


def _squared(free: Tensor, current: Tensor, structure: Structure) -> Tensor:
    if structure == "scale":
        # [*b, k, 1, 1] against fields [k, ...] or [*b, t, k, ...]: insert a time dimension into the factors.
        factor = free.exp()
        return factor * current if current.ndim == 3 or free.ndim == 3 else factor.unsqueeze(-4) * current
    if structure == "diagonal":
        return torch.diag_embed(free.exp())
    L = free.tril(-1) + torch.diag_embed(free.diagonal(dim1=-2, dim2=-1).exp())
    return L @ L.mT


def _check_regular(call: str, name: str, singular: bool) -> None:
    if singular:
        problem = f"{name} must be positive definite to be learned, but the initial one is singular"
        factor = f'Learn only a factor of it: structure={{"{name}": "scale"}}.'
        remedy = factor if name in MATRICES else 'Start with a positive definite one, or use method="em".'
        raise InputValueError(call, name, problem, remedy)
