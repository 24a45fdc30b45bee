"""Switching filters whose transition probabilities depend on the state, as attention weights do.

    P(s_t = j | s_{t-1} = i) = softmax_j(log T_ij + <mu_i, eta_j>)      the corrected Eq. (12) of the note   [E53-E56]

                    mu_i
    attentive_gpb1  the mean of the one Gaussian, the same for all modes i
    attentive_imm   the filtered mean of mode i
    attentive_gpb2  the filtered mean of mode i; pairs of modes are collapsed after the observation

Mode j is likelier where the state aligns with eta_j, its natural parameter. With eta = 0 they are `gpb1`, `imm` and
`gpb2`. A constant for all eta_j changes nothing. In the mixing step of `attentive_imm` mode j attends to the modes i,

    w_i|j = softmax_i(log pi_i - log Z_i + log T_ij + <mu_i, eta_j>),    Z_i = sum_j T_ij exp<mu_i, eta_j>

which is softmax attention with the queries eta_j, the keys mu_i and key biases log pi_i - log Z_i if T is constant.

Read next: switching.py (the filters), ../conjugate/attention_filter.py (attention without observations),
../fitting/eta_fit.py (eta, learned from series).
"""

import dataclasses
from typing import Literal

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError, check_floats, shape_of
from ..._typing import Float, Tensor
from ..models.switching_model import SwitchingModel
from ..prior_and_series import Prior, Series, as_series
from ..results import Filtered
from ..validation import prepared
from .switching import SwitchingFilter

FILTERS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "imm": ("imm", 2)}


def attentive_imm(
    model: SwitchingModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    eta: Float[Tensor, "k s"],
) -> Filtered:
    """`imm` with the transition probabilities softmax_j(log T_ij + <mu_i, eta_j>).

    mu_i is the filtered mean of the state in mode i and eta_j the natural parameter of mode j. The other arguments are
    those of `imm`. Law: tests/laws/test_transitions_attend_to_the_state.py.
    """
    return _attend("attentive_imm", "imm", model, observations, prior, eta)[0]


def attentive_gpb1(
    model: SwitchingModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    eta: Float[Tensor, "k s"],
) -> Filtered:
    """`gpb1` with the transition probabilities softmax_j(log T_ij + <m, eta_j>), m the mean of its one Gaussian."""
    return _attend("attentive_gpb1", "gpb1", model, observations, prior, eta)[0]


def attentive_gpb2(
    model: SwitchingModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    eta: Float[Tensor, "k s"],
) -> Filtered:
    """`gpb2` with the transition probabilities softmax_j(log T_ij + <mu_i, eta_j>).

    Exact for one step from one Gaussian for each mode, if the transition depends on the mean of that Gaussian. Without
    observations it is `attentive_imm`. Takes the arguments of `attentive_imm`, and k times its time.
    """
    return _attend("attentive_gpb2", "gpb2", model, observations, prior, eta)[0]


def attended_model(
    model: SwitchingModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    eta: Float[Tensor, "k s"],
    method: Literal["gpb1", "imm", "gpb2"] = "gpb2",
) -> SwitchingModel:
    """The model with the transition matrices [*b, t, k, k] of an attentive filter, one for each target and step.

    Its plain filter is the attentive filter. `smooth` of this model with the same method is the attentive smoother: the
    filtered means fix the transition probabilities, and later observations update states and modes given them.

    >>> import torch
    >>> from gradlogz.filters import Prior, SwitchingModel, smooth
    >>> one = torch.ones(2, 1, 1)
    >>> model = SwitchingModel(torch.full((2, 2), 0.5), F=one, Q=one, H=one, R=one, b=torch.tensor([[1.0], [-1.0]]))
    >>> y, prior = torch.tensor([[0.0], [2.0], [0.0]]), Prior(torch.zeros(1), torch.eye(1))
    >>> eta = torch.tensor([[-1.0], [1.0]])
    >>> attended = attended_model(model, y, prior, eta=eta)
    >>> smoothed = smooth(attended, y, prior)
    >>> torch.allclose(smoothed.filtered.mean, attentive_gpb2(model, y, prior, eta=eta).mean)
    True
    """
    call = "attended_model"
    if method not in FILTERS:
        condition = f"method must be one of {', '.join(FILTERS)}"
        raise InputValueError(
            call, "method", f"{condition}, got {method!r}", 'Use "gpb2" for accuracy, "imm" for speed.'
        )
    transition = _attend(call, method, model, observations, prior, eta)[1]
    return dataclasses.replace(model, transition=transition, validate=False)


@without_autocast
def _attend(
    call: str,
    method: str,
    model: SwitchingModel,
    observations: Tensor | Series,
    prior: Prior,
    eta: Tensor,
) -> tuple[Filtered, Tensor]:
    """Filter a series, and return the transition matrices [*b, t, k, k] of its steps."""
    check_floats(call, eta=eta, model=model.F)
    if model.continuous:
        problem = "the model must have a transition matrix, but it has a Generator"
        raise InputValueError(call, "model", problem, "Discretise it, for example with model.at(dt).")
    if eta.shape != (model.modes, model.state_size):
        condition = f"eta must be [k={model.modes}, s={model.state_size}], one for each mode"
        raise InputValueError(
            call, "eta", f"{condition}, got shape {shape_of(eta)}", "Pass zeros for the plain filter."
        )
    series = as_series(observations)
    _, y, observed = prepared(call, model, series, validate=model.validate)
    batch, steps = y.shape[:-2], y.shape[-2]
    form, depth = FILTERS[method]
    state = SwitchingFilter(model, form, depth).init(prior, batch_shape=tuple(batch))  # type: ignore[arg-type]
    filtered_steps, transitions = [], []
    for t in range(steps):
        now = model.narrow(t)
        assert isinstance(now.transition, Tensor)  # checked above
        T = now.transition.squeeze(-3) if now.transition.ndim > 2 else now.transition
        pull = state.mean @ eta.mT  # <mu_i, eta_j>
        positive = T > 0
        logits = torch.where(positive, T, 1.0).log().masked_fill(~positive, -torch.inf) + pull
        attended = dataclasses.replace(now, transition=logits.softmax(-1).unsqueeze(-3), validate=False)
        transitions.append(logits.softmax(-1))
        mask_now = None if observed is None else observed[..., t, :]
        inputs = None if series.inputs is None else series.inputs[..., t, :]
        online = SwitchingFilter(attended, form, depth)  # type: ignore[arg-type]
        state, step = online.step(state, y[..., t, :], mask=mask_now, inputs=inputs)
        filtered_steps.append(step)
    at = len(batch)
    filtered = Filtered(*(torch.stack(parts, at) for parts in zip(*filtered_steps, strict=True)))
    return filtered._replace(log_likelihood=state.log_likelihood), torch.stack(transitions, at)
