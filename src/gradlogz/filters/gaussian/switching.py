"""Switching filters: GPB1, GPB2, IMM and deeper GPB filters, side by side.

    mode probabilities   predicted c_j = sum_i pi_i T_ij,   filtered pi'_j ∝ c_j L_j                  [theory 7.1-7.3]

             mix                          predict and update              collapse                      filters a step
    gpb1     -                            one Gaussian by every mode j    all modes to one Gaussian     k
    imm      modes i for each mode j      each mixture by its mode j      -                             k
    gpb2     -                            every mode i by every mode j    modes i, for each mode j      k²
    gpb(n)   -                            every history by every mode j   the oldest mode               k^n

`predict` and `update` are those of the Kalman filter; the rest is a softmax and its averages. Without observations
collapsing commutes with predicting, so imm, gpb2 and the exact filter agree. With observations gpb2 collapses Gaussians
after they are weighted by the likelihood of the observation, imm before.

Time 0 is before the first transition: a transition precedes every observation, including the first. Mode weights are
kept as logarithms, transitions as probabilities; both may have probability 0.

Read next: enumeration.py (the exact filter), ../kalman.py (one step), consistency.py (NIS and NEES).
"""

import math
from collections.abc import Collection
from typing import Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputValueError
from ..._typing import Bool, Float, Tensor
from ...kernels.filters.dispatch import filtering_kernel
from ..models.nonlinear_model import NonlinearModel, NonlinearParameters
from ..models.switching_model import ENDS, Parameters, SwitchingModel
from ..moment_matching import GaussianMoments, apart, collapse, fill, likelihood_of_modes, mix, posterior, to_one, weigh
from ..prior_and_series import Prior, Series, as_series, check_mask
from ..results import Filtered, FilterState, Moved, combined
from ..validation import (
    PreparedSeries,
    check_densities,
    check_model,
    check_state,
    initial_state,
    prepared,
    prepared_parts,
)


def gpb1(
    model: SwitchingModel | NonlinearModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    keep: Literal["all", "last"] = "all",
    fields: Collection[str] | None = None,
) -> Filtered:
    """First-order generalised pseudo-Bayes filter: one Gaussian, collapsed after every step.   [ackerson70; theory 7.1]

        c_j = sum_i pi_i T_ij;   (m_j, P_j, L_j) = update_j(predict_j(m, P));   pi_j ∝ c_j L_j
        (m, P) = collapse(pi, m_j, P_j)

    Exact for one step from a single Gaussian. Takes the arguments of `imm`.
    """
    return _run("gpb1", SwitchingFilter(model, "gpb", depth=1), observations, prior, keep, fields)


def gpb2(
    model: SwitchingModel | NonlinearModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    keep: Literal["all", "last"] = "all",
    fields: Collection[str] | None = None,
) -> Filtered:
    """Second-order generalised pseudo-Bayes filter: one Gaussian for each mode.   [chang78; theory 7.2]

        (m_ij, P_ij, L_ij) = update_j(predict_j(m_i, P_i));   w_ij ∝ pi_i T_ij L_ij;   pi_j = sum_i w_ij
        (m_j, P_j) = collapse(w_ij / pi_j, m_ij, P_ij)

    Exact for one step from one Gaussian for each mode. Takes the arguments of `imm`, and k times its time.
    """
    return _run("gpb2", SwitchingFilter(model, "gpb", depth=2), observations, prior, keep, fields)


def imm(
    model: SwitchingModel | NonlinearModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    keep: Literal["all", "last"] = "all",
    fields: Collection[str] | None = None,
) -> Filtered:
    """Interacting multiple model filter: one Gaussian for each mode, mixed before prediction.   [blom88; theory 7.3]

        c_j = sum_i pi_i T_ij;   (m0_j, P0_j) = collapse(pi_i T_ij / c_j, m_i, P_i)
        (m_j, P_j, L_j) = update_j(predict_j(m0_j, P0_j));   pi_j ∝ c_j L_j

    Exact for one step if the Gaussians coincide, and at all times without observations. In contrast to filterpy's
    IMMEstimator, likelihoods stay in the log domain and are never floored; batches, missing data and gradients are
    supported; and a transition precedes the first observation, as it does every other.

    Args:
        model: the switching system.
        observations: [*b, t, o], NaN where missing; or a Series with inputs, mask, lengths or times.
        prior: distribution at time 0, before the first transition.
        keep: "all" returns every step; "last" only the last one, [*b, ...] without time, in constant memory.
        fields: names of the fields of `Filtered` to compute, such as ("mean", "log_mode_probability"); the others are
            None. The log likelihood is always returned. For many targets, means and mode probabilities alone take a
            half to a third of the time and less than a tenth of the memory.

    Calls that need no gradients run in a compiled kernel: on the CPU if numba is installed
    (../../kernels/filters/cpu.py), on a GPU for many targets (../../kernels/filters/gpu.py).

    Law: tests/agreement/test_switching_filters_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel
    >>> still, moving = (KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 4.0))
    >>> model = SwitchingModel.of([still, moving], transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> filtered = imm(model, torch.tensor([[0.0], [0.0], [9.0]]), Prior(torch.zeros(1), torch.eye(1)))
    >>> filtered.log_mode_probability.argmax(-1)
    tensor([0, 0, 1])
    """
    return _run("imm", SwitchingFilter(model, "imm"), observations, prior, keep, fields)


