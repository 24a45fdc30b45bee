"""The prior at time 0 and the series of observations that filters take.

    Prior     initial mean and covariance of the state, and initial mode probabilities
    Series    observations, and optionally inputs, mask, lengths, times

Time 0 is before the first transition. A series without options may be passed as a tensor. The constructors check types
and shapes; the filters check values and agreement with the model (validation.py).

Read next: validation.py, gaussian/switching.py.
"""

import dataclasses
from typing import Literal

import torch

from .._errors import InputTypeError, InputValueError, check_floats, present, shape_of
from .._pytree import record, static_field
from .._typing import Bool, Float, Int, Tensor
from .records import TensorRecord
from .scalars import from_array, from_arrays


@record
class Prior(TensorRecord):
    """Gaussian prior of the state and mode probabilities at time 0, before the first transition.

    Fields may be tensors or numpy arrays, which are copied; numbers for a state of one component.

    Attributes:
        mean: initial mean, [s] for all modes, [k, s] for each mode, or [*b, k, s] for each target and mode; size 1 in
            place of k is for all modes.
        covariance: initial covariance, [s, s], [k, s, s] or [*b, k, s, s].
        log_mode_probability: initial log probabilities of the modes, [k] or [*b, k]; None is uniform.
        per: meaning of leading dimensions, "mode" or "target". With "target", mean is [*b, s] and covariance [s, s] or
            [*b, s, s], alike for all modes. Needed if there are as many targets as modes, where [k, s] could be either.

    >>> import torch
    >>> Prior(torch.zeros(2), torch.eye(2)).log_mode_probability is None
    True
    """

    mean: Float[Tensor, "*#m s"]
    covariance: Float[Tensor, "*#m s s"]
    log_mode_probability: Float[Tensor, "*#n k"] | None = None
    per: Literal["mode", "target"] | None = static_field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        values = {name: getattr(self, name) for name in ("mean", "covariance", "log_mode_probability")}
        for name, t in from_arrays(values, {"mean": 1, "covariance": 2}).items():
            object.__setattr__(self, name, t)
        m, P = self.mean, self.covariance  # Shorthand
        check_floats("Prior", mean=m, covariance=P, **present(log_mode_probability=self.log_mode_probability))
        if m.ndim == 0 or P.shape[-2:] != (m.shape[-1],) * 2:
            condition = "mean must end in [s] and covariance in [s, s]"
            fact = f"shapes {shape_of(m)} and {shape_of(P)}"
            raise InputValueError("Prior", "mean", f"{condition}, got {fact}", "Use the state size s in both.")
        if self.per not in (None, "mode", "target"):
            condition, remedy = 'per must be "mode" or "target"', "Leave it out for one prior of all modes and targets."
            raise InputValueError("Prior", "per", f"{condition}, got {self.per!r}", remedy)
        if self.per == "target":  # kept as [*b, 1, s], which has one meaning
            object.__setattr__(self, "mean", m if m.ndim == 1 else m.unsqueeze(-2))
            object.__setattr__(self, "covariance", P if P.ndim == 2 else P.unsqueeze(-3))
            object.__setattr__(self, "per", None)


