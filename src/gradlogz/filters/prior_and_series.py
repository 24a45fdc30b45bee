"""What a filter is given beside its model: the prior at time 0, and the series of observations.

    Prior     initial mean and covariance of the state, and initial mode probabilities
    Series    observations, and where there are any: inputs, mask, lengths, times

Time 0 is before the first transition. A series of observations alone may be given as a tensor. Types and shapes are
checked here, when the object is made; what depends on the model, and values, are checked by the filter (validation.py).

Read next: validation.py, gaussian/switching.py.
"""

import dataclasses

import torch

from .._errors import InputTypeError, InputValueError, check_floats, present, shape_of
from .._pytree import record
from .._typing import Bool, Float, Int, Tensor


@record
class Prior:
    """Gaussian prior of the state for each mode at time 0, before the first transition, and the mode probabilities.

    Attributes:
        mean: initial mean, [s] for all modes, [k, s] for each mode, or [*b, k, s] for each target too.
        covariance: initial covariance, [s, s], [k, s, s] or [*b, k, s, s].
        log_mode_probability: initial log probabilities of the modes, [k] or [*b, k]; None is uniform.

    >>> import torch
    >>> Prior(torch.zeros(2), torch.eye(2)).log_mode_probability is None
    True
    """

    mean: Float[Tensor, "*#m s"]
    covariance: Float[Tensor, "*#m s s"]
    log_mode_probability: Float[Tensor, "*#n k"] | None = None

    def __post_init__(self) -> None:
        m, P = self.mean, self.covariance  # Shorthand
        check_floats("Prior", mean=m, covariance=P, **present(log_mode_probability=self.log_mode_probability))
        if m.ndim == 0 or P.shape[-2:] != (m.shape[-1],) * 2:
            condition = "mean must end in [s] and covariance in [s, s]"
            fact = f"shapes {shape_of(m)} and {shape_of(P)}"
            raise InputValueError("Prior", "mean", f"{condition}, got {fact}", "s is the size of the state.")


@record
class Series:
    """Observations of one target or of many, and what is known of them.

    Attributes:
        observations: NaN where there are none, in all dimensions or some.
        inputs: u of models with B or D, for all targets [t, u] or for each [*b, t, u].
        mask: true where there is an observation, beside NaN; [*b, t] or [*b, t, o].
        lengths: number of steps of each target [*b]. Later steps are predicted without observations; with times the
            state is held constant there, and the time values are ignored.
        times: of the observations, for models of continuous time; [t] or [*b, t], never decreasing. The prior is at
            time 0.

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
        y, call = self.observations, "Series"
        check_floats(call, observations=y, **present(inputs=self.inputs, times=self.times))
        if y.ndim < 2 or y.shape[-2] == 0:
            condition = "observations must be [*b, t, o] with one step or more"
            remedy = "One series of numbers is [t, 1]; targets come first."
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
    """A series; of a tensor, one of observations alone."""
    return observations if isinstance(observations, Series) else Series(observations)


def check_prior(call: str, prior: object) -> None:
    """The prior of a filter is a `Prior`."""
    if not isinstance(prior, Prior):
        remedy = "Pass Prior(mean, covariance)."
        raise InputTypeError(call, "prior", f"prior must be a Prior, got {type(prior).__name__}", remedy)


def check_mask(call: str, mask: Tensor, y: Tensor) -> None:
    """A mask is bool, one for each observation or for each of its components."""
    _check_tensor(call, "mask", mask)
    if mask.dtype != torch.bool or mask.shape not in (y.shape, y.shape[:-1]):
        condition = f"mask must be bool, {shape_of(y)} or {tuple(y.shape[:-1])}, true where something was observed"
        fact = f"{mask.dtype} of shape {shape_of(mask)}"
        raise InputValueError(call, "mask", f"{condition}, got {fact}", "Compare it with 0 to make it bool.")
    _check_device(call, "mask", mask, y)


def _check_lengths(call: str, lengths: Tensor, y: Tensor) -> None:
    _check_tensor(call, "lengths", lengths)
    whole = not lengths.is_floating_point() and lengths.dtype != torch.bool
    if not whole or lengths.shape != y.shape[:-2]:
        condition = f"lengths must be whole numbers of shape {tuple(y.shape[:-2])}, one for each target"
        fact = f"{lengths.dtype} of shape {shape_of(lengths)}"
        raise InputValueError(
            call, "lengths", f"{condition}, got {fact}", "Pass how many steps of each target were observed."
        )
    _check_device(call, "lengths", lengths, y)


def _check_tensor(call: str, name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        fact, remedy = type(given).__name__, "Wrap it in torch.tensor."
        raise InputTypeError(call, name, f"{name} must be a tensor, got {fact}", remedy)


def _check_device(call: str, name: str, given: Tensor, y: Tensor) -> None:
    """Masks and lengths are where the observations are."""
    if given.device != y.device:
        fact, remedy = f"{name} on {given.device}, observations on {y.device}", "Move one of them with .to(device)."
        raise InputValueError(call, None, f"tensors must be on one device, got {fact}", remedy)


def _check_steps(call: str, name: str, shape: torch.Size, y: Tensor) -> None:
    """Times and inputs are for the steps of all targets, or for those of each."""
    each, steps = tuple(y.shape[:-1]), (y.shape[-2],)
    if shape not in (each, steps):
        condition = f"{name} must be {each} or {steps}, one for each observation"
        remedy = "Times count from the prior, at time 0; inputs end in their size u."
        raise InputValueError(call, name, f"{condition}, got shape {tuple(shape)}", remedy)