def gpb(
    model: SwitchingModel | NonlinearModel,
    observations: Float[Tensor, "*b t o"] | Series,
    prior: Prior,
    *,
    depth: int,
    keep: Literal["all", "last"] = "all",
    fields: Collection[str] | None = None,
) -> Filtered:
    """Generalised pseudo-Bayes filter of any depth: one Gaussian for each history of depth - 1 modes.

    Depths 1 and 2 are gpb1 and gpb2; a depth above t is exact. Cost: k^depth Kalman filters a step. Takes the arguments
    of `imm`. Transitions of probability 0 have gradients up to depth 2; from depth 3 on, a history of probability 0
    contributes no gradient.
    """
    return _run("gpb", SwitchingFilter(model, "gpb", depth=depth), observations, prior, keep, fields)


class SwitchingFilter(NamedTuple):
    """A switching filter that takes one observation at a time: `init`, then `step`; `filter` takes a series.

    Attributes:
        model: the switching system.
        method: "imm" or "gpb".
        depth: depth of "gpb", the number of modes in a history; ignored by "imm".

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel, imm
    >>> modes = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 4.0)]
    >>> model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> y, prior = torch.tensor([[0.5], [3.0]]), Prior(torch.zeros(1), torch.eye(1))
    >>> online = SwitchingFilter(model)
    >>> state = online.init(prior)
    >>> for observation in y:
    ...     state, filtered = online.step(state, observation)
    >>> torch.allclose(filtered.mean, imm(model, y, prior).mean[-1])
    True
    """

    model: SwitchingModel | NonlinearModel
    method: Literal["imm", "gpb"] = "imm"
    depth: int = 2

    @without_autocast
    def init(self, prior: Prior, *, batch_shape: tuple[int, ...] = ()) -> FilterState:
        """Return the state at time 0 for every target of a batch.

        Also loads the compiled kernel for the following steps. Compiling takes about ten seconds if it is not cached on
        disk.
        """
        state = _begin("SwitchingFilter.init", self, torch.Size(batch_shape), prior)
        if isinstance(self.model, SwitchingModel) and (self.model.components is None or self.model.fill == "zero"):
            tensors = (*self.model.fields().values(), *state)
            kernel = filtering_kernel(tensors, 0, is_online=True) if state.mean.device.type == "cpu" else None
            if kernel is not None:
                depth = 0 if self.method == "imm" else self.depth
                model = self.model
                sizes = (model.modes, model.state_size, model.observation_size)
                per_target = any(t.ndim > len(ENDS[name]) + 1 and t.shape[0] > 1 for name, t in model.fields().items())
                kernel.prepare(depth, sizes, math.prod(batch_shape), model.R.dtype, per_target=per_target)
        return state

    @without_autocast
    def step(
        self,
        state: FilterState,
        observation: Float[Tensor, "*b o"],
        *,
        inputs: Float[Tensor, "*#c u"] | None = None,
        mask: Bool[Tensor, "*b"] | Bool[Tensor, "*b o"] | None = None,
        time: int = 0,
        dt: float | Float[Tensor, "*#b"] | None = None,
        fields: Collection[str] | None = None,
    ) -> tuple[FilterState, Filtered]:
        """Advance the state by one transition and one observation.

        Args:
            state: state from `init` or the previous step.
            observation: one observation for each target, NaN where missing.
            inputs: inputs u of models with B or D.
            mask: True where the observation counts.
            time: index of this step in a time-varying model, from 0.
            dt: time since the previous step, for all targets or each; required by continuous-time models.
            fields: names of the fields of `Filtered` to compute, as in `imm`; a few take half the time.

        Steps agree with `filter`. Law: tests/laws/test_switching_filters_keep_their_laws.py.
        """
        call = "SwitchingFilter.step"
        wanted = _requested_fields(call, fields)
        steps = self.model.steps
        check_state(call, self.model, state, depth=0 if self.method == "imm" else self.depth)
        if not 0 <= time < (steps or time + 1):
            remedy = "Count steps from 0."
            raise InputValueError(call, "time", f"time must be a step from 0 to {(steps or 1) - 1}, got {time}", remedy)
        batch = state.log_likelihood.shape
        if observation.shape != (*batch, self.model.observation_size):
            condition = f"observation must be {(*batch, self.model.observation_size)} for this state and model"
            remedy = "Start with init(batch_shape=...) for a batch of targets."
            raise InputValueError(call, "observation", f"{condition}, got shape {tuple(observation.shape)}", remedy)
        if mask is not None:
            check_mask(call, mask, observation)
        series = Series(
            observation.unsqueeze(-2),
            inputs=None if inputs is None else inputs.unsqueeze(-2),
            mask=None if mask is None else mask.unsqueeze(len(batch)),
            times=None if dt is None else _interval(dt, observation).unsqueeze(-1),
        )
        model = self.model if steps is None else self.model.narrow(time)
        ready = prepared(call, model, series, validate=model.validate)
        return _pass(call, self, ready, state, last=True, wanted=wanted, is_online=True)

    def filter(
        self,
        observations: Float[Tensor, "*b t o"] | Series,
        prior: Prior,
        *,
        keep: Literal["all", "last"] = "all",
        fields: Collection[str] | None = None,
    ) -> Filtered:
        """Filter a series; see `imm` for the arguments."""
        return _run("SwitchingFilter.filter", self, observations, prior, keep, fields)


