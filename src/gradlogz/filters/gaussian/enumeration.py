"""The exact filter: one Kalman filter for every mode history.

    p(x_t | y_1 ... y_t) = sum over histories (s_0 ... s_t) of  P(history | y_1 ... y_t) N(m_history, P_history)

There are k^(t+1) histories, so this is feasible for short series only; switching.py approximates it. Keeping only the
likeliest histories makes longer series possible; the discarded probability is reported.

Read next: switching.py (moment matching instead), particle.py (sampled histories).
"""

from typing import NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError
from ..._typing import Bool, Float, Int, Tensor
from ...special.log_domain import log_sum_exp
from ..models.nonlinear_model import NonlinearModel, NonlinearParameters
from ..models.switching_model import Parameters, SwitchingModel
from ..moment_matching import collapse, likelihood_of_modes, weigh
from ..prior_and_series import Prior, Series, as_series
from ..results import Filtered, Moved, combined
from ..validation import check_densities, check_model, initial_state, prepared

MOST = 1 << 20  # largest number of histories


class Enumerated(NamedTuple):
    """Filtered distribution of each step, and the mode histories after the last one.

    Attributes:
        filtered: fields common to all filters; exact if nothing was pruned.
        histories: modes s_0 ... s_t of each history n.
        log_probability: log probability of each history given all observations.
        mean: mean of the last state given each history.
        covariance: covariance of the last state given each history.
        log_pruned: log probability discarded at each step, -inf for none.
    """

    filtered: Filtered
    histories: Int[Tensor, "*b n t1"]
    log_probability: Float[Tensor, "*b n"]
    mean: Float[Tensor, "*b n s"]
    covariance: Float[Tensor, "*b n s s"]
    log_pruned: Float[Tensor, "*b t"]


@without_autocast
def enumerate_modes(
    model: SwitchingModel | NonlinearModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    max_histories: int | None = None,
) -> Enumerated:
    """Exact filter by enumeration of all mode histories. Takes `model`, `observations` and `prior` as `imm` does.

    Args:
        max_histories: number of likeliest histories to keep after each step; None keeps all.

    Cost: k^(t+1) Kalman filters, or max_histories times k a step.
    Law: tests/agreement/test_enumeration_agrees_with_joint_gaussians.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel
    >>> modes = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 4.0)]
    >>> model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> exact = enumerate_modes(model, torch.tensor([[0.0], [9.0]]), Prior(torch.zeros(1), torch.eye(1)))
    >>> exact.histories[exact.log_probability.argmax()]  # the likeliest mode history
    tensor([1, 1, 1])
    """
    call = "enumerate_modes"
    check_model(call, model)
    k = model.modes
    parameters, y, observed = prepared(call, model, as_series(observations), validate=model.validate)
    if parameters.has is not None:
        problem = 'a model with components needs fill="zero" here, got fill="modes"'
        raise InputValueError(call, "model", problem, 'Build the model with fill="zero".')
    batch, steps = y.shape[:-2], y.shape[-2]
    if (max_histories is None and k ** (steps + 1) > MOST) or (max_histories is not None and max_histories < 1):
        condition = f"at most {MOST} histories can be enumerated, and max_histories must be at least 1"
        fact = f"{k}^{steps + 1} histories and max_histories={max_histories}"
        raise InputValueError(call, "histories", f"{condition}, got {fact}", "Pass max_histories=1000, for example.")
    m, P, log_w, log_likelihood = initial_state(call, model, prior, batch)
    histories = torch.arange(k, device=y.device).unsqueeze(-1).expand(*batch, k, 1)
    moves, pruned = [], []
    masks = [None] * steps if observed is None else observed.unbind(-2)
    for now, observation, mask in zip(parameters.each(steps), y.unbind(-2), masks, strict=True):
        branches = branch(now, histories[..., -1], m, P, log_w, observation, mask)
        moves.append(branches.moved)
        log_likelihood = log_likelihood + branches.moved.step_log_likelihood
        # Extend every history by every mode, and prune ---------------------------------------------------------------
        log_w = branches.log_weight.flatten(-2).log_softmax(-1)
        n = histories.shape[-2]
        newest = torch.arange(k, device=y.device).expand(*batch, n, k).unsqueeze(-1)
        longer = histories.unsqueeze(-2).expand(*batch, n, k, -1)
        histories = torch.cat((longer, newest), -1).flatten(-3, -2)
        m, P = branches.mean.flatten(-3, -2), branches.covariance.flatten(-4, -3)
        if max_histories is not None and n * k > max_histories:
            order = log_w.detach().argsort(-1, descending=True)
            best, rest = order[..., :max_histories], order[..., max_histories:]
            pruned.append(log_sum_exp(log_w.take_along_dim(rest, -1)))
            log_w = log_w.take_along_dim(best, -1)
            log_w = log_w.log_softmax(-1)
            m = m.take_along_dim(best.unsqueeze(-1), -2)
            P = P.take_along_dim(best[..., None, None], -3)
            histories = histories.take_along_dim(best.unsqueeze(-1), -2)
        else:
            pruned.append(torch.full_like(log_likelihood, -torch.inf))
    joined = Moved.joined(moves)
    if model.validate:
        check_densities(call, joined.failure, model.R)
    filtered = combined(joined, parameters, y, observed, log_likelihood)
    return Enumerated(filtered, histories, log_w, m, P, torch.stack(pruned, -1))


