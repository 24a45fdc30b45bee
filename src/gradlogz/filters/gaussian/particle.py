"""The Rao-Blackwellised particle filter: mode histories are sampled, and states are exact given a history.

    log v_nj = log w_n + log T_{s_n j} + log L_nj          every particle n by every mode j, each a Kalman filter
    s_n' ∝ v_n.,   w_n' ∝ sum_j v_nj                       one mode is sampled for each: the optimal proposal
    p(y_t | past) ≈ sum_nj v_nj                            the product over time is unbiased        [chen00] [doucet00]

If the effective sample size is low, n of the n k branches are resampled, systematically and with equal weights. The
filter keeps random histories where enumeration.py keeps the likeliest; it converges to the exact filter, with errors
that fall with the square root of the number of particles.

Read next: enumeration.py (all histories), ../../measures/annealing.py (resampling).
"""

from typing import NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError
from ..._typing import Bool, Float, Int, Tensor
from ...measures.annealing import effective_sample_size, resample_ancestors
from ...special.log_domain import log_sum_exp
from ..models.nonlinear_model import NonlinearModel
from ..models.switching_model import SwitchingModel
from ..prior_and_series import Prior, Series, as_series
from ..results import Filtered, Moved, combined
from ..validation import check_densities, check_model, initial_state, prepared
from .enumeration import branch


class Sampled(NamedTuple):
    """Filtered distribution of each step, and the particles after the last one.

    Attributes:
        filtered: fields common to all filters, from all branches of all particles; exp(log_likelihood) is unbiased.
        histories: modes s_0 ... s_t of each particle n and its ancestors.
        log_probability: normalised log weight of each particle.
        mean: mean of the last state given each history.
        covariance: covariance of the last state given each history.
        effective_sample_size: 1 / sum w² at each step, before resampling.
        resampled: True at steps where particles were resampled.
    """

    filtered: Filtered
    histories: Int[Tensor, "*b n t1"]
    log_probability: Float[Tensor, "*b n"]
    mean: Float[Tensor, "*b n s"]
    covariance: Float[Tensor, "*b n s s"]
    effective_sample_size: Float[Tensor, "*b t"]
    resampled: Bool[Tensor, "*b t"]


@without_autocast
def rao_blackwell_filter(
    model: SwitchingModel | NonlinearModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    particles: int = 256,
    threshold: float = 0.5,
    generator: torch.Generator | None = None,
) -> Sampled:
    """Filter with sampled mode histories. Takes `model`, `observations` and `prior` as `imm` does.

    Args:
        particles: number of particles.
        threshold: resample if the effective sample size is below this share of the particles; 1 resamples at every
            step, 0 never.
        generator: random number generator.

    Derivatives are taken with the samples held fixed; they are not derivatives of the expectation. Cost: particles
    times k Kalman filters a step.
    Law: tests/agreement/test_particles_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel, enumerate_modes
    >>> modes = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 4.0)]
    >>> model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> y, prior = torch.tensor([[0.0], [4.0], [9.0]]), Prior(torch.zeros(1), torch.eye(1))
    >>> sampled = rao_blackwell_filter(model, y, prior, particles=2000, generator=torch.Generator().manual_seed(0))
    >>> bool((sampled.filtered.mean - enumerate_modes(model, y, prior).filtered.mean).abs().amax() < 0.1)
    True
    """
    call = "rao_blackwell_filter"
    check_model(call, model)
    k, n = model.modes, particles
    if n < 1 or not 0 <= threshold <= 1:
        condition = "particles must be at least 1 and threshold in [0, 1]"
        fact, remedy = (
            f"particles={particles} and threshold={threshold}",
            "Use threshold=0.5 and a few hundred particles.",
        )
        raise InputValueError(call, "particles", f"{condition}, got {fact}", remedy)
    parameters, y, observed = prepared(call, model, as_series(observations), validate=model.validate)
    if parameters.has is not None:
        problem = 'a model with components needs fill="zero" here, got fill="modes"'
        raise InputValueError(call, "model", problem, 'Build the model with fill="zero".')
    batch, steps = y.shape[:-2], y.shape[-2]
    m, P, log_pi, log_likelihood = initial_state(call, model, prior, batch)
    mode = resample_ancestors(log_pi, n, generator=generator)
    m, P = m.take_along_dim(mode.unsqueeze(-1), -2), P.take_along_dim(mode[..., None, None], -3)
    log_w = m.new_zeros(*batch, n).log_softmax(-1)
    moves, modes, parents, sizes, resampled = [], [mode], [], [], []
    masks = [None] * steps if observed is None else observed.unbind(-2)
    for now, observation, mask in zip(parameters.each(steps), y.unbind(-2), masks, strict=True):
        branches = branch(now, mode, m, P, log_w, observation, mask)
        moves.append(branches.moved)
        log_likelihood = log_likelihood + branches.moved.step_log_likelihood
        # Sample a mode for each particle, or resample among all branches ---------------------------------------------
        log_v = branches.log_weight
        log_w = log_sum_exp(log_v)
        sizes.append(effective_sample_size(log_w))
        resamples = sizes[-1] < threshold * n
        resampled.append(resamples)
        alive = (log_w > -torch.inf).unsqueeze(-1)
        drawn = resample_ancestors(torch.where(alive, log_v, 0.0), 1, generator=generator).squeeze(-1)
        resampled_index = resample_ancestors(log_v.flatten(-2), n, generator=generator)
        index = torch.where(resamples.unsqueeze(-1), resampled_index, torch.arange(n, device=y.device) * k + drawn)
        log_w = torch.where(resamples.unsqueeze(-1), 0.0, log_w).log_softmax(-1)
        mode = index % k
        m = branches.mean.flatten(-3, -2).take_along_dim(index.unsqueeze(-1), -2)
        P = branches.covariance.flatten(-4, -3).take_along_dim(index[..., None, None], -3)
        modes.append(mode)
        parents.append(index // k)
    joined = Moved.joined(moves)
    if model.validate:
        check_densities(call, joined.failure, model.R)
    filtered = combined(joined, parameters, y, observed, log_likelihood)
    histories = _ancestral_histories(modes, parents)
    return Sampled(filtered, histories, log_w, m, P, torch.stack(sizes, -1), torch.stack(resampled, -1))


def _ancestral_histories(modes: list[Tensor], parents: list[Tensor]) -> Int[Tensor, "*b n t1"]:
    """Modes of every particle and its ancestors, [*b, n, 1 + t]."""
    line = torch.arange(modes[-1].shape[-1], device=modes[-1].device).expand_as(modes[-1])
    history = [modes[-1]]
    for mode, parent in zip(reversed(modes[:-1]), reversed(parents), strict=True):
        line = parent.take_along_dim(line, -1)
        history.append(mode.take_along_dim(line, -1))
    return torch.stack(history[::-1], -1)
