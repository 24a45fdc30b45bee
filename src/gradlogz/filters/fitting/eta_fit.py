"""Natural parameters of modes whose transitions attend to the state, by maximum likelihood.

    eta = argmax sum over series of log p(y_1 ... y_T; eta)      L-BFGS on the log likelihood of an attentive filter

Only differences of the eta_j enter the transition probabilities, so that the estimate has sum_j eta_j = 0.

Read next: ../gaussian/attentive_switching.py (the filters), learning.py (all other parameters of a model).
"""

from typing import Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError
from ..._typing import Float, Tensor
from ..gaussian.attentive_switching import attentive_gpb1, attentive_gpb2, attentive_imm
from ..models.switching_model import SwitchingModel
from ..prior_and_series import Prior, Series, as_series

FILTERS = {"gpb1": attentive_gpb1, "gpb2": attentive_gpb2, "imm": attentive_imm}


class FittedEta(NamedTuple):
    """Learned natural parameters of the modes.

    Attributes:
        eta: natural parameters with sum 0 over modes.
        log_likelihood: log likelihood of all series at eta.
        history: log likelihood before each iteration and at the end; the first is that of eta = 0, the plain filter.
        converged: whether the last iteration changed the log likelihood by less than the tolerance.
    """

    eta: Float[Tensor, "k s"]
    log_likelihood: Float[Tensor, ""]
    history: Float[Tensor, "n"]
    converged: bool


@without_autocast
def fit_eta(
    model: SwitchingModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    method: Literal["gpb1", "imm", "gpb2"] = "gpb2",
    max_iterations: int = 100,
    tolerance: float = 1e-7,
) -> FittedEta:
    """Fit the natural parameters of an attentive filter by gradient ascent (L-BFGS) on its log likelihood.

    Args:
        model: the switching system; its parameters keep their values.
        observations: all series, as in `imm`.
        prior: distribution at time 0.
        method: the filter, `attentive_gpb1`, `attentive_imm` or `attentive_gpb2`.
        max_iterations: maximum number of iterations of ten L-BFGS steps.
        tolerance: convergence threshold of an iteration, in nats per time step.

    The start is eta = 0. Cost of a step: one or two passes of the filter and its gradient over every series.
    Law: tests/laws/test_transitions_attend_to_the_state.py.
    """
    call = "fit_eta"
    if method not in FILTERS or max_iterations < 1:
        condition = f"method must be one of {', '.join(FILTERS)} and max_iterations at least 1"
        fact = f"method={method!r} and max_iterations={max_iterations}"
        raise InputValueError(call, "method", f"{condition}, got {fact}", 'Use "gpb2" for accuracy, "imm" for speed.')
    scale = as_series(observations).observations.shape[:-1].numel()
    eta = torch.zeros(model.modes, model.state_size, dtype=model.F.dtype, device=model.F.device, requires_grad=True)
    # Ten steps an iteration: with single steps torch's line search restarts each time and makes no progress.
    ascent = torch.optim.LBFGS([eta], max_iter=10, history_size=20, line_search_fn="strong_wolfe")

    def log_likelihood() -> Tensor:
        return FILTERS[method](model, observations, prior, eta=eta - eta.mean(0)).log_likelihood.sum()

    def loss() -> float:
        (gradient,) = torch.autograd.grad(value := -log_likelihood() / scale, eta)
        eta.grad = gradient
        return float(value.detach())

    history: list[float] = []
    converged = False
    for _ in range(max_iterations):
        history.append(-float(ascent.step(loss)) * scale)  # type: ignore[no-untyped-call]
        converged = len(history) > 1 and abs(history[-1] - history[-2]) <= tolerance * scale
        if converged:
            break
    with torch.no_grad():
        end = log_likelihood()
        return FittedEta(eta - eta.mean(0), end, end.new_tensor([*history, float(end)]), converged)
