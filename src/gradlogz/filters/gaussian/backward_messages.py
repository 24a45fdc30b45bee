"""Backward messages from later observations to a state and a mode: one step of a smoother.

    f_j(m) = log ∫ N(x; m, P_j) p(y_t+1 ... y_T | x_t = x, s_t = j) dx     the message to N(m_j, P_j)
    g = ∇f_j,   L = -∇²f_j  at m_j                                         its score and its information
    P(s_t = j | all) ∝ pi_j exp f_j                                        the mode
    m_j + P_j g,   P_j - P_j L P_j                                         the state: the gradient of a log normaliser

A filter approximates the past by one Gaussian for each mode. The smoother approximates the future by the exponential of
a quadratic function for each mode, chosen so that N(m_j, P_j) gets the mean and covariance that the k modes of the next
step give it. No possibly singular matrix is inverted. With one mode this is the Bryson-Frazier smoother [bierman73],
which equals that of Rauch, Tung and Striebel [rauch65].

A message is stored at the Gaussian of mode j and transferred to the Gaussian of each pair of modes i, j:

    log ∫ N(m + d, P - D) exp(quadratic) = f + <g, d> - <d, L d>/2 - <r, D A^-1 r>/2 - log|A|/2,   A = I - L D
    its score A^-1 r,   its information A^-1 L,   r = g - L d

Nonlinear functions are linearised for each pair of modes: F, H and R below are those of ../models/nonlinear_model.py at
the Gaussian of i, moved by j.

Read next: smoother.py (the backward pass), kim_smoother.py (Kim's step), switching.py (the filters).
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

LEAST = 0.25  # share of the average information that the spread between modes must leave; also in the compiled kernel
ROUNDING = 1e-6  # of the average information, which may be singular; also there


class FilteredModes(NamedTuple):
    """Filtered Gaussian and log probability of each mode.

    `variance_before` holds the predicted variances, which set the rounding error of the filtered covariances.
    """

    mean: Float[Tensor, "*b k s"]
    covariance: Float[Tensor, "*b k s s"]
    log_probability: Float[Tensor, "*b k"]
    variance_before: Float[Tensor, "*b k s"]


class BackwardMessage(NamedTuple):
    """f, ∇f and -∇²f of each mode at its mean; and the average of -∇²f over the next modes, positive semidefinite.

    f is defined up to a constant shared by all modes: pi_j exp f_j sum to one.
    """

    log_evidence: Float[Tensor, "*b k"]
    score: Float[Tensor, "*b k s"]
    information: Float[Tensor, "*b k s s"]
    average: Float[Tensor, "*b k s s"]


class SmoothingStep(NamedTuple):
    """Parameters, observations, their mask, and whether the observation has positive density; one step or all."""

    parameters: Parameters | NonlinearParameters
    observations: Float[Tensor, "*b o"]
    observed: Bool[Tensor, "*b o"] | None
    possible: Bool[Tensor, "*b"]


class ModePairs(NamedTuple):
    """Every pair s_{t-1} = i, s_t = j: x_{t-1}, its motion by j, (x_t, x_{t-1}) given y_t, and the message of y_t."""

    start: GaussianMoments
    motion: Motion
    joint: GaussianMoments
    log_likelihood: Float[Tensor, "*b i j"]
    score: Float[Tensor, "*b i j s"]
    information: Float[Tensor, "*b i j s s"]


class PairMessage(NamedTuple):
    """Message of the observations after y_t to x_t of each pair; log_evidence includes y_t itself."""

    log_evidence: Float[Tensor, "*b i j"]
    score: Float[Tensor, "*b i j s"]
    information: Float[Tensor, "*b i j s s"]


def pair_modes(step: SmoothingStep, before: FilteredModes) -> ModePairs:
    """Move every mode i by every mode j, and condition both states on the observation."""
    now, m, P = step.parameters, before.mean.unsqueeze(-2), before.covariance.unsqueeze(-3)
    if now.has is not None:  # fill in the components that mode j has and mode i lacks
        share = weigh(now.transition, before.log_probability.unsqueeze(-1)).shares
        filled = fill(share.mT, before.mean, before.covariance, now.has)
        m, P = filled.mean.movedim(-3, -2), filled.covariance.movedim(-4, -3)
    now = now.by_history()
    motion = now.linearize_move(m, P)
    predicted, F = motion.predicted, motion.F
    m, P = m.expand_as(predicted.mean), P.expand_as(predicted.covariance)
    y, observed = (
        step.observations[..., None, None, :],
        None if step.observed is None else step.observed[..., None, None, :],
    )
    lag = F @ P
    above, below = torch.cat((predicted.covariance, lag), -1), torch.cat((lag.mT, P), -1)
    linearized = now.linearize_observe(*predicted, y)
    v, H, R = linearized
    H = torch.cat((H, torch.zeros_like(H)), -1)
    mean, covariance, log_likelihood, _ = correct(
        torch.cat((predicted.mean, m), -1), torch.cat((above, below), -2), v, H=H, R=R, observed=observed
    )
    # An observation of density 0 under every mode is ignored.
    log_likelihood = torch.where(step.possible[..., None, None], log_likelihood, 0.0)
    state_message = _observation_message(linearized, predicted.covariance, observed)
    return ModePairs(GaussianMoments(m, P), motion, GaussianMoments(mean, covariance), log_likelihood, *state_message)


def pair_message(
    _step: SmoothingStep, _before: FilteredModes, pairs: ModePairs, after: FilteredModes, later: BackwardMessage
) -> PairMessage:
    """Transfer the message from the Gaussian of mode j to each pair i, j."""
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
    """Message to mode i at the previous time, from the messages to its pairs i, j.

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
    """Smoothed moments of (x_t, x_{t-1}) given s_t, and probabilities of modes and pairs."""

    mean: Float[Tensor, "*b k s2"]
    covariance: Float[Tensor, "*b k s2 s2"]
    log_probability: Float[Tensor, "*b k"]
    log_pair: Float[Tensor, "*b k k"]


