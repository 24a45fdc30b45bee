"""Backward messages of later observations to a state and a mode: the step of a smoother.

    f_j(m) = log ∫ N(x; m, P_j) p(y_t+1 ... y_T | x_t = x, s_t = j) dx     the message to N(m_j, P_j)
    g = ∇f_j,   L = -∇²f_j  at m_j                                         its score and its information
    P(s_t = j | all) ∝ pi_j exp f_j                                        the mode
    m_j + P_j g,   P_j - P_j L P_j                                         the state: the gradient of a log normaliser

A filter takes what came before for a Gaussian in each mode; a smoother takes what comes later for the exponential of a
quadratic function in each mode, the one that gives N(m_j, P_j) the mean and covariance that the k modes of the next
step give it together. Nothing is inverted that may be singular: with one mode this is the smoother of Bryson and
Frazier [bierman73], whose numbers are those of Rauch, Tung and Striebel [rauch65].

A message is kept at the Gaussian of mode j and transferred to the Gaussian of each pair of modes, the state that went
from i to j:

    log ∫ N(m + d, P - D) exp(quadratic) = f + <g, d> - <d, L d>/2 - <r, D A^-1 r>/2 - log|A|/2,   A = I - L D
    its score A^-1 r,   its information A^-1 L,   r = g - L d

Functions are taken for the lines that a filter takes them for, each pair of modes for its own: F, H and R below are
those of ../models/nonlinear_model.py at the Gaussian of i, moved by j.

Read next: smoother.py (the steps in their order), kim_smoother.py (the published step), switching.py (the filters).
"""

from typing import NamedTuple

import torch

from ..._typing import Bool, Float, Tensor
from ...measures.gating import gated_mean, gated_spread
from ...special.log_domain import log_sum_exp
from ..kalman import LinearizedObservation, Motion, correct
from ..models.nonlinear_model import NonlinearParameters
from ..models.switching_model import Parameters
from ..moment_matching import GaussianMoments, collapse, fill, symmetric, weigh


class FilteredModes(NamedTuple):
    """A Gaussian for each mode and its probability, given what came before and now.

    Covariances are rounded as those were that they come from, the variances before the last observation.
    """

    mean: Float[Tensor, "*b k s"]
    covariance: Float[Tensor, "*b k s s"]
    log_probability: Float[Tensor, "*b k"]
    variance_before: Float[Tensor, "*b k s"]


class BackwardMessage(NamedTuple):
    """f, ∇f and -∇²f of each mode at its mean; and the average of -∇²f over the next modes, which is positive.

    f is up to a number that all modes share: pi_j exp f_j sum to one.
    """

    log_evidence: Float[Tensor, "*b k"]
    score: Float[Tensor, "*b k s"]
    information: Float[Tensor, "*b k s s"]
    average: Float[Tensor, "*b k s s"]


class SmoothingStep(NamedTuple):
    """One step, or all of them: what moves the state, what was observed, and whether any mode could have caused it."""

    parameters: Parameters | NonlinearParameters
    observations: Float[Tensor, "*b o"]
    seen: Bool[Tensor, "*b o"] | None
    possible: Bool[Tensor, "*b"]


class ModePairs(NamedTuple):
    """s_{t-1} = i and s_t = j: x_{t-1} and how j moves it, the law of (x_t, x_{t-1}) after y_t, and what y_t says."""

    start: GaussianMoments
    motion: Motion
    joint: GaussianMoments
    log_likelihood: Float[Tensor, "*b i j"]
    score: Float[Tensor, "*b i j s"]
    information: Float[Tensor, "*b i j s s"]


class PairMessage(NamedTuple):
    """The message of observations after y_t to x_t of each pair; log_evidence includes y_t itself."""

    log_evidence: Float[Tensor, "*b i j"]
    score: Float[Tensor, "*b i j s"]
    information: Float[Tensor, "*b i j s s"]