ALL = frozenset(Filtered._fields)
STRETCH = 64  # steps that are discretised together if only the last one is kept


@without_autocast
def _run(
    call: str,
    chosen: SwitchingFilter,
    observations: Tensor | Series,
    prior: Prior,
    keep: str,
    fields: Collection[str] | None,
) -> Filtered:
    """Validate the arguments and filter a series."""
    if keep not in ("all", "last"):
        remedy = 'Use "last" to return only the last step.'
        raise InputValueError(call, "keep", f'keep must be "all" or "last", got {keep!r}', remedy)
    wanted, series, model, last = _requested_fields(call, fields), as_series(observations), chosen.model, keep == "last"
    check_model(call, model)
    parts = prepared_parts(call, model, series, validate=model.validate, longest=STRETCH if last else None)
    state = _begin(call, chosen, series.observations.shape[:-2], prior)
    for part in parts:
        state, result = _pass(call, chosen, part, state, last=last, wanted=wanted)
    return result


def _pass(
    call: str,
    chosen: SwitchingFilter,
    series: PreparedSeries,
    state: FilterState,
    *,
    last: bool,
    wanted: frozenset[str],
    is_online: bool = False,
) -> tuple[FilterState, Filtered]:
    """Run all steps, by a compiled kernel if there is one; combined fields are computed once for all steps."""
    parameters, y, observed = series
    compiled = _compiled_pass(chosen, series, state, last=last, wanted=wanted, is_online=is_online)
    if compiled is not None:
        return compiled
    steps = y.shape[-2]
    masks = [None] * steps if observed is None else observed.unbind(-2)
    moves: list[Moved] = []
    for now, observation, mask_now in zip(parameters.each(steps), y.unbind(-2), masks, strict=True):
        state, moved = _advance(chosen, now, state, observation, mask_now)
        if last and moves:  # earlier steps are dropped, except for their error codes
            moved = moved._replace(failure=torch.maximum(moves.pop().failure, moved.failure))
        moves.append(moved)
    joined = moves[0] if last else Moved.joined(moves)
    if chosen.model.validate:
        check_densities(call, joined.failure)
    if last:
        result = combined(joined, now, observation, mask_now, state.log_likelihood)
    else:
        result = combined(joined, parameters, y, observed, state.log_likelihood)
    return state, _select_fields(wanted, result)