class Branches(NamedTuple):
    """Every history n extended by every mode: Gaussians, unnormalised log weights, and the moments of each mode."""

    log_weight: Float[Tensor, "*b n k"]
    mean: Float[Tensor, "*b n k s"]
    covariance: Float[Tensor, "*b n k s s"]
    moved: Moved


def branch(
    now: Parameters | NonlinearParameters,
    mode: Int[Tensor, "*b n"],
    mean: Float[Tensor, "*b n s"],
    covariance: Float[Tensor, "*b n s s"],
    log_weight: Float[Tensor, "*b n"],
    observation: Float[Tensor, "*b o"],
    observed: Bool[Tensor, "*b o"] | None,
) -> Branches:
    """Extend every history, given its last mode, by every mode: one transition and one observation."""
    k = now.transition.shape[-1]
    T = now.transition.expand(*mode.shape[:-1], k, k).take_along_dim(mode.unsqueeze(-1), -2)  # [*b, n, k]
    wide, log_w = now.by_history(), log_weight.unsqueeze(-1)
    before = wide.predict(mean.unsqueeze(-2), covariance.unsqueeze(-3))
    after = wide.update(
        *before, observation[..., None, None, :], None if observed is None else observed[..., None, None, :]
    )
    # Probabilities before and after the observation ------------------------------------------------------------------
    prior_weights = log_c, share_before = weigh(T, log_w)
    step = log_sum_exp((_log(T) + log_w + after.log_likelihood).flatten(-2))
    evidence = torch.where((step > -torch.inf)[..., None, None], after.log_likelihood, 0.0)
    log_v, share = weigh(T, log_w + evidence)
    moved = Moved(
        *collapse(share_before.mT, before.mean.movedim(-3, -2), before.covariance.movedim(-4, -3)),
        log_c,
        *collapse(share.mT, after.mean.movedim(-3, -2), after.covariance.movedim(-4, -3)),
        log_v.log_softmax(-1),
        likelihood_of_modes(T, log_w, after.log_likelihood, prior_weights),
        step,
        after.failure.amax(-2),
    )
    return Branches(_log(T) + log_w + evidence, after.mean, after.covariance, moved)


def _log(probability: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """Logarithm of probabilities, -inf without gradient at 0."""
    positive = probability > 0
    return torch.where(positive, probability, 1.0).log().masked_fill(~positive, -torch.inf)