def smoothed_pairs(pairs: ModePairs, message: PairMessage) -> GaussianMoments:
    """Smoothed moments of (x_t, x_{t-1}) for each pair."""
    m, P = pairs.joint
    C = P[..., : P.shape[-1] // 2]
    return GaussianMoments(m + _times(C, message.score), P - C @ message.information @ C.mT)


def combine_pairs(
    step: SmoothingStep, before: FilteredModes, log_evidence: Float[Tensor, "*b i j"], each: GaussianMoments
) -> SmoothedModes:
    """Collapse the pairs i, j to one Gaussian of (x_t, x_{t-1}) for each j."""
    T = step.parameters.transition
    logs = before.log_probability.unsqueeze(-1) + log_evidence
    log_sum, share = weigh(T, logs)
    total = log_sum_exp(log_sum)[..., None]
    positive = T > 0
    log_T = torch.where(positive, T, 1.0).log().masked_fill(~positive, -torch.inf)
    collapsed = collapse(share.mT, each.mean.movedim(-3, -2), each.covariance.movedim(-4, -3))
    return SmoothedModes(*collapsed, (log_sum - total).log_softmax(-1), log_T + logs - total.unsqueeze(-1))


def final_message(filtered: FilteredModes) -> BackwardMessage:
    """Message after the last observation: zero."""
    zero = torch.zeros_like(filtered.covariance)
    return BackwardMessage(torch.zeros_like(filtered.log_probability), torch.zeros_like(filtered.mean), zero, zero)


def smoothed_initial(filtered: FilteredModes, later: BackwardMessage) -> tuple[GaussianMoments, Float[Tensor, "*b k"]]:
    """Smoothed moments m + P g, P - P L P and log mode probabilities at time 0, which has no pairs."""
    m, P = filtered.mean, filtered.covariance  # Shorthand
    moved = GaussianMoments(m + _times(P, later.score), symmetric(P - P @ later.information @ P))
    return moved, filtered.log_probability + later.log_evidence


def _transferred(score: Tensor, information: Tensor, moved: Tensor, narrowed: Tensor) -> PairMessage:
    """Transfer the message g, L from N(m, P) to N(m + d, P - D); returns the change of log evidence too."""
    g, L, d, D = score, information, moved, narrowed  # Shorthand
    A = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device) - L @ D
    r = g - _times(L, d)
    # solve_ex does not check whether A is singular; the check would synchronise with the GPU in every step.
    solved = torch.linalg.solve_ex(A, torch.cat((L.expand_as(A), r.unsqueeze(-1)), -1)).result
    there = solved[..., -1]
    square = (g * d).sum(-1) - (d * _times(L, d)).sum(-1) / 2 - (r * _times(D, there)).sum(-1) / 2
    return PairMessage(square - torch.linalg.slogdet(A).logabsdet / 2, there, symmetric(solved[..., :-1]))


