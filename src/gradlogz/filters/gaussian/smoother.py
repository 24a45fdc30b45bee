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
from ..._errors import InputValueError, sentence
from ..._typing import Bool, Float, Int, Tensor
from ...kernels.attention.reference import log_sum_exp
from ..models.nonlinear_model import NonlinearModel, NonlinearParameters
from ..models.switching_model import ENDS, Parameters, SwitchingModel
from ..moment_matching import Moments, mix, to_one, weigh
from ..validation import arranged, beginning, check_model
from . import backward_messages, kim_smoother
from .backward_messages import Known, Row, Steps, pair, read
from .enumeration import Exact, exact
from .results import Filtered
from .switching import SwitchingFilter

Method = Literal["imm", "gpb2", "kim", "exact"]


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
    observations: Float[Tensor, "*b t o"],
    *,
    mean: Float[Tensor, "*#m s"],
    covariance: Float[Tensor, "*#m s s"],
    log_mode_probability: Float[Tensor, "*#n k"] | None = None,
    inputs: Float[Tensor, "*#c t u"] | None = None,
    mask: Bool[Tensor, "*b t"] | Bool[Tensor, "*b t o"] | None = None,
    lengths: Int[Tensor, "*b"] | None = None,
    times: Float[Tensor, "*#c t"] | None = None,
    method: Method = "gpb2",
    lag: int | None = None,
    keep: int | None = None,
) -> Smoothed:
    """p(x_t, s_t | y_1 ... y_T), or p(x_t, s_t | y_1 ... y_{t+lag}), of a Gaussian for each mode.

    What comes later is heard by each pair of modes (backward_messages.py). With one mode, with modes that never switch,
    without observations, and of x_0 and x_1 given y_1, "imm" and "gpb2" are exact. Elsewhere what is approximated is

        imm     going forward, what `imm` does; going back, p(y_t+1 ... y_T | x_t, s_t = j) is the exponential of the
                quadratic function of x_t that gives N(m_j, P_j) the right mean and covariance
        gpb2    the same, with what `gpb2` does going forward
        kim     as gpb2 going forward; going back, given s_t+1 and all observations, x_t+1 does not know s_t, and given
                s_t+1 and past observations, s_t does not know later ones: the published smoother [kim94]
        exact   nothing: every history of modes, or the `keep` likeliest

    Functions of a NonlinearModel are lines here, as in its filters, along the filtered Gaussians: the extended
    smoother, or the unscented one [sarkka08]. What is exact is so for those lines, but for "imm" without observations:
    its filter moves mixtures, and lines through a mixture are others than those through its parts.

    A quadratic that grows would be no likelihood of every pair: where later observations leave a mode less certain than
    it was, the information kept is the average of the modes of the next step, without the spread between them.

    What is reported at time t is the collapse of its pairs. For "imm" the last time is therefore a little nearer to the
    exact law than the filter is; for "gpb2" it is the filter.

    Args:
        method: "imm", "gpb2", "kim" or "exact".
        lag: how many observations after its own each state is given; None for all. All times are smoothed at once, in
            lag + 1 steps that do not depend on each other's.
        keep: of "exact", how many histories to keep, the likeliest; None for all.

    The other arguments are those of `imm`. Cost: k² steps of a Kalman filter and as many solutions of s equations a
    step, back and forth. Covariances are what is left of the filtered ones: beliefs at time 0 that are more than 1e10
    times wider than what is observed (1e4 in float32) cost the first times their digits. On a GPU no step waits for it
    if the model has validate=False, but those of "kim", which ask for eigenvalues.
    Law: tests/agreement/test_smoothers_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz import KalmanModel, SwitchingModel, gpb2
    >>> still, moving = (KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 9.0))
    >>> model = SwitchingModel.of([still, moving], transition=torch.tensor([[0.9, 0.1], [0.9, 0.1]]))
    >>> y = torch.tensor([[0.0], [0.0], [9.0], [9.0], [9.0]])
    >>> found = smooth(model, y, mean=torch.zeros(1), covariance=torch.eye(1))
    >>> found.log_mode_probability.argmax(-1)  # it moved once
    tensor([0, 0, 1, 0, 0])
    >>> found.filtered.log_likelihood == gpb2(model, y, mean=torch.zeros(1), covariance=torch.eye(1)).log_likelihood
    tensor(True)
    """
    call = "smooth"
    check_model(call, model)
    if method not in ("imm", "gpb2", "kim", "exact"):
        remedy = "gpb2 is the nearest to exact, imm needs the least."
        raise InputValueError(sentence(call, 'method must be "imm", "gpb2", "kim" or "exact"', f"{method!r}", remedy))
    if (lag is not None and (lag < 0 or method == "exact")) or (keep is not None and method != "exact"):
        condition = 'lag must be 0 or more, for "imm", "gpb2" and "kim"; and keep be for "exact" alone'
        remedy = "None gives every state all observations."
        raise InputValueError(sentence(call, condition, f"lag={lag} and keep={keep} for {method!r}", remedy))
    parameters, y, seen = arranged(
        call, model, observations, inputs=inputs, mask=mask, lengths=lengths, times=times, validate=model.validate
    )
    batch = y.shape[:-2]
    begins: dict[str, Any] = {
        "mean": mean,
        "covariance": covariance,
        "log_mode_probability": log_mode_probability,
    }
    m, P, log_pi, _ = beginning(call, model, batch, **begins)
    given: dict[str, Any] = {"inputs": inputs, "mask": mask, "lengths": lengths, "times": times}
    if method == "exact":
        found = exact(model, observations, **begins, **given, keep=keep)
        return _of_histories(found, parameters, y, seen, Moments(m, P))
    chosen = SwitchingFilter(model) if method == "imm" else SwitchingFilter(model, "gpb")
    filtered = chosen.filter(observations, **begins, **given)
    known = Known(
        torch.cat((m.unsqueeze(-3), filtered.mode_mean), -3),
        torch.cat((P.unsqueeze(-4), filtered.mode_covariance), -4),
        torch.cat((log_pi.unsqueeze(-2), filtered.log_mode_probability), -2),
        torch.cat((P.unsqueeze(-4), filtered.predicted_mode_covariance), -4).diagonal(dim1=-2, dim2=-1),
    )
    steps = Steps(parameters, y, seen, filtered.step_log_likelihood > -torch.inf)
    way = KIM if method == "kim" else QUOTIENT
    if lag is None:
        return _interval(way, steps, known, filtered)
    return _fixed_lag(way, steps, known, filtered, lag)


