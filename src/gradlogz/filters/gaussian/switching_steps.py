"""One step of the switching filters in two halves: predict, then update.

             predict                                   update
    imm      mix modes i for each mode j; predict      each mixture by its mode j
    gpb1     predict one Gaussian by every mode j      every mode j; collapse all modes to one Gaussian
    gpb(n)   predict every history by every mode j     every history by every mode j; collapse the oldest mode

Between the halves is all that an observation needs (`PredictedBranches`): detections can be gated and associated there.

Read next: switching.py (the filters), association.py (several detections for a target), ../kalman.py (one Gaussian).
"""

from typing import NamedTuple

import torch

from ..._typing import Float, Tensor
from ..models.nonlinear_model import NonlinearParameters
from ..models.switching_model import Parameters
from ..moment_matching import (
    GaussianMoments,
    Weighed,
    apart,
    collapse,
    fill,
    likelihood_of_modes,
    mix,
    posterior,
    to_one,
    weigh,
)
from ..results import FilterState, Moved, PredictedBranches

StepParameters = Parameters | NonlinearParameters


class Predicted(NamedTuple):
    """A predicted state and its observation, before it is known; *b holds targets.

    Attributes:
        mean: predicted mean of the state, all modes combined.
        covariance: predicted covariance of the state, including the spread between modes.
        mode_mean: predicted mean given the mode.
        mode_covariance: predicted covariance given the mode.
        log_mode_probability: predicted log probability of each mode.
        expected_observation: mean of the observation, all modes combined.
        innovation_covariance: covariance of the innovation, including the spread between modes.
        mode_expected_observation: mean of the observation given the mode.
        mode_innovation_covariance: covariance of the innovation given the mode.
        branches: predicted Gaussians that `SwitchingFilter.update` takes.
        parameters: parameters of this step, discretised and with its inputs.
        filter: name of the filter that predicted, which alone may update.
    """

    mean: Float[Tensor, "*b s"]
    covariance: Float[Tensor, "*b s s"]
    mode_mean: Float[Tensor, "*b k s"]
    mode_covariance: Float[Tensor, "*b k s s"]
    log_mode_probability: Float[Tensor, "*b k"]
    expected_observation: Float[Tensor, "*b o"]
    innovation_covariance: Float[Tensor, "*b o o"]
    mode_expected_observation: Float[Tensor, "*b k o"]
    mode_innovation_covariance: Float[Tensor, "*b k o o"]
    branches: PredictedBranches
    parameters: StepParameters
    filter: str


def predict_modes(now: StepParameters, state: FilterState, depth: int) -> PredictedBranches:
    """Predict a state by one transition; depth 0 is imm, others are depths of gpb."""
    if depth > 1:
        return _predict_histories(now, state)
    log_c, share = weigh(now.transition, state.log_probability.unsqueeze(-1))
    # Mix, for imm: the modes i that may precede each mode j. gpb1 has one Gaussian and nothing to mix ---------------
    mixed = mix(share.mT, state.mean, state.covariance, now.has) if depth == 0 else (state.mean, state.covariance)
    before = now.predict(*mixed)
    return PredictedBranches(*before, log_c, *before, state.log_probability, share, state.log_likelihood)


def update_modes(
    now: StepParameters, before: PredictedBranches, y: Tensor, observed: Tensor | None, depth: int
) -> tuple[FilterState, Moved]:
    """Condition predicted Gaussians on one observation."""
    if depth > 1:
        return _update_histories(now, before, y, observed, depth)
    log_c = before.log_mode_probability
    after = now.update(
        before.mean, before.covariance, y.unsqueeze(-2), None if observed is None else observed.unsqueeze(-2)
    )
    log_pi, step, _ = posterior(log_c, after.log_likelihood)
    moved = Moved(*before[:3], after.mean, after.covariance, log_pi, after.log_likelihood, step, after.failure)
    # Collapse, for gpb1: all modes to one. imm keeps them ------------------------------------------------------------
    reduced = (
        (after.mean, after.covariance) if depth == 0 else one_gaussian(log_pi, after.mean, after.covariance, now.has)
    )
    return FilterState(*reduced, log_pi, before.log_likelihood + step), moved


def advance(
    now: StepParameters, state: FilterState, y: Tensor, observed: Tensor | None, depth: int
) -> tuple[FilterState, Moved]:
    """Advance a state by one transition and one observation."""
    return update_modes(now, predict_modes(now, state, depth), y, observed, depth)