def pair_modes(step: SmoothingStep, before: FilteredModes) -> ModePairs:
    """Every mode i moved by every mode j, and both times together after the observation."""
    now, m, P = step.parameters, before.mean.unsqueeze(-2), before.covariance.unsqueeze(-3)
    if now.has is not None:  # what mode i lacks and j has
        share = weigh(now.transition, before.log_probability.unsqueeze(-1)).shares
        filled = fill(share.mT, before.mean, before.covariance, now.has)
        m, P = filled.mean.movedim(-3, -2), filled.covariance.movedim(-4, -3)
    now = now.by_history()
    motion = now.linearize_move(m, P)
    predicted, F = motion.predicted, motion.F
    m, P = m.expand_as(predicted.mean), P.expand_as(predicted.covariance)
    y, seen = step.observations[..., None, None, :], None if step.seen is None else step.seen[..., None, None, :]
    lag = F @ P
    above, below = torch.cat((predicted.covariance, lag), -1), torch.cat((lag.mT, P), -1)
    observed = now.linearize_observe(*predicted, y)
    v, H, R = observed
    H = torch.cat((H, torch.zeros_like(H)), -1)
    mean, covariance, log_likelihood, _ = correct(
        torch.cat((predicted.mean, m), -1), torch.cat((above, below), -2), v, H=H, R=R, seen=seen
    )
    # What no mode can produce says nothing about them.
    log_likelihood = torch.where(step.possible[..., None, None], log_likelihood, 0.0)
    state_message = _observation_message(observed, predicted.covariance, seen)
    return ModePairs(GaussianMoments(m, P), motion, GaussianMoments(mean, covariance), log_likelihood, *state_message)


def pair_message(
    _step: SmoothingStep, _before: FilteredModes, pairs: ModePairs, after: FilteredModes, later: BackwardMessage
) -> PairMessage:
    """The message to the Gaussian of mode j, transferred to each pair i, j."""
    s = after.mean.shape[-1]
    m, P = pairs.joint.mean[..., :s], pairs.joint.covariance[..., :s, :s]
    later = _made_proper(later, after)
    gain, score, information = _transferred(
        later.score.unsqueeze(-3),
        later.information.unsqueeze(-4),
        m - after.mean.unsqueeze(-3),
        after.covariance.unsqueeze(-4) - P,
    )
    return PairMessage(pairs.log_likelihood + later.log_evidence.unsqueeze(-2) + gain, score, information)


def propagate(step: SmoothingStep, before: FilteredModes, pairs: ModePairs, message: PairMessage) -> BackwardMessage:
    """The message to mode i at the time before, from the messages to its pairs j.

    before y_t:   g' = H^T S^-1 v + A g,   L' = H^T S^-1 H + A L A^T,   A = (I - K H)^T
    at x_{t-1}:   F^T g',   F^T L' F
    """
    F, P = pairs.motion.F, pairs.motion.predicted.covariance
    A = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device) - pairs.information @ P
    score = _times(F.mT, pairs.score + _times(A, message.score))
    information = F.mT @ (pairs.information + A @ message.information @ A.mT) @ F
    log_evidence, share = weigh(step.parameters.transition.mT, message.log_evidence.mT)
    total = log_sum_exp(before.log_probability + log_evidence).unsqueeze(-1)
    g = gated_mean(share.mT, score)
    average = symmetric(gated_mean(share.mT, information.flatten(-2)).unflatten(-1, information.shape[-2:]))
    spread = gated_spread(share.mT, score, g)
    return BackwardMessage(log_evidence - total, g, symmetric(average - spread), average)


class SmoothedModes(NamedTuple):
    """What is reported of a time, mode by mode: the law of (x_t, x_{t-1}) given s_t."""

    mean: Float[Tensor, "*b k s2"]
    covariance: Float[Tensor, "*b k s2 s2"]
    log_probability: Float[Tensor, "*b k"]
    log_pair: Float[Tensor, "*b k k"]


