"""Detections of uncertain origin: update a target by several candidates and their association probabilities.

    a              0: none of the detections z_1 ... z_n belongs to the target; i: z_i does
    beta_a         P(a | all detections)                              of PDA [barshalom01], or the marginal one of JPDA
    p(x, s | all)  = sum_a beta_a p(x, s | a, z_a)                    p(x, s | 0): the prediction, without an update

Each association is an ordinary update. Their modes and Gaussians are then averaged:

    pi_j      = sum_a beta_a pi_{j|a}
    m_j, P_j  = collapse(beta_a pi_{j|a} / pi_j, m_{j|a}, P_{j|a})            moment matching, mode by mode

PDA: detections of the target have the density L_i = p(z_i | past) and appear with probability p; other detections are a
Poisson process of density lambda. With the gate probability g (1 without a gate):

    beta_i ∝ p L_i / lambda_i,   beta_0 ∝ 1 - p g,   log ratio = log(1 - p g + sum_i p L_i / lambda_i)

Read next: switching.py (SwitchingFilter.update), clutter.py (one detection, as modes of a model).
"""

from typing import Any, NamedTuple

import torch

from ..._errors import InputValueError, check_floats, check_normalized, has_values, present, shape_of
from ..._typing import Float, Tensor
from ..models.nonlinear_model import NonlinearModel, NonlinearParameters
from ..models.switching_model import ENDS, Parameters, SwitchingModel
from ..moment_matching import GaussianMoments, collapse, weigh
from ..results import FilterState, Moved, PredictedBranches

StepParameters = Parameters | NonlinearParameters


class Association(NamedTuple):
    """Association probabilities of a target, none first, and the log likelihood ratio of a target against clutter."""

    probability: Float[Tensor, "*b n1"]
    log_ratio: Float[Tensor, "*b"]


def association_probability(
    log_density: Float[Tensor, "*b n"],
    *,
    detection_probability: float,
    log_clutter_density: float | Float[Tensor, "*#c"],
    gate_probability: float = 1.0,
) -> Association:
    """Return the association probabilities of probabilistic data association, [*b, 1 + n].

    Args:
        log_density: predicted log density of each detection (`SwitchingFilter.log_density`); -inf or NaN for none.
        detection_probability: probability p that a target is detected.
        log_clutter_density: log of the density lambda of false detections, in the units of an observation.
        gate_probability: probability g that a detection of the target lies in its gate.

    The log ratio is log p(detections | target) - log p(detections | no target): the score of a track.

    >>> import torch
    >>> association_probability(torch.zeros(1), detection_probability=0.5, log_clutter_density=0.0).probability
    tensor([0.5000, 0.5000])
    """
    call = "association_probability"
    check_floats(call, log_density=log_density)
    for name, p in (("detection_probability", detection_probability), ("gate_probability", gate_probability)):
        if not 0 <= p <= 1:
            raise InputValueError(call, name, f"{name} must be from 0 to 1, got {p}", "Pass such as 0.9.")
    detected = log_density.new_tensor(detection_probability)
    ratio = torch.where(log_density.isnan(), -torch.inf, log_density + detected.log() - log_clutter_density)
    missed = (1 - detected * gate_probability).log().expand(ratio.shape[:-1]).unsqueeze(-1)
    joint = torch.cat((missed, ratio), -1)
    total = joint.logsumexp(-1)
    if has_values(total) and bool((total == -torch.inf).any()):
        problem = "no association is possible: the target is always detected, and no detection has a density"
        raise InputValueError(call, "detection_probability", problem, "Pass a detection probability below 1.")
    return Association((joint - total.unsqueeze(-1)).exp(), total)


def hypotheses(
    now: StepParameters, branches: PredictedBranches, detections: Tensor, observed: Tensor | None, *, none: bool = True
) -> tuple[StepParameters, PredictedBranches, Tensor, Tensor | None]:
    """Expand the arguments of an update to one hypothesis for each detection, after one of no detection."""
    at = branches.log_likelihood.ndim
    if none:
        blank = detections.new_zeros(*detections.shape[:-2], 1, detections.shape[-1])
        mask = torch.ones_like(detections, dtype=torch.bool) if observed is None else observed
        observed = torch.cat((torch.zeros_like(blank, dtype=torch.bool), mask), -2)
        detections = torch.cat((blank, detections), -2)
    n = detections.shape[-2]
    each = PredictedBranches(*(t.unsqueeze(at).expand(*t.shape[:at], n, *t.shape[at:]) for t in branches))
    fields = {name: t for name, t in now._asdict().items() if isinstance(t, Tensor) and name in ENDS}
    apart: dict[str, Any] = {
        name: t.unsqueeze(-len(ENDS[name]) - 1) for name, t in fields.items() if t.ndim > len(ENDS[name])
    }
    return now._replace(**apart), each, detections, observed


