"""The exact filter: every history of modes, each with its own Kalman filter.

    p(x_t | y_1 ... y_t) = sum over histories (s_0 ... s_t) of  P(history | y_1 ... y_t) N(m_history, P_history)

There are k^(t+1) of them, which is why switching.py exists; for short series this is what it is measured by. Keeping
only the likeliest histories makes longer series possible, and says how much was thrown away.

Read next: switching.py (Gaussians that are merged instead), particle.py (histories that are drawn).
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

MOST = 1 << 20  # histories that are written down


class Enumerated(NamedTuple):
    """What is known after each step, and the histories at the last of them.

    Attributes:
        filtered: as of every filter; exact where nothing was pruned.
        histories: modes s_0 ... s_t of each history n.
        log_probability: of each history given all observations.
        mean: of the last state given a history.
        covariance: likewise.
        log_pruned: log of the probability that was thrown away at each step, -inf for nothing.
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
    """The law of the state by enumeration of mode histories. Arguments as of `imm`.

    Args:
        max_histories: how many histories to keep after each step, the likeliest; None for all.

    Cost: k^(t+1) Kalman filters, or max_histories times k in each step.
    Law: tests/agreement/test_enumeration_agrees_with_joint_gaussians.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel
    >>> modes = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 4.0)]
    >>> model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> found = enumerate_modes(model, torch.tensor([[0.0], [9.0]]), Prior(torch.zeros(1), torch.eye(1)))
    >>> found.histories[found.log_probability.argmax()]  # it moved all the time
    tensor([1, 1, 1])
    """
    call = "enumerate_modes"
    check_model(call, model)
    k = model.modes
    parameters, y, seen = prepared(call, model, as_series(observations), validate=model.validate)
    if parameters.has is not None:
        remedy = 'Pass a model with fill="zero", in which what a mode lacks is 0.'
        fact = 'components and fill="modes"'
        raise InputValueError(
            call, "model", f"model must say what a component is that a mode lacks, got {fact}", remedy
        )
    batch, steps = y.shape[:-2], y.shape[-2]
    if (max_histories is None and k ** (steps + 1) > MOST) or (max_histories is not None and max_histories < 1):
        condition = f"histories must be at most {MOST}, or max_histories at least 1"
        fact = f"{k}^{steps + 1} histories and max_histories={max_histories}"
        raise InputValueError(call, "histories", f"{condition}, got {fact}", "Pass max_histories=, how many to keep.")
    m, P, log_w, log_likelihood = initial_state(call, model, prior, batch)
    histories = torch.arange(k, device=y.device).unsqueeze(-1).expand(*batch, k, 1)
    moves, pruned = [], []
    looks = [None] * steps if seen is None else seen.unbind(-2)
    for now, observation, look in zip(parameters.each(steps), y.unbind(-2), looks, strict=True):
        branches = branch(now, histories[..., -1], m, P, log_w, observation, look)
        moves.append(branches.moved)
        log_likelihood = log_likelihood + branches.moved.step_log_likelihood
        # One Gaussian more for each of them, or the likeliest --------------------------------------------------------
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
    whole = Moved.joined(moves)
    if model.validate:
        check_densities(call, whole.failure)
    filtered = combined(whole, parameters, y, seen, log_likelihood)
    return Enumerated(filtered, histories, log_w, m, P, torch.stack(pruned, -1))


class Branches(NamedTuple):
    """Histories n, each gone on by every mode: Gaussians and log weights that need not sum to one; modes together."""

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
    seen: Bool[Tensor, "*b o"] | None,
) -> Branches:
    """One transition and one observation of every history, whose last mode is given, by every mode."""
    k = now.transition.shape[-1]
    T = now.transition.expand(*mode.shape[:-1], k, k).take_along_dim(mode.unsqueeze(-1), -2)  # [*b, n, k]
    wide, log_w = now.by_history(), log_weight.unsqueeze(-1)
    before = wide.predict(mean.unsqueeze(-2), covariance.unsqueeze(-3))
    after = wide.update(*before, observation[..., None, None, :], None if seen is None else seen[..., None, None, :])
    # Probabilities before and after the observation ------------------------------------------------------------------
    came = log_c, share_before = weigh(T, log_w)
    step = log_sum_exp((_log(T) + log_w + after.log_likelihood).flatten(-2))
    told = torch.where((step > -torch.inf)[..., None, None], after.log_likelihood, 0.0)
    log_v, share = weigh(T, log_w + told)
    moved = Moved(
        *collapse(share_before.mT, before.mean.movedim(-3, -2), before.covariance.movedim(-4, -3)),
        log_c,
        *collapse(share.mT, after.mean.movedim(-3, -2), after.covariance.movedim(-4, -3)),
        log_v.log_softmax(-1),
        likelihood_of_modes(T, log_w, after.log_likelihood, came),
        step,
        after.failure.amax(-2),
    )
    return Branches(_log(T) + log_w + told, after.mean, after.covariance, moved)


def _log(probability: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """log p, without a gradient at 0."""
    positive = probability > 0
    return torch.where(positive, probability, 1.0).log().masked_fill(~positive, -torch.inf)
