"""Smoothers of systems that switch: the law of every state and mode given observations before and after it.

    p(x_t, s_t | y_1 ... y_T)          all observations: from the last time back to the first
    p(x_t, s_t | y_1 ... y_{t+lag})    a few after its own: all times at once

Read next: backward_messages.py (the step), kim_smoother.py (the published one), switching.py (the filters),
enumeration.py (exactly).
"""

from collections.abc import Callable
from itertools import starmap
from typing import Any, Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError
from ..._typing import Float, Tensor
from ...special.log_domain import log_sum_exp
from ..models.nonlinear_model import NonlinearModel, NonlinearParameters
from ..models.switching_model import ENDS, Parameters, SwitchingModel
from ..moment_matching import GaussianMoments, mix, to_one, weigh
from ..prior_and_series import Prior, Series, as_series
from ..results import Filtered
from ..validation import check_model, initial_state, prepared
from . import backward_messages, kim_smoother
from .backward_messages import FilteredModes, SmoothedModes, SmoothingStep, combine_pairs, pair_modes
from .enumeration import Enumerated, enumerate_modes
from .switching import SwitchingFilter

Method = Literal["imm", "gpb2", "kim", "enumerate"]


class Smoothed(NamedTuple):
    """The law of the states given observations before and after them; *b holds targets and then time t = 1 ... T.

    What learning by expectation and maximisation needs is all here: the sums over t of exp(log_pair_probability) count
    transitions, and the law of (x_t, x_{t-1}) given s_t = j has the mean (mode_mean, previous_mean) and the covariance
    [[mode_covariance, lag_covariance], [lag_covariance^T, previous_covariance]], which is that of one mixture.

    Attributes:
        mean: of the state, all modes combined.
        covariance: of the state, with the spread between modes.
        mode_mean: given the mode of this time; of a mode that is impossible, what it would be.
        mode_covariance: likewise.
        log_mode_probability: of each mode, -inf where it is impossible.
        log_pair_probability: log P(s_{t-1} = i, s_t = j | observations), [i, j].
        previous_mean: of x_{t-1} given s_t = j.
        previous_covariance: likewise.
        lag_covariance: of x_t with x_{t-1} given s_t = j.
        initial_mode_mean: of x_0 given s_0; without time, as the other two of time 0.
        initial_mode_covariance: likewise.
        initial_log_mode_probability: of s_0.
        filtered: what was known going forward, with the log likelihood.
    """

    mean: Float[Tensor, "*b s"]
    covariance: Float[Tensor, "*b s s"]
    mode_mean: Float[Tensor, "*b k s"]
    mode_covariance: Float[Tensor, "*b k s s"]
    log_mode_probability: Float[Tensor, "*b k"]
    log_pair_probability: Float[Tensor, "*b k k"]
    previous_mean: Float[Tensor, "*b k s"]
    previous_covariance: Float[Tensor, "*b k s s"]
    lag_covariance: Float[Tensor, "*b k s s"]
    initial_mode_mean: Float[Tensor, "*c k s"]
    initial_mode_covariance: Float[Tensor, "*c k s s"]
    initial_log_mode_probability: Float[Tensor, "*c k"]
    filtered: Filtered


