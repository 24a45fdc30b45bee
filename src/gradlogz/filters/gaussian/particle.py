"""The Rao-Blackwellised particle filter: histories of modes are drawn, their states are known exactly.

    log v_nj = log w_n + log T_{s_n j} + log L_nj          every particle n by every mode j, each a Kalman filter
    s_n' ∝ v_n.,   w_n' ∝ sum_j v_nj                       one mode is drawn for each: the best proposal there is
    p(y_t | past) ≈ sum_nj v_nj                            the product over time has no bias        [chen00] [doucet00]

Where few particles carry the weight, n of the n k branches are drawn anew, systematically and with equal weights. It is
the exact filter with histories kept at random where enumeration.py keeps the likeliest: more particles come as near to
the exact law as one likes, with errors that fall with the root of their number.

Read next: enumeration.py (all histories), ../../measures/annealing.py (resampling, and particles of other laws).
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
    """What is known after each step, and the particles at the last of them.

    Attributes:
        filtered: as of every filter, from all branches of all particles; exp(log_likelihood) has no bias.
        histories: modes s_0 ... s_t of each particle n, along its ancestors.
        log_probability: of each particle given all observations: log weights.
        mean: of the last state given a history.
        covariance: likewise.
        effective_sample_size: 1 / sum w², of the weights at each step before any were drawn anew.
        resampled: where they were.
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
    """The law of the state by drawing mode histories. Arguments as of `imm`.

    Args:
        particles: how many histories to keep.
        threshold: particles are drawn anew where the effective sample size is below this share of them; 1 for always,
            0 for never.
        generator: of the draws.

    Derivatives are those with the draws held, not those of their average. Cost: particles times k filters a step.
    Law: tests/agreement/test_particles_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel, enumerate_modes
    >>> modes = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 4.0)]
    >>> model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> y, prior = torch.tensor([[0.0], [4.0], [9.0]]), Prior(torch.zeros(1), torch.eye(1))
    >>> found = rao_blackwell_filter(model, y, prior, particles=2000, generator=torch.Generator().manual_seed(0))
    >>> bool((found.filtered.mean - enumerate_modes(model, y, prior).filtered.mean).abs().amax() < 0.1)
    True
    """
    call = "rao_blackwell_filter"
    check_model(call, model)
    k, n = model.modes, particles
    if n < 1 or not 0 <= threshold <= 1:
        condition = "particles must be at least 1 and threshold in [0, 1]"
        remedy = "A share of 0.5 is usual."
        raise InputValueError(call, "particles", f"{condition}, got {particles} and {threshold}", remedy)
    parameters, y, seen = prepared(call, model, as_series(observations), validate=model.validate)
    if parameters.has is not None:
        remedy = 'Pass a model with fill="zero", in which what a mode lacks is 0.'
        fact = 'components and fill="modes"'
        raise InputValueError(
            call, "model", f"model must say what a component is that a mode lacks, got {fact}", remedy
        )
    batch, steps = y.shape[:-2], y.shape[-2]
    m, P, log_pi, log_likelihood = initial_state(call, model, prior, batch)
    mode = resample_ancestors(log_pi, n, generator=generator)
    m, P = m.take_along_dim(mode.unsqueeze(-1), -2), P.take_along_dim(mode[..., None, None], -3)
    log_w = m.new_zeros(*batch, n).log_softmax(-1)
    moves, modes, parents, sizes, turns = [], [mode], [], [], []
    looks = [None] * steps if seen is None else seen.unbind(-2)
    for now, observation, look in zip(parameters.each(steps), y.unbind(-2), looks, strict=True):
        branches = branch(now, mode, m, P, log_w, observation, look)
        moves.append(branches.moved)
        log_likelihood = log_likelihood + branches.moved.step_log_likelihood
        # Draw a mode for each particle, or branches anew -------------------------------------------------------------
        log_v = branches.log_weight
        log_w = log_sum_exp(log_v)
        sizes.append(effective_sample_size(log_w))
        due = sizes[-1] < threshold * n
        turns.append(due)
        alive = (log_w > -torch.inf).unsqueeze(-1)
        drawn = resample_ancestors(torch.where(alive, log_v, 0.0), 1, generator=generator).squeeze(-1)
        anew = resample_ancestors(log_v.flatten(-2), n, generator=generator)
        index = torch.where(due.unsqueeze(-1), anew, torch.arange(n, device=y.device) * k + drawn)
        log_w = torch.where(due.unsqueeze(-1), 0.0, log_w).log_softmax(-1)
        mode = index % k
        m = branches.mean.flatten(-3, -2).take_along_dim(index.unsqueeze(-1), -2)
        P = branches.covariance.flatten(-4, -3).take_along_dim(index[..., None, None], -3)
        modes.append(mode)
        parents.append(index // k)
    whole = Moved.joined(moves)
    if model.validate:
        check_densities(call, whole.failure)
    filtered = combined(whole, parameters, y, seen, log_likelihood)
    histories = _traced(modes, parents)
    return Sampled(filtered, histories, log_w, m, P, torch.stack(sizes, -1), torch.stack(turns, -1))


def _traced(modes: list[Tensor], parents: list[Tensor]) -> Int[Tensor, "*b n t1"]:
    """The modes of every particle and of those it came from."""
    line = torch.arange(modes[-1].shape[-1], device=modes[-1].device).expand_as(modes[-1])
    traced = [modes[-1]]
    for mode, parent in zip(reversed(modes[:-1]), reversed(parents), strict=True):
        line = parent.take_along_dim(line, -1)
        traced.append(mode.take_along_dim(line, -1))
    return torch.stack(traced[::-1], -1)