def associated(
    states: FilterState,
    moved: Moved,
    before: PredictedBranches,
    probability: Tensor,
    step_log_likelihood: Tensor | None,
) -> tuple[FilterState, Moved]:
    """Average the states [*b, a, ...] of all associations a, with moment matching."""
    at = before.log_likelihood.ndim
    log_w, shares = weigh(probability.unsqueeze(-1), states.log_probability)
    if states.mean.shape[-2] != log_w.shape[-1]:  # gpb1: one Gaussian for all modes
        shares = probability.unsqueeze(-1)
    mean, covariance = _averaged(shares, states.mean, states.covariance)
    log_pi, mode_shares = weigh(probability.unsqueeze(-1), moved.log_probability)
    by_mode = _averaged(mode_shares, moved.mean, moved.covariance)
    log_w, log_pi, total = log_w.log_softmax(-1), log_pi.log_softmax(-1), before.log_likelihood
    step = torch.full_like(total, torch.nan) if step_log_likelihood is None else step_log_likelihood
    likelihood = step.unsqueeze(-1) + log_pi - before.log_mode_probability  # Bayes: pi_j = c_j L_j / p
    result = Moved(*before[:3], *by_mode, log_pi, likelihood, step, moved.failure.amax(at))
    total = total if step_log_likelihood is None else total + step
    return FilterState(mean, covariance, log_w, total), result


def average_innovation(
    innovation: Float[Tensor, "*#b a o"], probability: Float[Tensor, "*#b a"]
) -> Float[Tensor, "*b o"]:
    """Innovation averaged over associations, 0 for none: sum_i beta_i v_i; NaN where no detection has a component."""
    gone = innovation.isnan()
    v = torch.where(gone, 0.0, innovation) * probability.unsqueeze(-1)
    return v.sum(-2).masked_fill(gone.all(-2), torch.nan)


def _averaged(shares: Tensor, mean: Tensor, covariance: Tensor) -> GaussianMoments:
    """Collapse Gaussians [*b, a, g, s] over a, with shares [*b, a, g]."""
    return collapse(shares.mT, mean.movedim(-3, -2), covariance.movedim(-4, -3))


def check_detections(call: str, model: SwitchingModel | NonlinearModel, detections: Tensor, batch: torch.Size) -> None:
    """Check that detections are [*b, n, o] for the targets of a predicted state."""
    o = model.observation_size
    check_floats(call, observation=detections, model=model.R)
    if detections.ndim != len(batch) + 2 or detections.shape != (*batch, detections.shape[-2], o):
        condition = f"detections must be [{', '.join(map(str, (*batch, 'n', o)))}], n for each target"
        remedy = "Put targets first; fill up with NaN where a target has fewer."
        raise InputValueError(call, "observation", f"{condition}, got shape {shape_of(detections)}", remedy)


def check_association(
    call: str,
    model: SwitchingModel | NonlinearModel,
    association: Tensor,
    detections: Tensor,
    batch: torch.Size,
    step_log_likelihood: Tensor | None,
) -> None:
    """Check association probabilities of n detections: [*b, 1 + n], nonnegative, with sum 1, 0 for missing ones."""
    check_detections(call, model, detections, batch)
    check_floats(call, association=association, model=model.R, **present(step_log_likelihood=step_log_likelihood))
    n = detections.shape[-2]
    if association.shape != (*batch, 1 + n):
        condition = f"association must be {(*batch, 1 + n)}: the probability of none, then of each of n={n} detections"
        raise InputValueError(
            call, "association", f"{condition}, got shape {shape_of(association)}", "Put the probability of none first."
        )
    if step_log_likelihood is not None and step_log_likelihood.shape != batch:
        condition = f"step_log_likelihood must be {tuple(batch)}, one for each target"
        fact = f"shape {shape_of(step_log_likelihood)}"
        raise InputValueError(call, "step_log_likelihood", f"{condition}, got {fact}", "Pass association.log_ratio.")
    if not model.validate or not has_values(association, detections):
        return
    if bool((association < 0).any()) or bool(association.isnan().any()):
        problem = "association must be nonnegative, but it has negative entries or NaN"
        raise InputValueError(call, "association", problem, "Pass probabilities, not logarithms.")
    remedy = "Divide by the sum, the probability of none included."
    check_normalized(call, "association", association.sum(-1).log(), remedy)
    absent = detections.isnan().all(-1) & (association[..., 1:] > 0)
    if bool(absent.any()):
        problem = f"missing detections must have probability 0, but {int(absent.sum())} have more"
        raise InputValueError(call, "association", problem, "Add their probability to that of none.")