@without_autocast
def smooth(
    model: SwitchingModel | NonlinearModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    method: Method = "gpb2",
    lag: int | None = None,
    max_histories: int | None = None,
) -> Smoothed:
    """p(x_t, s_t | y_1 ... y_T), or p(x_t, s_t | y_1 ... y_{t+lag}), of a Gaussian for each mode.

    Backward messages are evaluated for each pair of modes (backward_messages.py). With one mode, with modes that never
    switch, without observations, and of x_0 and x_1 given y_1, "imm" and "gpb2" are exact. Elsewhere what is
    approximated is

        imm     going forward, what `imm` does; going back, p(y_t+1 ... y_T | x_t, s_t = j) is the exponential of the
                quadratic function of x_t that gives N(m_j, P_j) the right mean and covariance
        gpb2    the same, with what `gpb2` does going forward
        kim     as gpb2 going forward; going back, given s_t+1 and all observations, x_t+1 does not know s_t, and given
                s_t+1 and past observations, s_t does not know later ones: the published smoother [kim94]
        enumerate    nothing: every history of modes, or the `max_histories` likeliest

    Functions of a NonlinearModel are lines here, as in its filters, along the filtered Gaussians: the extended
    smoother, or the unscented one [sarkka08]. What is exact is so for those lines, but for "imm" without observations:
    its filter moves mixtures, and lines through a mixture are others than those through its parts.

    A quadratic that grows would be no likelihood of every pair: where later observations leave a mode less certain than
    it was, the information kept is the average of the modes of the next step, without the spread between them.

    What is reported at time t is the collapse of its pairs. For "imm" the last time is therefore a little nearer to the
    exact law than the filter is; for "gpb2" it is the filter.

    Args:
        method: "imm", "gpb2", "kim" or "enumerate".
        lag: how many observations after its own each state is given; None for all. All times are smoothed at once, in
            lag + 1 steps that do not depend on each other's.
        max_histories: of "enumerate", how many histories to keep, the likeliest; None for all.

    The other arguments are those of `imm`. Cost: k² steps of a Kalman filter and as many solutions of s equations a
    step, back and forth. Covariances are what is left of the filtered ones: a prior more than 1e10 times wider than
    what is observed (1e4 in float32) costs the first times their digits. On a GPU no step waits for it
    if the model has validate=False, but those of "kim", which ask for eigenvalues.
    Law: tests/agreement/test_smoothers_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel, gpb2
    >>> still, moving = (KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 9.0))
    >>> model = SwitchingModel.of([still, moving], transition=torch.tensor([[0.9, 0.1], [0.9, 0.1]]))
    >>> y, prior = torch.tensor([[0.0], [0.0], [9.0], [9.0], [9.0]]), Prior(torch.zeros(1), torch.eye(1))
    >>> found = smooth(model, y, prior)
    >>> found.log_mode_probability.argmax(-1)  # it moved once
    tensor([0, 0, 1, 0, 0])
    >>> found.filtered.log_likelihood == gpb2(model, y, prior).log_likelihood
    tensor(True)
    """
    call = "smooth"
    check_model(call, model)
    if method not in ("imm", "gpb2", "kim", "enumerate"):
        condition = 'method must be "imm", "gpb2", "kim" or "enumerate"'
        remedy = "gpb2 is the nearest to exact, imm needs the least."
        raise InputValueError(call, "method", f"{condition}, got {method!r}", remedy)
    enumerated = method == "enumerate"
    if (lag is not None and (lag < 0 or enumerated)) or (max_histories is not None and not enumerated):
        condition = 'lag must be 0 or more, for "imm", "gpb2" and "kim"; and max_histories be for "enumerate" alone'
        fact, remedy = f"lag={lag} and max_histories={max_histories} for {method!r}", "None gives all observations."
        raise InputValueError(call, "lag", f"{condition}, got {fact}", remedy)
    series = as_series(observations)
    parameters, y, seen = prepared(call, model, series, validate=model.validate)
    m, P, log_pi, _ = initial_state(call, model, prior, y.shape[:-2])
    if enumerated:
        found = enumerate_modes(model, series, prior, max_histories=max_histories)
        return _of_histories(found, parameters, y, seen, GaussianMoments(m, P))
    chosen = SwitchingFilter(model) if method == "imm" else SwitchingFilter(model, "gpb")
    filtered = chosen.filter(series, prior)
    known = FilteredModes(
        torch.cat((m.unsqueeze(-3), filtered.mode_mean), -3),
        torch.cat((P.unsqueeze(-4), filtered.mode_covariance), -4),
        torch.cat((log_pi.unsqueeze(-2), filtered.log_mode_probability), -2),
        torch.cat((P.unsqueeze(-4), filtered.predicted_mode_covariance), -4).diagonal(dim1=-2, dim2=-1),
    )
    steps = SmoothingStep(parameters, y, seen, filtered.step_log_likelihood > -torch.inf)
    recursion = KIM if method == "kim" else MESSAGES
    if lag is None:
        return _interval(recursion, steps, known, filtered)
    return _fixed_lag(recursion, steps, known, filtered, lag)


