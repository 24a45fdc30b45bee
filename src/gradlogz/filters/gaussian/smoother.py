"""Smoothers of switching systems: states and modes given earlier and later observations.

    p(x_t, s_t | y_1 ... y_T)          all observations: a backward pass over time
    p(x_t, s_t | y_1 ... y_{t+lag})    fixed lag: all times in parallel

Read next: backward_messages.py (one backward step), kim_smoother.py (Kim's step), switching.py (the filters),
enumeration.py (the exact filter).
"""

from collections.abc import Callable, Collection
from itertools import starmap
from typing import Any, Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError
from ..._typing import Float, Tensor
from ...kernels.filters.dispatch import backward_kernel
from ...kernels.filters.fields import FILTERED_MODES
from ...special.log_domain import log_sum_exp
from ..models.nonlinear_model import NonlinearModel, NonlinearParameters
from ..models.switching_model import ENDS, Parameters, SwitchingModel
from ..moment_matching import GaussianMoments, mix, to_one, weigh
from ..prior_and_series import Prior, Series, as_series
from ..results import Filtered, FilterState
from ..validation import PreparedSeries, check_model, initial_state, prepared
from . import backward_messages, kim_smoother
from .backward_messages import FilteredModes, SmoothedModes, SmoothingStep, combine_pairs, pair_modes
from .enumeration import Enumerated, enumerate_modes
from .switching import SwitchingFilter, filter_prepared

Method = Literal["imm", "gpb2", "kim", "enumerate"]