def _requested_fields(call: str, fields: Collection[str] | None) -> frozenset[str]:
    """Validated names of the requested fields of `Filtered`."""
    wanted = ALL if fields is None else frozenset((fields,) if isinstance(fields, str) else fields)
    if unknown := wanted - ALL:
        remedy = f"Choose from {', '.join(Filtered._fields)}."
        raise InputValueError(
            call, "fields", f"fields must be names of fields of Filtered, got {sorted(map(str, unknown))}", remedy
        )
    return wanted


def _select_fields(wanted: frozenset[str], result: Filtered) -> Filtered:
    names = wanted | {"log_likelihood"}
    return Filtered._make([t if name in names else None for name, t in result._asdict().items()])


def _compiled_pass(
    chosen: SwitchingFilter,
    series: PreparedSeries,
    state: FilterState,
    *,
    last: bool,
    wanted: frozenset[str],
    is_online: bool,
) -> tuple[FilterState, Filtered] | None:
    """Run all steps in a compiled kernel; None if no kernel supports them."""
    parameters, y, observed = series
    if not isinstance(parameters, Parameters) or parameters.has is not None:
        return None
    depth, fields = 0 if chosen.method == "imm" else chosen.depth, tuple(parameters[:7])
    filters = y.shape[:-1].numel() * chosen.model.modes ** max(depth, 1)
    kernel = filtering_kernel((*fields, *state, y), filters, is_online=is_online)
    result = (
        None if kernel is None else kernel.forward(depth, fields, tuple(state), y, observed, last=last, wanted=wanted)
    )
    return (
        None
        if result is None
        else (FilterState(*result[1:]), Filtered._make((*result.reported, result.log_likelihood)))
    )


def _begin(call: str, chosen: SwitchingFilter, batch: torch.Size, prior: Prior) -> FilterState:
    """State at time 0 in the form that this filter keeps."""
    if chosen.method not in ("imm", "gpb") or chosen.depth < 1:
        condition = 'method must be "imm" or "gpb" and depth at least 1'
        fact = f"method={chosen.method!r} and depth={chosen.depth}"
        raise InputValueError(call, "method", f"{condition}, got {fact}", "Use depth 1 for gpb1, 2 for gpb2.")
    state = initial_state(call, chosen.model, prior, batch)
    if chosen.method == "gpb" and chosen.depth == 1:
        has = chosen.model.has if chosen.model.fill == "modes" else None
        return state._replace(**_to_one(state.log_probability, state.mean, state.covariance, has))
    return state


def _advance(
    chosen: SwitchingFilter,
    now: Parameters | NonlinearParameters,
    state: FilterState,
    y: Tensor,
    observed: Tensor | None,
) -> tuple[FilterState, Moved]:
    """Advance the state by one transition and one observation."""
    if chosen.method == "imm":
        return _imm(now, state, y, observed)
    return _gpb1(now, state, y, observed) if chosen.depth == 1 else _gpb(now, state, y, observed, chosen.depth)


# The steps of the filters in parallel form: mix, predict, update, collapse. ------------------------------------------


def _imm(
    now: Parameters | NonlinearParameters, state: FilterState, y: Tensor, observed: Tensor | None
) -> tuple[FilterState, Moved]:
    """One step of imm.   [theory 7.3]"""
    # Mix: the modes i that may precede each mode j --------------------------------------------------------------------
    log_c, share = weigh(now.transition, state.log_probability.unsqueeze(-1))
    mixed = mix(share.mT, state.mean, state.covariance, now.has)
    # Predict and update: mode by mode --------------------------------------------------------------------------------
    before = now.predict(*mixed)
    after = now.update(*before, y.unsqueeze(-2), _per_mode(observed))
    log_pi, step, _ = posterior(log_c, after.log_likelihood)
    # Collapse: nothing -----------------------------------------------------------------------------------------------
    moved = Moved(*before, log_c, after.mean, after.covariance, log_pi, after.log_likelihood, step, after.failure)
    return FilterState(after.mean, after.covariance, log_pi, state.log_likelihood + step), moved