class Way(NamedTuple):
    """The backward recursion of a smoother (backward_messages.py, kim_smoother.py): at the end, a step, time 0."""

    nothing: Callable[..., Any]
    hear: Callable[..., Any]
    both: Callable[..., Moments]
    pass_on: Callable[..., Any]
    begun: Callable[..., tuple[Moments, Tensor]]


QUOTIENT = Way(
    backward_messages.nothing, backward_messages.hear, backward_messages.both, backward_messages.pass_on,
    backward_messages.begun,
)  # fmt: skip
KIM = Way(
    kim_smoother.nothing, kim_smoother.hear, kim_smoother.both, kim_smoother.pass_on, kim_smoother.begun,
)  # fmt: skip


def _interval(way: Way, steps: Steps, known: Known, filtered: Filtered) -> Smoothed:
    """From the last time to the first."""
    count = steps.observations.shape[-2]
    later = way.nothing(_at(known, count))
    looks = [None] * count if steps.seen is None else steps.seen.unbind(-2)
    each = zip(
        steps.parameters.each(count), steps.observations.unbind(-2), looks, steps.possible.unbind(-1), strict=True
    )
    rows = []
    for t, step in reversed([*enumerate(starmap(Steps, each))]):
        before = _at(known, t)
        pairs = pair(step, before)
        heard = way.hear(step, before, pairs, _at(known, t + 1), later)
        rows.append(read(step, before, heard.log_evidence, way.both(pairs, heard)))
        later = way.pass_on(step, before, pairs, heard)
    joined = (torch.stack(parts, filtered.log_likelihood.ndim) for parts in zip(*rows[::-1], strict=True))
    return _reported(steps.parameters.has, Row(*joined), *way.begun(_at(known, 0), later), filtered)


def _fixed_lag(way: Way, steps: Steps, known: Known, filtered: Filtered, lag: int) -> Smoothed:
    """All times at once: what a time hears of the next `lag` observations, from what its next hears of one fewer."""
    count = steps.observations.shape[-2]
    before, after = _between(known, 0, count), _between(known, 1, count)
    last, first = way.nothing(_at(known, count)), way.nothing(_at(known, 0))
    pairs, later, end = pair(steps, before), way.nothing(after), filtered.log_likelihood.ndim
    for _ in range(min(lag, count)):
        passed = way.pass_on(steps, before, pairs, way.hear(steps, before, pairs, after, later))
        first = _at(passed, 0)
        tails = zip(passed, last, strict=True)
        later = type(last)(*(torch.cat((t.narrow(end, 1, count - 1), e.unsqueeze(end)), end) for t, e in tails))
    heard = way.hear(steps, before, pairs, after, later)
    row = read(steps, before, heard.log_evidence, way.both(pairs, heard))
    return _reported(steps.parameters.has, row, *way.begun(_at(known, 0), first), filtered)


def _reported(has: Tensor | None, row: Row, initial: Moments, log_initial: Tensor, filtered: Filtered) -> Smoothed:
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
    found: Exact, parameters: Parameters | NonlinearParameters, y: Tensor, seen: Tensor | None, start: Moments
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
    begin: dict[str, Any] = {"mean": m.unsqueeze(-2), "covariance": P.unsqueeze(-3)}
    each = smooth(model, wide, **begin, inputs=inputs, mask=look, method="imm")
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
    row = Row(*rows, log_probability[..., 1:, :], log_pair)
    return _reported(None, row, start, log_probability[..., 0, :], found.filtered)
