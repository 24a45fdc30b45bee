"""Outliers: observations that have nothing to do with the state, as further modes of a switching model.

    c_t             1 with probability p at every step, independent of everything else: y_t is an outlier
    y_t | c_t = 0   ~ N(H_j x_t + d_j, R_j)                                        as without outliers
    y_t | c_t = 1   ~ N(mean, covariance)                                          whatever the state

    modes           (j, c), first all j with c = 0, then all j with c = 1
    transition      P((j, c) | (i, .)) = transition_ij p^c (1 - p)^(1 - c)
    H_(j,1) = 0, d_(j,1) = mean, R_(j,1) = covariance

An outlier does not move the state, since H = 0. With one mode, imm is the filter of probabilistic data association for
one detection that may be false [barshalom01]. The model is an ordinary SwitchingModel, for all filters and smoothers.

Read next: ../models/switching_model.py, ../../tracking/outliers.py (rejection of detections).
"""

import dataclasses
from typing import Any, NamedTuple

import torch

from ..._errors import InputValueError, check_positive_semidefinite, shape_of
from ..._pytree import replaced
from ..._typing import Float, Tensor
from ..models.switching_model import Generator, SwitchingModel
from ..moment_matching import symmetrized
from ..prior_and_series import Prior


class Clutter(NamedTuple):
    """Outliers: each observation is one with this probability, and is then drawn from N(mean, covariance)."""

    probability: Float[Tensor, "*b"]
    covariance: Float[Tensor, "*#t o o"]
    mean: Float[Tensor, "*#t o"] | None = None


def with_clutter(
    model: SwitchingModel,
    probability: float | Float[Tensor, ""],
    covariance: Float[Tensor, "*#t o o"],
    *,
    mean: Float[Tensor, "*#t o"] | None = None,
) -> SwitchingModel:
    """Return the model with 2 k modes in which every observation is an outlier with this probability.

    Args:
        model: a discrete-time model with k modes; `model.at(dt)` discretises one of continuous time.
        probability: probability of an outlier at each step, from 0 to 1.
        covariance: covariance of outliers, for all modes; wide compared with R. It may vary with time and target.
        mean: mean of outliers; 0 by default.

    Law: tests/laws/test_outliers_are_modes_of_a_switching_model.py.

    >>> import torch
    >>> from gradlogz.filters import constant_velocity
    >>> line = constant_velocity(1, dt=1.0, spectral_density=0.1, observation_variance=1.0)
    >>> model = SwitchingModel.of([line], transition=torch.ones(1, 1))
    >>> with_clutter(model, 0.01, 1e4 * torch.eye(1)).transition
    tensor([[0.9900, 0.0100],
            [0.9900, 0.0100]])
    """
    if isinstance(model.transition, Generator):
        problem = "the model must be discrete in time, but it has a Generator"
        raise InputValueError("with_clutter", "model", problem, "Discretise it first: model.at(dt).")
    p = torch.as_tensor(probability, dtype=model.R.dtype, device=model.R.device)
    clutter = Clutter(p, covariance, mean)
    check_clutter("with_clutter", model, clutter)
    if model.validate:
        covariance = symmetrized(covariance)
        check_positive_semidefinite("with_clutter", "covariance", covariance)
    return cluttered(model, clutter._replace(covariance=covariance))


def check_clutter(call: str, model: SwitchingModel, clutter: Clutter) -> None:
    """Check the probability of outliers, and sizes against the model."""
    (p, covariance, mean), o = clutter, model.observation_size
    if p.ndim or not bool((p >= 0) & (p <= 1)):
        problem = f"probability must be one number from 0 to 1, got {p.tolist()}"
        raise InputValueError(call, "probability", problem, "Pass such as 0.01.")
    if covariance.ndim < 2 or covariance.shape[-2:] != (o, o):
        problem = f"covariance must end in [{o}, {o}], the size of an observation, got shape {shape_of(covariance)}"
        raise InputValueError(call, "covariance", problem, "Pass such as deviation**2 * torch.eye(o).")
    if mean is not None and mean.shape[-1:] != (o,):
        problem = f"mean must end in [{o}], the size of an observation, got shape {shape_of(mean)}"
        raise InputValueError(call, "mean", problem, "Pass one number for each component, or None for 0.")


def cluttered(model: SwitchingModel, clutter: Clutter) -> SwitchingModel:
    """`with_clutter` without checks; the probability may differ between targets, [*b]."""
    (p, covariance, mean), T, o = clutter, model.transition, model.observation_size
    assert isinstance(T, Tensor)  # discrete in time
    p = p[..., None, None, None] if p.ndim else p  # time and modes follow targets
    fields: dict[str, Any] = {
        name: _twice(getattr(model, name), n) for name, n in (("F", 3), ("Q", 3), ("b", 2), ("B", 3))
    }
    fields["H"] = _beside(model.H, torch.zeros_like(model.H), 3)
    fields["R"] = _beside(model.R, covariance.unsqueeze(-3).to(model.R), 3)
    if mean is not None or model.d is not None:
        blank = model.R.new_zeros(model.modes, o)
        centre = blank if mean is None else mean.unsqueeze(-2).to(model.R)
        fields["d"] = _beside(blank if model.d is None else model.d, centre, 2)
    if model.D is not None:
        fields["D"] = _beside(model.D, torch.zeros_like(model.D), 3)
    both = torch.cat((T * (1 - p), T * p), -1)
    components = None if model.components is None else 2 * model.components
    fields |= {"transition": torch.cat((both, both), -2), "components": components}
    return dataclasses.replace(model, **fields) if model.validate else replaced(model, **fields)


def prior_with_clutter(prior: Prior) -> Prior:
    """Return the prior of a model with outliers, from that of its k modes.

    A mean or covariance that is shared by all modes, without a dimension of modes or with one of size 1, remains so.
    """
    log_p = prior.log_mode_probability
    if log_p is not None:
        log_p = torch.cat((log_p, torch.full_like(log_p, -torch.inf)), -1)
    mean, covariance = prior.mean, prior.covariance
    if mean.ndim > 1 and mean.shape[-2] > 1:  # size 1 is shared by all modes
        mean = torch.cat((mean, mean), -2)
    if covariance.ndim > 2 and covariance.shape[-3] > 1:
        covariance = torch.cat((covariance, covariance), -3)
    return dataclasses.replace(prior, mean=mean, covariance=covariance, log_mode_probability=log_p)


def without_clutter(log_mode_probability: Float[Tensor, "*b k2"]) -> tuple[Tensor, Tensor]:
    """Return the log probabilities of the k modes, [*b, k], and the probability of an outlier, [*b].

    log_mode_probability: that of a filter or smoother of a model with outliers.
    """
    inlier, outlier = log_mode_probability.unflatten(-1, (2, -1)).unbind(-2)
    return torch.logaddexp(inlier, outlier), outlier.logsumexp(-1).exp()


def _twice(field: Tensor | None, ending: int) -> Tensor | None:
    return None if field is None else torch.cat((field, field), -ending)


def _beside(field: Tensor, other: Tensor, ending: int) -> Tensor:
    """Modes of a field, then those of another one, whose leading dimensions and modes broadcast."""
    lead = torch.broadcast_shapes(field.shape[:-ending], other.shape[:-ending])
    k = field.shape[-ending]
    return torch.cat(
        (
            field.expand(*lead, *field.shape[-ending:]),
            other.expand(*lead, k, *other.shape[1 - ending :]),
        ),
        -ending,
    )


torch.serialization.add_safe_globals([Clutter])  # for torch.load with weights_only=True