class Smoothed(NamedTuple):
    """Smoothed states and modes; *b holds targets and then time t = 1 ... T.

    The fields contain the sufficient statistics of EM: sums over t of exp(log_pair_probability) are expected transition
    counts, and (x_t, x_{t-1}) given s_t = j has the mean (mode_mean, previous_mean) and the covariance
    [[mode_covariance, lag_covariance], [lag_covariance^T, previous_covariance]].

    Attributes:
        mean: smoothed mean of the state, all modes combined.
        covariance: smoothed covariance of the state, including the spread between modes.
        mode_mean: smoothed mean given the mode; for a mode of probability 0, the mean it would have.
        mode_covariance: smoothed covariance given the mode.
        log_mode_probability: smoothed log probability of each mode, -inf for probability 0.
        log_pair_probability: log P(s_{t-1} = i, s_t = j | observations), [i, j].
        previous_mean: mean of x_{t-1} given s_t = j.
        previous_covariance: covariance of x_{t-1} given s_t = j.
        lag_covariance: covariance of x_t with x_{t-1} given s_t = j.
        initial_mode_mean: smoothed mean of x_0 given s_0, without a time dimension.
        initial_mode_covariance: smoothed covariance of x_0 given s_0, without a time dimension.
        initial_log_mode_probability: smoothed log probability of s_0, without a time dimension.
        filtered: result of the forward pass, with the log likelihood.
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
    fields: Collection[str] | None = None,
) -> Smoothed:
    """Smooth states and modes: p(x_t, s_t | y_1 ... y_T), or up to y_{t+lag}, with one Gaussian for each mode.

    Backward messages are evaluated for each pair of successive modes (backward_messages.py). "imm" and "gpb2" are exact
    with one mode, with modes that never switch, without observations, and for x_0 and x_1 given y_1. Approximations
    otherwise:

        imm          forward: `imm`; backward: p(y_t+1 ... y_T | x_t, s_t = j) is the exponential of a quadratic
                     function of x_t, chosen so that N(m_j, P_j) gets the right mean and covariance
        gpb2         forward: `gpb2`; backward: as "imm"
        kim          forward: `gpb2`; backward, given s_t+1: x_t+1 is independent of s_t given all observations, and s_t
                     is independent of later observations given past ones [kim94]
        enumerate    none: all mode histories, or the `max_histories` likeliest

    A NonlinearModel is linearised at the filtered Gaussians, as in its filters: the extended or the unscented smoother
    [sarkka08]. The exact cases above are then exact for the linearised model, except "imm" without observations: its
    filter linearises at mixtures, the smoother at their components.

    A quadratic function that hardly decreases would carry pairs of wide Gaussians away. If the next modes disagree so
    much that less than a quarter of their average information would be left, the smoother counts only so much of their
    disagreement that a quarter is left.

    The result at time t is the collapse of its mode pairs. At the last time "gpb2" therefore equals the filter, and
    "imm" is slightly closer to the exact posterior than the filter.

    Args:
        method: "imm", "gpb2", "kim" or "enumerate".
        lag: number of later observations that each state is conditioned on; None for all. All times are smoothed in
            parallel, in lag + 1 steps.
        max_histories: for "enumerate", number of likeliest histories to keep; None keeps all.
        fields: names of the fields of `Smoothed` to return, None for all; the others are None, except those of time 0.
            Without "filtered", only the log likelihood of the forward pass is returned. Fewer fields take less time.

    The other arguments are those of `imm`. Cost: k² Kalman filter steps and k² linear systems of size s for each time
    step. Smoothed covariances are differences from the filtered ones: a prior more than 1e10 times wider than the
    observation noise (1e4 in float32) costs the first times their accuracy. "imm" and "gpb2" without lag run in a
    compiled kernel on the CPU if numba is installed, except for nonlinear models, modes with components, and gradients.
    On a GPU no step synchronises if the model has validate=False, except for "kim", which computes eigenvalues.
    Law: tests/agreement/test_smoothers_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel, gpb2
    >>> still, moving = (KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 9.0))
    >>> model = SwitchingModel.of([still, moving], transition=torch.tensor([[0.9, 0.1], [0.9, 0.1]]))
    >>> y, prior = torch.tensor([[0.0], [0.0], [9.0], [9.0], [9.0]]), Prior(torch.zeros(1), torch.eye(1))
    >>> smoothed = smooth(model, y, prior)
    >>> smoothed.log_mode_probability.argmax(-1)  # it moved once
    tensor([0, 0, 1, 0, 0])
    >>> smoothed.filtered.log_likelihood == gpb2(model, y, prior).log_likelihood
    tensor(True)
    """
    call = "smooth"
    check_model(call, model)
    if method not in ("imm", "gpb2", "kim", "enumerate"):
        condition = 'method must be "imm", "gpb2", "kim" or "enumerate"'
        remedy = 'Use "gpb2" for accuracy, "imm" for speed.'
        raise InputValueError(call, "method", f"{condition}, got {method!r}", remedy)
    enumerated = method == "enumerate"
    if (lag is not None and (lag < 0 or enumerated)) or (max_histories is not None and not enumerated):
        condition = 'lag must be nonnegative and not used with "enumerate", max_histories is for "enumerate" only'
        fact = f"lag={lag} and max_histories={max_histories} with method={method!r}"
        raise InputValueError(call, "lag", f"{condition}, got {fact}", "Drop the argument that does not apply.")
    wanted, series = _requested_fields(call, fields), as_series(observations)
    steps_of_series = prepared(call, model, series, validate=model.validate)
    parameters, y, observed = steps_of_series
    initial = initial_state(call, model, prior, y.shape[:-2])
    m, P, log_pi, _ = initial
    if enumerated:
        enumerated_modes = enumerate_modes(model, series, prior, max_histories=max_histories)
        histories = _from_histories(enumerated_modes, parameters, y, observed, GaussianMoments(m, P))
        return _select_fields(wanted, histories)
    chosen = SwitchingFilter(model) if method == "imm" else SwitchingFilter(model, "gpb")
    if method != "kim" and lag is None:
        compiled = _compiled_interval(chosen, steps_of_series, initial, wanted)
        if compiled is not None:
            return compiled
    filtered = chosen.filter(series, prior)
    forward = FilteredModes(
        torch.cat((m.unsqueeze(-3), filtered.mode_mean), -3),
        torch.cat((P.unsqueeze(-4), filtered.mode_covariance), -4),
        torch.cat((log_pi.unsqueeze(-2), filtered.log_mode_probability), -2),
        torch.cat((P.unsqueeze(-4), filtered.predicted_mode_covariance), -4).diagonal(dim1=-2, dim2=-1),
    )
    steps = SmoothingStep(parameters, y, observed, filtered.step_log_likelihood > -torch.inf)
    recursion = KIM if method == "kim" else MESSAGES
    if lag is None:
        return _select_fields(wanted, _interval(recursion, steps, forward, filtered))
    return _select_fields(wanted, _fixed_lag(recursion, steps, forward, filtered, lag))


ALL = frozenset(Smoothed._fields)
ALWAYS = frozenset(name for name in Smoothed._fields if name.startswith("initial"))


def _requested_fields(call: str, fields: Collection[str] | None) -> frozenset[str]:
    """Validated names of the requested fields of `Smoothed`."""
    wanted = ALL if fields is None else frozenset((fields,) if isinstance(fields, str) else fields)
    if unknown := wanted - ALL:
        remedy = f"Choose from {', '.join(Smoothed._fields)}."
        problem = f"fields must be names of fields of Smoothed, got {sorted(map(str, unknown))}"
        raise InputValueError(call, "fields", problem, remedy)
    return wanted


def _select_fields(wanted: frozenset[str], result: Smoothed) -> Smoothed:
    """Requested fields of a result; the filter keeps its log likelihood."""
    if "filtered" not in wanted:
        nothing: dict[str, Any] = dict.fromkeys(Filtered._fields)
        result = result._replace(filtered=Filtered(**nothing | {"log_likelihood": result.filtered.log_likelihood}))
    names = wanted | ALWAYS | {"filtered"}
    return Smoothed._make([t if name in names else None for name, t in result._asdict().items()])


def _compiled_interval(
    chosen: SwitchingFilter, series: PreparedSeries, initial: FilterState, wanted: frozenset[str]
) -> Smoothed | None:
    """Filter and smooth in compiled kernels; None if there is none, or if a number was not finite."""
    parameters, y, observed = series
    if not isinstance(parameters, Parameters) or parameters.has is not None:
        return None
    model, start = tuple(parameters[:7]), tuple(initial)[:3]
    kernel = backward_kernel((*model, *start, y), y.shape[:-1].numel() * chosen.model.modes**2)
    if kernel is None:
        return None
    filtered = filter_prepared(
        "smooth", chosen, series, initial, fields=None if "filtered" in wanted else FILTERED_MODES
    )
    modes = tuple(getattr(filtered, name) for name in FILTERED_MODES)
    smoothed = kernel.smooth(kernel.FilteredSeries(model, start, modes, y, observed), wanted)
    if smoothed is None:
        return None
    return _select_fields(wanted, Smoothed(**dict.fromkeys(Smoothed._fields) | smoothed | {"filtered": filtered}))


class BackwardRecursion(NamedTuple):
    """Functions of a backward recursion: the final message, a step and time 0.

    They are defined in backward_messages.py and kim_smoother.py.
    """

    final_message: Callable[..., Any]
    pair_message: Callable[..., Any]
    smoothed_pairs: Callable[..., GaussianMoments]
    propagate: Callable[..., Any]
    smoothed_initial: Callable[..., tuple[GaussianMoments, Tensor]]


MESSAGES = BackwardRecursion(*(getattr(backward_messages, name) for name in BackwardRecursion._fields))
KIM = BackwardRecursion(*(getattr(kim_smoother, name) for name in BackwardRecursion._fields))


def _interval(
    recursion: BackwardRecursion, steps: SmoothingStep, forward: FilteredModes, filtered: Filtered
) -> Smoothed:
    """Smooth given all observations, from the last time to the first."""
    count = steps.observations.shape[-2]
    later = recursion.final_message(_at(forward, count))
    masks = [None] * count if steps.observed is None else steps.observed.unbind(-2)
    each = zip(
        steps.parameters.each(count), steps.observations.unbind(-2), masks, steps.possible.unbind(-1), strict=True
    )
    rows = []
    for t, step in reversed([*enumerate(starmap(SmoothingStep, each))]):
        before = _at(forward, t)
        pairs = pair_modes(step, before)
        message = recursion.pair_message(step, before, pairs, _at(forward, t + 1), later)
        rows.append(combine_pairs(step, before, message.log_evidence, recursion.smoothed_pairs(pairs, message)))
        later = recursion.propagate(step, before, pairs, message)
    joined = (torch.stack(parts, filtered.log_likelihood.ndim) for parts in zip(*rows[::-1], strict=True))
    return _reported(
        steps.parameters.has, SmoothedModes(*joined), *recursion.smoothed_initial(_at(forward, 0), later), filtered
    )


def _fixed_lag(
    recursion: BackwardRecursion, steps: SmoothingStep, forward: FilteredModes, filtered: Filtered, lag: int
) -> Smoothed:
    """Smooth all times in parallel: the message of n later observations follows from n - 1 at the next time."""
    count = steps.observations.shape[-2]
    before, after = _between(forward, 0, count), _between(forward, 1, count)
    last, first = recursion.final_message(_at(forward, count)), recursion.final_message(_at(forward, 0))
    pairs, later, end = pair_modes(steps, before), recursion.final_message(after), filtered.log_likelihood.ndim
    for _ in range(min(lag, count)):
        passed = recursion.propagate(steps, before, pairs, recursion.pair_message(steps, before, pairs, after, later))
        first = _at(passed, 0)
        tails = zip(passed, last, strict=True)
        later = type(last)(*(torch.cat((t.narrow(end, 1, count - 1), e.unsqueeze(end)), end) for t, e in tails))
    message = recursion.pair_message(steps, before, pairs, after, later)
    row = combine_pairs(steps, before, message.log_evidence, recursion.smoothed_pairs(pairs, message))
    return _reported(steps.parameters.has, row, *recursion.smoothed_initial(_at(forward, 0), first), filtered)


def _reported(
    has: Tensor | None, row: SmoothedModes, initial: GaussianMoments, log_initial: Tensor, filtered: Filtered
) -> Smoothed:
    """Assemble `Smoothed` from the fields of each mode and of time 0."""
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
    """Select one time from a tuple of tensors [*b, t, ...]."""
    first = min(part.ndim for part in series) - 2
    return type(series)(*(part.select(first, time) for part in series))


def _between(series: Any, first: int, count: int) -> Any:
    """Select `count` times from a tuple of tensors [*b, t, ...]."""
    time = min(part.ndim for part in series) - 2
    return type(series)(*(part.narrow(time, first, count) for part in series))


def _from_histories(
    enumerated_modes: Enumerated,
    parameters: Parameters | NonlinearParameters,
    y: Tensor,
    observed: Tensor | None,
    start: GaussianMoments,
) -> Smoothed:
    """Smooth each mode history as a time-varying model with one mode, then combine histories by mode at each time."""
    k, steps, modes = start.mean.shape[-2], y.shape[-2], enumerated_modes.histories
    # Smooth each history ---------------------------------------------------------------------------------------------
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
    mask_wide = None if observed is None else observed.unsqueeze(-3).expand(wide.shape)
    alone = Prior(m.unsqueeze(-2), P.unsqueeze(-3))
    each = smooth(model, Series(wide, inputs=inputs, mask=mask_wide), alone, method="imm")
    # Combine the histories that share a mode at a time ---------------------------------------------------------------
    has = modes.mT.unsqueeze(-1) == torch.arange(k, device=y.device)  # [*b, 1 + t, n, k]
    logs = enumerated_modes.log_probability[..., None, :, None].masked_fill(~has, -torch.inf)
    log_probability, share = weigh(torch.ones_like(logs), logs)
    both = has[..., :-1, :, :, None] & has[..., 1:, :, None, :]
    log_pair = log_sum_exp(
        enumerated_modes.log_probability[..., None, None, None, :].masked_fill(~both.movedim(-3, -1), -torch.inf)
    )
    lag = each.lag_covariance
    mean = torch.cat((each.mode_mean, each.previous_mean), -1)
    above, below = torch.cat((each.mode_covariance, lag), -1), torch.cat((lag.mT, each.previous_covariance), -1)
    covariance = torch.cat((above, below), -2)
    rows = mix(share[..., 1:, :, :].mT, mean.squeeze(-2).movedim(-3, -2), covariance.squeeze(-3).movedim(-4, -3))
    start = mix(share[..., 0, :, :].mT, each.initial_mode_mean.squeeze(-2), each.initial_mode_covariance.squeeze(-3))
    row = SmoothedModes(*rows, log_probability[..., 1:, :], log_pair)
    return _reported(None, row, start, log_probability[..., 0, :], enumerated_modes.filtered)