class BackwardRecursion(NamedTuple):
    """The backward recursion of a smoother (backward_messages.py, kim_smoother.py): at the end, a step, time 0."""

    final_message: Callable[..., Any]
    pair_message: Callable[..., Any]
    smoothed_pairs: Callable[..., GaussianMoments]
    propagate: Callable[..., Any]
    smoothed_initial: Callable[..., tuple[GaussianMoments, Tensor]]


MESSAGES = BackwardRecursion(*(getattr(backward_messages, name) for name in BackwardRecursion._fields))
KIM = BackwardRecursion(*(getattr(kim_smoother, name) for name in BackwardRecursion._fields))


def _interval(recursion: BackwardRecursion, steps: SmoothingStep, known: FilteredModes, filtered: Filtered) -> Smoothed:
    """From the last time to the first."""
    count = steps.observations.shape[-2]
    later = recursion.final_message(_at(known, count))
    looks = [None] * count if steps.seen is None else steps.seen.unbind(-2)
    each = zip(
        steps.parameters.each(count), steps.observations.unbind(-2), looks, steps.possible.unbind(-1), strict=True
    )
    rows = []
    for t, step in reversed([*enumerate(starmap(SmoothingStep, each))]):
        before = _at(known, t)
        pairs = pair_modes(step, before)
        message = recursion.pair_message(step, before, pairs, _at(known, t + 1), later)
        rows.append(combine_pairs(step, before, message.log_evidence, recursion.smoothed_pairs(pairs, message)))
        later = recursion.propagate(step, before, pairs, message)
    joined = (torch.stack(parts, filtered.log_likelihood.ndim) for parts in zip(*rows[::-1], strict=True))
    return _reported(
        steps.parameters.has, SmoothedModes(*joined), *recursion.smoothed_initial(_at(known, 0), later), filtered
    )


def _fixed_lag(
    recursion: BackwardRecursion, steps: SmoothingStep, known: FilteredModes, filtered: Filtered, lag: int
) -> Smoothed:
    """All times at once: the message of the next `lag` observations, from that of one fewer at the next time."""
    count = steps.observations.shape[-2]
    before, after = _between(known, 0, count), _between(known, 1, count)
    last, first = recursion.final_message(_at(known, count)), recursion.final_message(_at(known, 0))
    pairs, later, end = pair_modes(steps, before), recursion.final_message(after), filtered.log_likelihood.ndim
    for _ in range(min(lag, count)):
        passed = recursion.propagate(steps, before, pairs, recursion.pair_message(steps, before, pairs, after, later))
        first = _at(passed, 0)
        tails = zip(passed, last, strict=True)
        later = type(last)(*(torch.cat((t.narrow(end, 1, count - 1), e.unsqueeze(end)), end) for t, e in tails))
    message = recursion.pair_message(steps, before, pairs, after, later)
    row = combine_pairs(steps, before, message.log_evidence, recursion.smoothed_pairs(pairs, message))
    return _reported(steps.parameters.has, row, *recursion.smoothed_initial(_at(known, 0), first), filtered)


def _reported(
    has: Tensor | None, row: SmoothedModes, initial: GaussianMoments, log_initial: Tensor, filtered: Filtered
) -> Smoothed:
    """All fields, from those of modes and from time 0."""
    s = row.mean.shape[-1] // 2
    m, P = row.mean[..., :s], row.covariance[..., :s, :s]
    combined = to_one(row.log_probability.exp(), m, P, has)
    lag, previous = row.covariance[..., :s, s:], row.covariance[..., s:, s:]
    return Smoothed(
        *combined,
        m,
        P,
        row.log_probability,
        row.log_pair,
        row.mean[..., s:],
        previous,
        lag,
        *initial,
        log_initial,
        filtered,
    )


