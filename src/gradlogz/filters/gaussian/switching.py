"""Filters of systems that switch: GPB1, GPB2, IMM and deeper ones, beside each other.

    mode probabilities   c_j = sum_i pi_i T_ij  before, pi'_j ∝ c_j L_j  after the observation        [theory 7.1-7.3]

             mix                          predict, update                 collapse                      filters a step
    gpb1     -                            j from the one Gaussian         all modes to one              k
    imm      histories i to each mode j   j from its mixture              -                             k
    gpb2     -                            every i to every j              i to each mode j              k²
    gpb(n)   -                            every history to every j        the oldest mode away          k^n

What happens in `predict` and `update` is the Kalman filter; everything else is a softmax and its averages. Without
observations collapsing commutes with predicting, so that imm, gpb2 and the exact filter agree for ever; they differ by
whether components are weighed by what was observed before they are collapsed (gpb2) or not (imm).

Time 0 is before the first transition: the prior is moved before it meets the first observation. Weights of
modes are logarithms, transitions are probabilities; either may be of probability 0.

Read next: enumeration.py (the exact filter), ../kalman.py (one step), consistency.py (is the filter what it claims).
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
    """One Gaussian, moved by every mode and collapsed again.   [ackerson70; theory 7.1]

        c_j = sum_i pi_i T_ij;   (m_j, P_j, L_j) = update_j(predict_j(m, P));   pi_j ∝ c_j L_j
        (m, P) = collapse(pi, m_j, P_j)

    Exact for one step from a single Gaussian. Arguments as of `imm`.
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
    """A Gaussian for each mode, each moved by every mode, collapsed by what was observed.   [chang78; theory 7.2]

        (m_ij, P_ij, L_ij) = update_j(predict_j(m_i, P_i));   w_ij ∝ pi_i T_ij L_ij;   pi_j = sum_i w_ij
        (m_j, P_j) = collapse(w_ij / pi_j, m_ij, P_ij)

    Exact for one step from a Gaussian for each mode. Arguments as of `imm`; k times its cost.
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
    """A Gaussian for each mode, mixed before it is moved: interacting multiple models.   [blom88; theory 7.3]

        c_j = sum_i pi_i T_ij;   (m0_j, P0_j) = collapse(pi_i T_ij / c_j, m_i, P_i)
        (m_j, P_j, L_j) = update_j(predict_j(m0_j, P0_j));   pi_j ∝ c_j L_j

    Exact for one step if the Gaussians coincide, and for ever without observations. It differs from filterpy's
    IMMEstimator by its logarithms (likelihoods are never floored), by targets, gaps and gradients, and by its
    beginning: here the first observation is preceded by a transition, as every other is.

    Args:
        observations: [*b, t, o], NaN where there are none; or a Series with inputs, mask, lengths or times.
        prior: at time 0, before the first transition.
        keep: "last" reports the last step alone, [*b, ...] without time, in memory that does not grow with it.
        fields: the names of what is wanted of `Filtered`, such as ("mean", "log_mode_probability"); what is not is
            None. The log likelihood always comes. For many targets, means and mode probabilities alone take a half to a
            third of the time, and a tenth of the memory.

    Where nothing is to be differentiated all steps are one call of a compiled kernel: on the CPU where numba is
    installed (../../kernels/filters/cpu.py), on a GPU for many targets (../../kernels/filters/gpu.py).

    Law: tests/agreement/test_switching_filters_agree_with_enumeration.py.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel
    >>> still, moving = (KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 4.0))
    >>> model = SwitchingModel.of([still, moving], transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> found = imm(model, torch.tensor([[0.0], [0.0], [9.0]]), Prior(torch.zeros(1), torch.eye(1)))
    >>> found.log_mode_probability.argmax(-1)
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
    """A Gaussian for each history of depth - 1 modes; 1 and 2 are gpb1 and gpb2, more than t is exact.

    Cost: k^depth filters a step. Arguments as of `imm`. Where a history of three modes or more is impossible, what the
    transitions to it would add has no gradient; up to depth 2 transitions of probability 0 have theirs.
    """
    return _run("gpb", SwitchingFilter(model, "gpb", depth=depth), observations, prior, keep, fields)


class SwitchingFilter(NamedTuple):
    """A filter to be fed one observation at a time: `init`, then `step` after `step`; `filter` for a whole series.

    Attributes:
        model: the system.
        method: "imm", or "gpb" with its depth.
        depth: how many modes back a Gaussian of "gpb" knows; "imm" has none.

    >>> import torch
    >>> from gradlogz.filters import KalmanModel, Prior, SwitchingModel, imm
    >>> modes = [KalmanModel(*torch.tensor([[[1.0]], [[q]], [[1.0]], [[1.0]]])) for q in (0.0, 4.0)]
    >>> model = SwitchingModel.of(modes, transition=torch.tensor([[0.9, 0.1], [0.1, 0.9]]))
    >>> y, prior = torch.tensor([[0.5], [3.0]]), Prior(torch.zeros(1), torch.eye(1))
    >>> online = SwitchingFilter(model)
    >>> state = online.init(prior)
    >>> for observation in y:
    ...     state, found = online.step(state, observation)
    >>> torch.allclose(found.mean, imm(model, y, prior).mean[-1])
    True
    """

    model: SwitchingModel | NonlinearModel
    method: Literal["imm", "gpb"] = "imm"
    depth: int = 2

    @without_autocast
    def init(self, prior: Prior, *, batch_shape: tuple[int, ...] = ()) -> FilterState:
        """The prior at time 0, of every target in a batch.

        The kernel of the steps that will follow is loaded, and compiled where none was kept: some ten seconds, once.
        """
        state = _begin("SwitchingFilter.init", self, torch.Size(batch_shape), prior)
        if isinstance(self.model, SwitchingModel) and (self.model.components is None or self.model.fill == "zero"):
            given = (*self.model.fields().values(), *state)
            kernel = filtering_kernel(given, 0, is_online=True) if state.mean.device.type == "cpu" else None
            if kernel is not None:
                depth = 0 if self.method == "imm" else self.depth
                model = self.model
                sizes = (model.modes, model.state_size, model.observation_size)
                is_own = any(t.ndim > len(ENDS[name]) + 1 and t.shape[0] > 1 for name, t in model.fields().items())
                kernel.prepare(depth, sizes, math.prod(batch_shape), model.R.dtype, is_own=is_own)
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
        """One transition and one observation; `time` counts the steps of a model that changes, from 0.

        A model of continuous time needs dt, the time that has passed, of all targets or of each. Fields are as of
        `imm`; a few of them are found in half the time.

        The series of steps is `filter`: tests/laws/test_switching_filters_keep_their_laws.py.
        """
        call = "SwitchingFilter.step"
        wanted = _wanted(call, fields)
        steps = self.model.steps
        check_state(call, self.model, state, depth=0 if self.method == "imm" else self.depth)
        if not 0 <= time < (steps or time + 1):
            remedy = "Count steps from 0, or pass the model of each step."
            raise InputValueError(call, "time", f"time must be a step of the model, below {steps}, got {time}", remedy)
        batch = state.log_likelihood.shape
        if observation.shape != (*batch, self.model.observation_size):
            condition = f"observation must be {(*batch, self.model.observation_size)}, as state and model are"
            remedy = "Begin with init(batch_shape=...) of its targets."
            raise InputValueError(call, "observation", f"{condition}, got shape {tuple(observation.shape)}", remedy)
        if mask is not None:
            check_mask(call, mask, observation)
        series = Series(
            observation.unsqueeze(-2),
            inputs=None if inputs is None else inputs.unsqueeze(-2),
            mask=None if mask is None else mask.unsqueeze(len(batch)),
            times=None if dt is None else _lasting(dt, observation).unsqueeze(-1),
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
        """All steps of a series, as `imm`, `gpb1`, `gpb2` and `gpb` take them."""
        return _run("SwitchingFilter.filter", self, observations, prior, keep, fields)


ALL = frozenset(Filtered._fields)
STRETCH = 64  # steps that are discretised at a time where only the last is wanted


@without_autocast
def _run(
    call: str,
    chosen: SwitchingFilter,
    observations: Tensor | Series,
    prior: Prior,
    keep: str,
    fields: Collection[str] | None,
) -> Filtered:
    """A series, step by step; what is reported is computed once for all steps."""
    if keep not in ("all", "last"):
        remedy = "All steps are reported, or the last alone."
        raise InputValueError(call, "keep", f'keep must be "all" or "last", got {keep!r}', remedy)
    wanted, series, model, last = _wanted(call, fields), as_series(observations), chosen.model, keep == "last"
    check_model(call, model)
    parts = prepared_parts(call, model, series, validate=model.validate, longest=STRETCH if last else None)
    state = _begin(call, chosen, series.observations.shape[:-2], prior)
    for part in parts:
        state, found = _pass(call, chosen, part, state, last=last, wanted=wanted)
    return found


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
    """All steps, one after the other; what is reported of them is computed at once."""
    parameters, y, seen = series
    at_once = _at_once(chosen, series, state, last=last, wanted=wanted, is_online=is_online)
    if at_once is not None:
        return at_once
    steps = y.shape[-2]
    looks = [None] * steps if seen is None else seen.unbind(-2)
    moves: list[Moved] = []
    for now, observation, look in zip(parameters.each(steps), y.unbind(-2), looks, strict=True):
        state, moved = _advance(chosen, now, state, observation, look)
        if last and moves:  # all that is remembered of a step is whether there was a density
            moved = moved._replace(failure=torch.maximum(moves.pop().failure, moved.failure))
        moves.append(moved)
    whole = moves[0] if last else Moved.joined(moves)
    if chosen.model.validate:
        check_densities(call, whole.failure)
    if last:
        found = combined(whole, now, observation, look, state.log_likelihood)
    else:
        found = combined(whole, parameters, y, seen, state.log_likelihood)
    return state, _only(wanted, found)


def _wanted(call: str, fields: Collection[str] | None) -> frozenset[str]:
    """The names of the fields that are to be reported."""
    wanted = ALL if fields is None else frozenset((fields,) if isinstance(fields, str) else fields)
    if unknown := wanted - ALL:
        remedy = f"Choose of {', '.join(Filtered._fields)}."
        raise InputValueError(
            call, "fields", f"fields must be names of Filtered, got {sorted(map(str, unknown))}", remedy
        )
    return wanted


def _only(wanted: frozenset[str], found: Filtered) -> Filtered:
    kept = wanted | {"log_likelihood"}
    return Filtered._make([t if name in kept else None for name, t in found._asdict().items()])


def _at_once(
    chosen: SwitchingFilter,
    series: PreparedSeries,
    state: FilterState,
    *,
    last: bool,
    wanted: frozenset[str],
    is_online: bool,
) -> tuple[FilterState, Filtered] | None:
    """All steps by a compiled kernel, where one takes them; None where this file must."""
    parameters, y, seen = series
    if not isinstance(parameters, Parameters) or parameters.has is not None:
        return None
    depth, fields = 0 if chosen.method == "imm" else chosen.depth, tuple(parameters[:7])
    filters = y.shape[:-1].numel() * chosen.model.modes ** max(depth, 1)
    kernel = filtering_kernel((*fields, *state, y), filters, is_online=is_online)
    found = None if kernel is None else kernel.forward(depth, fields, tuple(state), y, seen, last=last, wanted=wanted)
    return None if found is None else (FilterState(*found[1:]), Filtered._make((*found.reported, found.log_likelihood)))


def _begin(call: str, chosen: SwitchingFilter, batch: torch.Size, prior: Prior) -> FilterState:
    """The prior at time 0, as the filter keeps it."""
    if chosen.method not in ("imm", "gpb") or chosen.depth < 1:
        condition = 'method must be "imm" or "gpb" and depth at least 1'
        fact = f"{chosen.method!r} and {chosen.depth}"
        raise InputValueError(call, "method", f"{condition}, got {fact}", "gpb1 has depth 1, gpb2 has depth 2.")
    state = initial_state(call, chosen.model, prior, batch)
    if chosen.method == "gpb" and chosen.depth == 1:
        has = chosen.model.has if chosen.model.fill == "modes" else None
        return state._replace(**_to_one(state.log_probability, state.mean, state.covariance, has))
    return state


def _advance(
    chosen: SwitchingFilter, now: Parameters | NonlinearParameters, state: FilterState, y: Tensor, seen: Tensor | None
) -> tuple[FilterState, Moved]:
    """One transition and one observation."""
    if chosen.method == "imm":
        return _imm(now, state, y, seen)
    return _gpb1(now, state, y, seen) if chosen.depth == 1 else _gpb(now, state, y, seen, chosen.depth)


# The steps of the filters, on facing pages: mix, predict, update, collapse. ------------------------------------------


def _imm(
    now: Parameters | NonlinearParameters, state: FilterState, y: Tensor, seen: Tensor | None
) -> tuple[FilterState, Moved]:
    """[theory 7.3]"""
    # Mix: each mode j begins with the states i that may have come to it ----------------------------------------------
    log_c, share = weigh(now.transition, state.log_probability.unsqueeze(-1))
    mixed = mix(share.mT, state.mean, state.covariance, now.has)
    # Predict and update: mode by mode --------------------------------------------------------------------------------
    before = now.predict(*mixed)
    after = now.update(*before, y.unsqueeze(-2), _per_mode(seen))
    log_pi, step, _ = posterior(log_c, after.log_likelihood)
    # Collapse: nothing -----------------------------------------------------------------------------------------------
    moved = Moved(*before, log_c, after.mean, after.covariance, log_pi, after.log_likelihood, step, after.failure)
    return FilterState(after.mean, after.covariance, log_pi, state.log_likelihood + step), moved


def _gpb1(
    now: Parameters | NonlinearParameters, state: FilterState, y: Tensor, seen: Tensor | None
) -> tuple[FilterState, Moved]:
    """[theory 7.1]"""
    # Mix: nothing, there is one Gaussian -----------------------------------------------------------------------------
    log_c = weigh(now.transition, state.log_probability.unsqueeze(-1)).log_sum
    # Predict and update: mode by mode --------------------------------------------------------------------------------
    before = now.predict(state.mean, state.covariance)
    after = now.update(*before, y.unsqueeze(-2), _per_mode(seen))
    log_pi, step, _ = posterior(log_c, after.log_likelihood)
    # Collapse: all modes to one --------------------------------------------------------------------------------------
    one = _to_one(log_pi, after.mean, after.covariance, now.has)
    moved = Moved(*before, log_c, after.mean, after.covariance, log_pi, after.log_likelihood, step, after.failure)
    return FilterState(log_probability=log_pi, log_likelihood=state.log_likelihood + step, **one), moved


def _gpb(
    now: Parameters | NonlinearParameters, state: FilterState, y: Tensor, seen: Tensor | None, depth: int
) -> tuple[FilterState, Moved]:
    """[theory 7.2] for histories of any depth; those of depth 2 are modes."""
    log_h, k = state.log_probability.unsqueeze(-1), now.transition.shape[-1]
    histories = log_h.shape[-2]
    T = now.transition.repeat(*[1] * (now.transition.ndim - 2), histories // k, 1)  # by the newest mode of a history
    # Mix: nothing; the mixture is what the modes predict together, and is reported -----------------------------------
    came = log_c, share = weigh(T, log_h)
    m, P = state.mean.unsqueeze(-2), state.covariance.unsqueeze(-3)
    if now.has is None:
        mixed = mix(share.mT, state.mean, state.covariance)
    else:  # what a history lacks and a mode has is filled in, for each pair of them
        filled = fill(share.mT, state.mean, state.covariance, now.has.repeat(histories // k, 1))
        mixed = collapse(share.mT, *filled)
        m, P = filled.mean.movedim(-3, -2), filled.covariance.movedim(-4, -3)
    reported = now.predict(*mixed)
    # Predict and update: every history by every mode -----------------------------------------------------------------
    wide = now.by_history()
    before = wide.predict(m, P)
    after = wide.update(*before, y[..., None, None, :], None if seen is None else seen[..., None, None, :])
    mode_likelihood = likelihood_of_modes(T, log_h, after.log_likelihood, came)
    log_pi, step, possible = posterior(log_c, mode_likelihood)
    # Collapse: the oldest mode of each history, by the weights that the observation gave it --------------------------
    told = torch.where(possible[..., None, None], after.log_likelihood, 0.0)
    oldest = k if histories * k > k ** (depth - 1) else 1
    log_w, share = weigh(apart(T, oldest, 0), apart(log_h + told, oldest, 0))
    log_w = log_w.log_softmax(-1)
    means, covariances = apart(after.mean, oldest, 1), apart(after.covariance, oldest, 2)
    mean, covariance = collapse(share.mT, means.movedim(-3, -2), covariances.movedim(-4, -3))
    # What each mode says, all its histories together -----------------------------------------------------------------
    by_mode = _to_modes(log_w, mean, covariance, k)
    moved = Moved(*reported, log_c, *by_mode, log_pi, mode_likelihood, step, after.failure.amax(-2))
    return FilterState(mean, covariance, log_w, state.log_likelihood + step), moved


def _lasting(dt: float | Tensor, like: Tensor) -> Tensor:
    """A time that has passed, as a tensor; a number is made where it is needed, and waited for by no device."""
    return dt.to(like) if isinstance(dt, Tensor) else torch.full((), dt, dtype=like.dtype, device=like.device)


def _per_mode(seen: Tensor | None) -> Tensor | None:
    return None if seen is None else seen.unsqueeze(-2)


def _to_one(log_pi: Tensor, mean: Tensor, covariance: Tensor, has: Tensor | None) -> dict[str, Tensor]:
    """All modes as one Gaussian."""
    m, P = to_one(log_pi.exp(), mean, covariance, has)
    return {"mean": m.unsqueeze(-2), "covariance": P.unsqueeze(-3)}


def _to_modes(log_w: Tensor, mean: Tensor, covariance: Tensor, k: int) -> GaussianMoments:
    """Histories as one Gaussian for each of their newest modes."""
    if log_w.shape[-1] == k:
        return GaussianMoments(mean, covariance)
    log_w = log_w.unflatten(-1, (-1, k))
    share = weigh(torch.ones_like(log_w), log_w).shares
    means = mean.unflatten(-2, (-1, k)).movedim(-3, -2)
    return collapse(share.mT, means, covariance.unflatten(-3, (-1, k)).movedim(-4, -3))