def _made_proper(later: BackwardMessage, filtered: FilteredModes) -> BackwardMessage:
    """Limit the spread of scores between modes, so that the information L keeps a quarter of its average M.

    L = M - t spread, with t = 1 / max(1, trace (3/4 M)^-1 spread): then t spread <= 3/4 M, since no eigenvalue exceeds
    the trace. With less information, a score that belongs to a narrow Gaussian would be transferred to a wide one
    nearly undiminished, and the smoothed mean would leave the observations. t is continuous in all parameters, and so
    is what EM iterates. Components of variance 0 are left out: nothing depends on their information, and functions are
    linearised in the others only. So are components without information.
    """
    M, spread = later.average, later.average - later.information
    size = M.diagonal(dim1=-2, dim2=-1).clamp(min=torch.finfo(M.dtype).tiny).rsqrt()
    counted = (filtered.covariance.diagonal(dim1=-2, dim2=-1) > 0) & (M.diagonal(dim1=-2, dim2=-1) > 0)
    size = torch.where(counted, size, 0.0)
    scale = size.unsqueeze(-1) * size.unsqueeze(-2)
    # In units in which the diagonal of M is 1. M is singular where later observations carry no information.
    rounding = ROUNDING * torch.eye(M.shape[-1], dtype=M.dtype, device=M.device)
    used = torch.linalg.solve_ex((1 - LEAST) * M * scale + rounding, spread * scale).result
    t = 1 / used.diagonal(dim1=-2, dim2=-1).sum(-1).clamp(min=1.0)[..., None, None]
    # With t = 1 the information stays as it is: M - spread would round.
    return later._replace(information=torch.where(t < 1, M - t * spread, later.information))


def _observation_message(
    linearized: LinearizedObservation, P: Tensor, observed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Message of an observation to the predicted state: H^T S^-1 v and H^T S^-1 H."""
    v, H, R = linearized
    S = symmetric(H @ P @ H.mT + R)
    if observed is not None:
        v, H = torch.where(observed, v, 0.0), H * observed.unsqueeze(-1)
        both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
        S = torch.where(both, S, torch.eye(S.shape[-1], dtype=S.dtype, device=S.device))
    root = torch.linalg.cholesky_ex(S).L
    wide = torch.cat((H.expand(*S.shape[:-1], H.shape[-1]), v.unsqueeze(-1)), -1)
    whitened = torch.linalg.solve_triangular(root, wide, upper=False)
    W, z = whitened[..., :-1], whitened[..., -1]
    near = (z * z).sum(-1) != torch.inf  # an observation of density 0 is ignored, as in the filter
    W = torch.where(near[..., None, None], W, 0.0)
    return _times(W.mT, z), W.mT @ W


def _times(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
