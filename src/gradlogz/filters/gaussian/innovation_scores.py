"""Standard normal scores of innovations, exact for a mixture of modes.

    p(y_t | past)   = sum_j c_j N(y_t; y_j, S_j)                   predicted by a switching filter; c_j: mode j
    u_i             = P(Y_i <= y_i | Y_1 = y_1 ... Y_(i-1) = y_(i-1), past)               [rosenblatt52]
    z_i             = Phi^-1(u_i)                                   independent N(0, 1) if the model is right
    |z|²            chi-square; for one mode v^T S^-1 v, the NIS

The NIS of all modes combined is chi-square for one mode only. A mixture of a narrow mode and a wide one has the same
mean NIS but far more small and large values, so that its NIS leaves the band of a correct filter; |z|² does not.

Read next: consistency.py (NIS and NEES).
"""

import math

import torch

from ..._errors import InputValueError
from ..._typing import Float, Tensor
from ..results import Filtered

NEWTON = 3  # steps where a tail probability underflows; each doubles the digits


def innovation_scores(filtered: Filtered, *, joint: bool = True) -> Float[Tensor, "*b o"]:
    """Return scores z of the observations that are standard normal if the model is right; NaN where not observed.

    Args:
        filtered: result of a switching filter; gpb2 and deeper filters are taken as one Gaussian for each mode.
        joint: True for independent scores, each component given those before it; False for each component alone.

    Law: tests/laws/test_innovation_scores_are_standard_normal.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel, imm
    >>> modes = [KalmanModel(*torch.tensor([[[1.0]], [[0.0]], [[1.0]], [[r]]])) for r in (1.0, 100.0)]
    >>> model = SwitchingModel.of(modes, transition=torch.full((2, 2), 0.5))
    >>> filtered = imm(model, torch.tensor([[15.0]]), Prior(torch.zeros(1), torch.zeros(1, 1)))
    >>> innovation_scores(filtered)  # half of the observations have a deviation of 10
    tensor([[1.8330]])
    """
    v, S, log_c = filtered.mode_innovation, filtered.mode_innovation_covariance, filtered.predicted_log_mode_probability
    if v is None or S is None or log_c is None:
        names = "mode_innovation, mode_innovation_covariance and predicted_log_mode_probability"
        remedy = "Name them in fields= of the filter, or drop fields=."
        raise InputValueError("innovation_scores", "filtered", f"filtered needs {names}", remedy)
    observed = ~v.isnan()
    v = v.where(observed, 0.0)
    variance = S.diagonal(dim1=-2, dim2=-1)
    if joint:
        both = observed.unsqueeze(-1) & observed.unsqueeze(-2)
        L, failure = torch.linalg.cholesky_ex(
            torch.where(both, S, torch.eye(S.shape[-1], dtype=S.dtype, device=S.device))
        )
        if bool((failure != 0).any()):
            problem = "filtered has a singular covariance of an innovation"
            raise InputValueError("innovation_scores", "filtered", problem, "Give R a small positive diagonal.")
        x = torch.linalg.solve_triangular(L, v.unsqueeze(-1), upper=False).squeeze(-1)
        # The weight of a mode, given the components so far
        log_density = torch.where(observed, -x.square() / 2 - L.diagonal(dim1=-2, dim2=-1).log(), 0.0)
        before = log_density.cumsum(-1) - log_density
        log_w = log_c.unsqueeze(-1) + before
    else:
        x = v / variance.sqrt()
        log_w = log_c.unsqueeze(-1).expand_as(x)
    log_w = log_w.log_softmax(-2)
    below, above = ((log_w + torch.special.log_ndtr(x * sign)).logsumexp(-2) for sign in (1, -1))
    z = torch.where(below < above, -_score(below), _score(above))
    return z.masked_fill(~observed.any(-2), math.nan)


def _score(log_tail: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """z >= 0 with log P(Z > z) = log_tail <= log 1/2, also where the probability underflows."""
    least = math.log(torch.finfo(log_tail.dtype).tiny) + 1  # exp underflows below
    z = -torch.special.ndtri(log_tail.clamp(min=least).exp())
    far = log_tail < least
    if bool(far.any()):
        goal = log_tail[far]
        start = (-2 * goal - (2 * math.pi * -2 * goal).log()).sqrt()
        for _ in range(NEWTON):  # the slope of log P(Z > z) is -(z + 1/z) up to 1/z³
            start = start + (torch.special.log_ndtr(-start) - goal) / (start + 1 / start)
        z = z.masked_scatter(far, start)
    return z