@record
class Series(TensorRecord):
    """Observations of one or many targets, as tensors or numpy arrays, which are copied.

    Attributes:
        observations: [*b, t, o]; NaN marks missing observations or components.
        inputs: inputs of models with B or D, [t, u] for all targets or [*b, t, u] for each.
        mask: True where an observation counts, in addition to NaN; [*b, t] or [*b, t, o].
        lengths: number of steps of each target [*b]. Later steps are predicted without observations; with times the
            state is held constant there, and the time values are ignored.
        times: observation times for continuous-time models, [t] or [*b, t], nondecreasing. The prior is at time 0.

    >>> import torch
    >>> Series(torch.zeros(3, 7, 2), lengths=torch.tensor([7, 7, 4])).observations.shape
    torch.Size([3, 7, 2])
    """

    observations: Float[Tensor, "*b t o"]
    inputs: Float[Tensor, "*#c t u"] | None = dataclasses.field(default=None, kw_only=True)
    mask: Bool[Tensor, "*b t"] | Bool[Tensor, "*b t o"] | None = dataclasses.field(default=None, kw_only=True)
    lengths: Int[Tensor, "*b"] | None = dataclasses.field(default=None, kw_only=True)
    times: Float[Tensor, "*#c t"] | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        for name in ("mask", "lengths"):  # integers stay integers
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, from_array(value))
        values = {"observations": self.observations, "inputs": self.inputs, "times": self.times}
        if (converted := from_arrays(values)) is not values:
            for name, t in converted.items():
                object.__setattr__(self, name, t)
        y, call = self.observations, "Series"
        check_floats(call, observations=y, **present(inputs=self.inputs, times=self.times))
        if y.ndim < 2 or y.shape[-2] == 0:
            condition = "observations must be [*b, t, o] with at least one step"
            remedy = "Pass a scalar series as [t, 1], and put targets first."
            raise InputValueError(call, "observations", f"{condition}, got shape {shape_of(y)}", remedy)
        if self.mask is not None:
            check_mask(call, self.mask, y)
        if self.lengths is not None:
            _check_lengths(call, self.lengths, y)
        if self.times is not None:
            _check_steps(call, "times", self.times.shape, y)
        if self.inputs is not None:
            _check_steps(call, "inputs", self.inputs.shape[:-1], y)


def as_series(observations: Float[Tensor, "*b t o"] | Series) -> Series:
    """Return a Series, made from a tensor if need be."""
    return observations if isinstance(observations, Series) else Series(observations)


def check_prior(call: str, prior: object) -> None:
    """Raise InputTypeError unless `prior` is a `Prior`."""
    if not isinstance(prior, Prior):
        remedy = "Pass Prior(mean, covariance)."
        raise InputTypeError(call, "prior", f"prior must be a Prior, got {type(prior).__name__}", remedy)


def check_mask(call: str, mask: Tensor, y: Tensor) -> None:
    """Check that a mask is bool, with one entry for each observation or each component."""
    _check_tensor(call, "mask", mask)
    if mask.dtype != torch.bool or mask.shape not in (y.shape, y.shape[:-1]):
        condition = f"mask must be bool of shape {shape_of(y)} or {tuple(y.shape[:-1])}"
        fact = f"{mask.dtype} of shape {shape_of(mask)}"
        raise InputValueError(call, "mask", f"{condition}, got {fact}", "Use True where something was observed.")
    _check_device(call, "mask", mask, y)


def _check_lengths(call: str, lengths: Tensor, y: Tensor) -> None:
    _check_tensor(call, "lengths", lengths)
    is_integer = not lengths.is_floating_point() and lengths.dtype != torch.bool
    if not is_integer or lengths.shape != y.shape[:-2]:
        condition = f"lengths must be integers of shape {tuple(y.shape[:-2])}, one for each target"
        fact = f"{lengths.dtype} of shape {shape_of(lengths)}"
        raise InputValueError(call, "lengths", f"{condition}, got {fact}", "Pass the number of steps of each target.")
    _check_device(call, "lengths", lengths, y)


def _check_tensor(call: str, name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        fact, remedy = type(value).__name__, "Wrap it in torch.tensor."
        raise InputTypeError(call, name, f"{name} must be a tensor, got {fact}", remedy)


def _check_device(call: str, name: str, value: Tensor, y: Tensor) -> None:
    """Check that masks and lengths are on the device of the observations."""
    if value.device != y.device:
        fact, remedy = f"{name} on {value.device}, observations on {y.device}", "Move one of them with .to(device)."
        raise InputValueError(call, None, f"tensors must be on one device, got {fact}", remedy)


def _check_steps(call: str, name: str, shape: torch.Size, y: Tensor) -> None:
    """Check that times or inputs have one entry for each step, of all targets or of each."""
    each, steps = tuple(y.shape[:-1]), (y.shape[-2],)
    if shape not in (each, steps):
        condition = f"{name} must have the leading shape {each} or {steps}, one entry for each observation"
        remedy = f"Pass {name} for all targets, or for each."
        raise InputValueError(call, name, f"{condition}, got {tuple(shape)}", remedy)


torch.serialization.add_safe_globals([Prior, Series])  # for torch.load with weights_only=True
