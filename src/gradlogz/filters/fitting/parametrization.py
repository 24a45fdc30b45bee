"""Unconstrained parametrisation of models, for gradient ascent.

    transition    softmax of logits, rows sum to one; probabilities 0 stay 0
    Q, R          full: L L^T with exp on the diagonal of L;  diagonal: exp;  scale: exp(l) times the initial matrix
    F, H, b, d    unchanged
    initial       mean unchanged, covariance as L L^T, mode probabilities as a softmax

Parameters shared by modes are stored once. Leading dimensions (targets) are preserved.

Read next: learning.py.
"""

from typing import Any, Literal, NamedTuple

import torch

from ..._errors import InputValueError
from ..._pytree import replaced
from ..._typing import Tensor
from ..models.switching_model import ENDS, SwitchingModel
from ..prior_and_series import Prior

Structure = Literal["full", "diagonal", "scale"]
MATRICES = ("Q", "R")
PLAIN = ("F", "H", "b", "d")
NAMES = ("transition", *MATRICES, *PLAIN, "initial")


class FitPlan(NamedTuple):
    """Names of the learned parameters, their structure, and which of them modes share."""

    learn: tuple[str, ...]
    structure: dict[str, Structure]
    shared: tuple[str, ...]


Free = dict[str, Tensor]


def prior_fields(prior: Prior) -> dict[str, Tensor]:
    """Tensors of a prior with mode probabilities, by name."""
    assert prior.log_mode_probability is not None  # set by fit
    names = ("mean", "covariance", "log_mode_probability")
    return {name: getattr(prior, name) for name in names}


def unconstrained(call: str, model: SwitchingModel, prior: Prior, plan: FitPlan) -> Free:
    """Unconstrained parameters of a model."""
    free: Free = {}
    for name in plan.learn:
        if name == "transition":
            assert isinstance(model.transition, Tensor)  # checked by fit
            T = model.transition
            free[name] = torch.where(T > 0, T, 1.0).log().masked_fill(T <= 0, -torch.inf)
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


def constrained(model: SwitchingModel, prior: Prior, plan: FitPlan, free: Free) -> tuple[SwitchingModel, Prior]:
    """Model of unconstrained parameters; leading target dimensions give one model for each target."""
    fields: dict[str, Any] = {}
    for name in plan.learn:
        if name == "transition":
            fields[name] = _timed(free[name].softmax(-1), name)
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
    return replaced(model, **fields, validate=False), prior  # the checks of a new model cost as much as a filter


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