def _gpb1(
    now: Parameters | NonlinearParameters, state: FilterState, y: Tensor, observed: Tensor | None
) -> tuple[FilterState, Moved]:
    """One step of gpb1.   [theory 7.1]"""
    # Mix: nothing, there is one Gaussian -----------------------------------------------------------------------------
    log_c = weigh(now.transition, state.log_probability.unsqueeze(-1)).log_sum
    # Predict and update: mode by mode --------------------------------------------------------------------------------
    before = now.predict(state.mean, state.covariance)
    after = now.update(*before, y.unsqueeze(-2), _per_mode(observed))
    log_pi, step, _ = posterior(log_c, after.log_likelihood)
    # Collapse: all modes to one --------------------------------------------------------------------------------------
    one = _to_one(log_pi, after.mean, after.covariance, now.has)
    moved = Moved(*before, log_c, after.mean, after.covariance, log_pi, after.log_likelihood, step, after.failure)
    return FilterState(log_probability=log_pi, log_likelihood=state.log_likelihood + step, **one), moved


def _gpb(
    now: Parameters | NonlinearParameters, state: FilterState, y: Tensor, observed: Tensor | None, depth: int
) -> tuple[FilterState, Moved]:
    """One step of gpb of any depth; at depth 2 the histories are modes.   [theory 7.2]"""
    log_h, k = state.log_probability.unsqueeze(-1), now.transition.shape[-1]
    histories = log_h.shape[-2]
    T = now.transition.repeat(*[1] * (now.transition.ndim - 2), histories // k, 1)  # by the newest mode of a history
    # Mix: nothing; the mixtures are computed only to report the prediction of each mode ------------------------------
    prior_weights = log_c, share = weigh(T, log_h)
    m, P = state.mean.unsqueeze(-2), state.covariance.unsqueeze(-3)
    if now.has is None:
        mixed = mix(share.mT, state.mean, state.covariance)
    else:  # for each pair, fill in the components that the mode has and the history lacks
        filled = fill(share.mT, state.mean, state.covariance, now.has.repeat(histories // k, 1))
        mixed = collapse(share.mT, *filled)
        m, P = filled.mean.movedim(-3, -2), filled.covariance.movedim(-4, -3)
    reported = now.predict(*mixed)
    # Predict and update: every history by every mode -----------------------------------------------------------------
    wide = now.by_history()
    before = wide.predict(m, P)
    after = wide.update(*before, y[..., None, None, :], None if observed is None else observed[..., None, None, :])
    mode_likelihood = likelihood_of_modes(T, log_h, after.log_likelihood, prior_weights)
    log_pi, step, possible = posterior(log_c, mode_likelihood)
    # Collapse: the oldest mode of each history, with weights that include the observation ----------------------------
    evidence = torch.where(possible[..., None, None], after.log_likelihood, 0.0)
    oldest = k if histories * k > k ** (depth - 1) else 1
    log_w, share = weigh(apart(T, oldest, 0), apart(log_h + evidence, oldest, 0))
    log_w = log_w.log_softmax(-1)
    means, covariances = apart(after.mean, oldest, 1), apart(after.covariance, oldest, 2)
    mean, covariance = collapse(share.mT, means.movedim(-3, -2), covariances.movedim(-4, -3))
    # Report each mode: collapse its histories ------------------------------------------------------------------------
    by_mode = _to_modes(log_w, mean, covariance, k)
    moved = Moved(*reported, log_c, *by_mode, log_pi, mode_likelihood, step, after.failure.amax(-2))
    return FilterState(mean, covariance, log_w, state.log_likelihood + step), moved


def _interval(dt: float | Tensor, like: Tensor) -> Tensor:
    """Elapsed time as a tensor on the device of `like`, without synchronisation."""
    return dt.to(like) if isinstance(dt, Tensor) else torch.full((), dt, dtype=like.dtype, device=like.device)


def _per_mode(observed: Tensor | None) -> Tensor | None:
    return None if observed is None else observed.unsqueeze(-2)


def _to_one(log_pi: Tensor, mean: Tensor, covariance: Tensor, has: Tensor | None) -> dict[str, Tensor]:
    """Collapse all modes to one Gaussian, as fields of a state."""
    m, P = to_one(log_pi.exp(), mean, covariance, has)
    return {"mean": m.unsqueeze(-2), "covariance": P.unsqueeze(-3)}


def _to_modes(log_w: Tensor, mean: Tensor, covariance: Tensor, k: int) -> GaussianMoments:
    """Collapse histories to one Gaussian for each newest mode."""
    if log_w.shape[-1] == k:
        return GaussianMoments(mean, covariance)
    log_w = log_w.unflatten(-1, (-1, k))
    share = weigh(torch.ones_like(log_w), log_w).shares
    means = mean.unflatten(-2, (-1, k)).movedim(-3, -2)
    return collapse(share.mT, means, covariance.unflatten(-3, (-1, k)).movedim(-4, -3))