def _predict_histories(now: StepParameters, state: FilterState) -> PredictedBranches:
    """Predict every history by every mode.   [theory 7.2]"""
    # Mix: nothing; the mixtures are computed only to report the prediction of each mode ------------------------------
    histories = state.log_probability.shape[-1]
    log_c, share = weigh(_by_newest_mode(now, histories), state.log_probability.unsqueeze(-1))
    m, P = state.mean.unsqueeze(-2), state.covariance.unsqueeze(-3)
    if now.has is None:
        mixed = mix(share.mT, state.mean, state.covariance)
    else:  # for each pair, fill in the components that the mode has and the history lacks
        k = now.transition.shape[-1]
        filled = fill(share.mT, state.mean, state.covariance, now.has.repeat(histories // k, 1))
        mixed = collapse(share.mT, *filled)
        m, P = filled.mean.movedim(-3, -2), filled.covariance.movedim(-4, -3)
    # Predict: every history by every mode ----------------------------------------------------------------------------
    pairs = now.by_history().predict(m, P)
    return PredictedBranches(*now.predict(*mixed), log_c, *pairs, state.log_probability, share, state.log_likelihood)


def _update_histories(
    now: StepParameters, before: PredictedBranches, y: Tensor, observed: Tensor | None, depth: int
) -> tuple[FilterState, Moved]:
    """Condition every history by every mode, then collapse the oldest mode.   [theory 7.2]"""
    log_h, k = before.log_probability.unsqueeze(-1), now.transition.shape[-1]
    histories, T = log_h.shape[-2], _by_newest_mode(now, log_h.shape[-2])
    prior_weights = Weighed(before.log_mode_probability, before.share)
    # Update: every history by every mode -----------------------------------------------------------------------------
    is_there = None if observed is None else observed[..., None, None, :]
    after = now.by_history().update(before.mean, before.covariance, y[..., None, None, :], is_there)
    mode_likelihood = likelihood_of_modes(T, log_h, after.log_likelihood, prior_weights)
    log_pi, step, possible = posterior(prior_weights.log_sum, mode_likelihood)
    # Collapse: the oldest mode of each history, with weights that include the observation ----------------------------
    evidence = torch.where(possible[..., None, None], after.log_likelihood, 0.0)
    oldest = k if histories * k > k ** (depth - 1) else 1
    log_w, share = weigh(apart(T, oldest, 0), apart(log_h + evidence, oldest, 0))
    log_w = log_w.log_softmax(-1)
    means, covariances = apart(after.mean, oldest, 1), apart(after.covariance, oldest, 2)
    mean, covariance = collapse(share.mT, means.movedim(-3, -2), covariances.movedim(-4, -3))
    # Report each mode: collapse its histories ------------------------------------------------------------------------
    by_mode = to_modes(log_w, mean, covariance, k)
    moved = Moved(*before[:3], *by_mode, log_pi, mode_likelihood, step, after.failure.amax(-2))
    return FilterState(mean, covariance, log_w, before.log_likelihood + step), moved


def _by_newest_mode(now: StepParameters, histories: int) -> Tensor:
    """Transition matrix with a row for each history, by its newest mode."""
    T = now.transition
    return T.repeat(*[1] * (T.ndim - 2), histories // T.shape[-1], 1)


def one_gaussian(log_pi: Tensor, mean: Tensor, covariance: Tensor, has: Tensor | None) -> tuple[Tensor, Tensor]:
    """Collapse all modes to one Gaussian, with a dimension of size 1 in place of the modes."""
    m, P = to_one(log_pi.exp(), mean, covariance, has)
    return m.unsqueeze(-2), P.unsqueeze(-3)


def to_modes(log_w: Tensor, mean: Tensor, covariance: Tensor, k: int) -> GaussianMoments:
    """Collapse histories to one Gaussian for each newest mode."""
    if log_w.shape[-1] == k:
        return GaussianMoments(mean, covariance)
    log_w = log_w.unflatten(-1, (-1, k))
    share = weigh(torch.ones_like(log_w), log_w).shares
    means = mean.unflatten(-2, (-1, k)).movedim(-3, -2)
    return collapse(share.mT, means, covariance.unflatten(-3, (-1, k)).movedim(-4, -3))