def _at(series: Any, time: int) -> Any:
    """One time of tuples of tensors [*b, t, ...]."""
    first = min(part.ndim for part in series) - 2
    return type(series)(*(part.select(first, time) for part in series))


def _between(series: Any, first: int, count: int) -> Any:
    """Some times of them."""
    time = min(part.ndim for part in series) - 2
    return type(series)(*(part.narrow(time, first, count) for part in series))


def _of_histories(
    found: Enumerated,
    parameters: Parameters | NonlinearParameters,
    y: Tensor,
    seen: Tensor | None,
    start: GaussianMoments,
) -> Smoothed:
    """Each history by itself is a model of one mode that changes; all of them together, by the modes of each time."""
    k, steps, modes = start.mean.shape[-2], y.shape[-2], found.histories
    # History by history ----------------------------------------------------------------------------------------------
    fields: dict[str, Any] = {}
    for name, t in parameters._asdict().items():
        if t is not None and name in ("F", "Q", "H", "R", "b", "d"):
            ending = len(ENDS[name])
            t = t if t.ndim > ending else t.unsqueeze(-ending - 1)
            t = t.expand(*y.shape[:-2], steps, *t.shape[-ending:]).unsqueeze(-ending - 2)  # [*b, 1, t, k, ...]
            fields[name] = t.take_along_dim(modes[..., 1:].unflatten(-1, (steps, *[1] * ending)), -ending)
    model: SwitchingModel | NonlinearModel
    if isinstance(parameters, Parameters):
        model, inputs = SwitchingModel(y.new_ones(1, 1), **fields, validate=False), None
    else:
        model, inputs = parameters.along(modes[..., 1:], **fields)
    first = modes[..., :1]
    m = start.mean.take_along_dim(first, -2)
    P = start.covariance.take_along_dim(first.unsqueeze(-1), -3)
    wide = y.unsqueeze(-3).expand(*modes.shape[:-1], steps, -1)
    look = None if seen is None else seen.unsqueeze(-3).expand(wide.shape)
    alone = Prior(m.unsqueeze(-2), P.unsqueeze(-3))
    each = smooth(model, Series(wide, inputs=inputs, mask=look), alone, method="imm")
    # All that have a mode at a time ----------------------------------------------------------------------------------
    has = modes.mT.unsqueeze(-1) == torch.arange(k, device=y.device)  # [*b, 1 + t, n, k]
    logs = found.log_probability[..., None, :, None].masked_fill(~has, -torch.inf)
    log_probability, share = weigh(torch.ones_like(logs), logs)
    both = has[..., :-1, :, :, None] & has[..., 1:, :, None, :]
    log_pair = log_sum_exp(
        found.log_probability[..., None, None, None, :].masked_fill(~both.movedim(-3, -1), -torch.inf)
    )
    lag = each.lag_covariance
    mean = torch.cat((each.mode_mean, each.previous_mean), -1)
    above, below = torch.cat((each.mode_covariance, lag), -1), torch.cat((lag.mT, each.previous_covariance), -1)
    covariance = torch.cat((above, below), -2)
    rows = mix(share[..., 1:, :, :].mT, mean.squeeze(-2).movedim(-3, -2), covariance.squeeze(-3).movedim(-4, -3))
    start = mix(share[..., 0, :, :].mT, each.initial_mode_mean.squeeze(-2), each.initial_mode_covariance.squeeze(-3))
    row = SmoothedModes(*rows, log_probability[..., 1:, :], log_pair)
    return _reported(None, row, start, log_probability[..., 0, :], found.filtered)