def smoothed_pairs(pairs: ModePairs, message: PairMessage) -> GaussianMoments:
    """The law of (x_t, x_{t-1}) of each pair, given all."""
    m, P = pairs.joint
    C = P[..., : P.shape[-1] // 2]
    return GaussianMoments(m + _times(C, message.score), P - C @ message.information @ C.mT)


def combine_pairs(
    step: SmoothingStep, before: FilteredModes, log_evidence: Float[Tensor, "*b i j"], each: GaussianMoments
) -> SmoothedModes:
    """The pairs i, j as one Gaussian of both times for each j."""
    T = step.parameters.transition
    logs = before.log_probability.unsqueeze(-1) + log_evidence
    log_sum, share = weigh(T, logs)
    total = log_sum_exp(log_sum)[..., None]
    positive = T > 0
    log_T = torch.where(positive, T, 1.0).log().masked_fill(~positive, -torch.inf)
    collapsed = collapse(share.mT, each.mean.movedim(-3, -2), each.covariance.movedim(-4, -3))
    return SmoothedModes(*collapsed, (log_sum - total).log_softmax(-1), log_T + logs - total.unsqueeze(-1))


def final_message(known: FilteredModes) -> BackwardMessage:
    """The message after the last observation: none."""
    zero = torch.zeros_like(known.covariance)
    return BackwardMessage(torch.zeros_like(known.log_probability), torch.zeros_like(known.mean), zero, zero)


def smoothed_initial(known: FilteredModes, later: BackwardMessage) -> tuple[GaussianMoments, Float[Tensor, "*b k"]]:
    """The law of a time of which there are no pairs: m + P g, P - P L P, and the modes."""
    m, P = known.mean, known.covariance  # Shorthand
    moved = GaussianMoments(m + _times(P, later.score), symmetric(P - P @ later.information @ P))
    return moved, known.log_probability + later.log_evidence


def _transferred(score: Tensor, information: Tensor, moved: Tensor, narrowed: Tensor) -> PairMessage:
    """The message g, L to N(m, P) transferred to N(m + d, P - D), with the log evidence gained."""
    g, L, d, D = score, information, moved, narrowed  # Shorthand
    A = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device) - L @ D
    r = g - _times(L, d)
    # Without a look at whether A is singular, for which a GPU would be waited for in every step.
    solved = torch.linalg.solve_ex(A, torch.cat((L.expand_as(A), r.unsqueeze(-1)), -1)).result
    there = solved[..., -1]
    square = (g * d).sum(-1) - (d * _times(L, d)).sum(-1) / 2 - (r * _times(D, there)).sum(-1) / 2
    return PairMessage(square - torch.linalg.slogdet(A).logabsdet / 2, there, symmetric(solved[..., :-1]))


def _made_proper(later: BackwardMessage, known: FilteredModes) -> BackwardMessage:
    """The average in place of an information that would leave a mode less certain than it is: P L P not positive.

    A hundredth of its variances is let pass, so that rounding does not decide.
    """
    with torch.no_grad():
        P = known.covariance
        size = P.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(P.dtype).tiny).rsqrt()
        gain = symmetric(P @ later.information @ P) * size.unsqueeze(-1) * size.unsqueeze(-2)
        slack = 0.01 * torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
        positive = torch.linalg.cholesky_ex(gain + slack).info == 0
    return later._replace(information=torch.where(positive[..., None, None], later.information, later.average))


def _observation_message(observed: LinearizedObservation, P: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """The message of an observation to the state before it: H^T S^-1 v and H^T S^-1 H."""
    v, H, R = observed
    S = symmetric(H @ P @ H.mT + R)
    if seen is not None:
        v, H = torch.where(seen, v, 0.0), H * seen.unsqueeze(-1)
        both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
        S = torch.where(both, S, torch.eye(S.shape[-1], dtype=S.dtype, device=S.device))
    root = torch.linalg.cholesky_ex(S).L
    wide = torch.cat((H.expand(*S.shape[:-1], H.shape[-1]), v.unsqueeze(-1)), -1)
    whitened = torch.linalg.solve_triangular(root, wide, upper=False)
    W, z = whitened[..., :-1], whitened[..., -1]
    near = (z * z).sum(-1) != torch.inf  # what is too far to have a density says nothing, as in the filter
    W = torch.where(near[..., None, None], W, 0.0)
    return _times(W.mT, z), W.mT @ W


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
