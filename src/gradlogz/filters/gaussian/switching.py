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

import dataclasses
import math
from collections.abc import Collection
from typing import Literal, NamedTuple

import torch

from ..._autocast import without_autocast
from ..._errors import InputTypeError, InputValueError, check_floats
from ..._typing import Bool, Float, Tensor
from ...kernels.filters.dispatch import filtering_kernel
from ..models.nonlinear_model import NonlinearModel
from ..models.switching_model import ENDS, Parameters, SwitchingModel
from ..prior_and_series import Prior, Series, as_series, check_mask
from ..results import Filtered, FilterState, Moved, combined, expect_modes
from ..scalars import from_array
from ..validation import (
    PreparedSeries,
    check_densities,
    check_model,
    check_observation,
    check_state,
    check_targets,
    filter_name,
    initial_state,
    prepared,
    prepared_parts,
    without_gaps,
)
from .association import associated, average_innovation, check_association, check_detections, hypotheses
from .compiled_functions import filter_functions
from .compiled_gradient import Pass, Tensors, filter_with_gradient
from .switching_steps import Predicted, advance, one_gaussian, predict_modes, update_modes


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
    (../../kernels/filters/cpu.py), on a GPU for many targets (../../kernels/filters/gpu.py). Gradients of the log
    likelihood are compiled too, on the CPU if no field is requested (`fields=()`); compiled_gradient.py.

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

    `predict` and `update` are the halves of a step, for detections that are gated and associated in between.

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

    @property
    def order(self) -> int:
        """Depth of "gpb"; 0 for "imm"."""
        return 0 if self.method == "imm" else self.depth

    @without_autocast
    def init(self, prior: Prior, *, batch_shape: tuple[int, ...] = ()) -> FilterState:
        """Return the state at time 0 for every target of a batch.

        Also loads the compiled kernel for the following steps. Compiling takes ten to thirty seconds if it is not
        cached on disk.
        """
        state = _begin("SwitchingFilter.init", self, torch.Size(batch_shape), prior)
        if state.mean.device.type != "cpu":
            return state
        model = self.model
        if isinstance(model, SwitchingModel) and (model.components is None or model.fill == "zero"):
            tensors = (*model.fields().values(), *state)
            kernel = filtering_kernel(tensors, 0, is_online=True)
            if kernel is not None:
                sizes = (model.modes, model.state_size, model.observation_size)
                per_target = any(t.ndim > len(ENDS[name]) + 1 and t.shape[0] > 1 for name, t in model.fields().items())
                kernel.prepare(self.order, sizes, math.prod(batch_shape), model.R.dtype, per_target=per_target)
        elif model.input_size is None:
            first = model.narrow(0).at(state.mean.new_zeros(1)) if model.continuous else model.narrow(0)
            nothing = state.mean.new_zeros(*batch_shape, 1, model.observation_size)
            missing = torch.zeros_like(nothing, dtype=torch.bool)
            parameters = first.parameters()
            filter_functions(self.order, parameters, state, nothing, missing, last=True, wanted=ALL, is_online=True)
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
            observation: one observation for each target, as a tensor or numpy array, NaN where missing.
            inputs: inputs u of models with B or D.
            mask: True where the observation counts.
            time: index of this step in a time-varying model, from 0.
            dt: time since the previous step, for all targets or each; required by continuous-time models.
            fields: names of the fields of `Filtered` to compute, as in `imm`; a few take half the time.

        Steps agree with `filter`. Law: tests/laws/test_switching_filters_keep_their_laws.py.
        """
        call = "SwitchingFilter.step"
        wanted, observation = _requested_fields(call, fields), self._as_tensor(call, observation)
        ready = self._prepared(call, state, observation, inputs, mask, time, dt)
        after, result = _pass(call, self, ready, state, last=True, wanted=wanted, is_online=True)
        return self._named(after), result

    @without_autocast
    def predict(
        self,
        state: FilterState,
        *,
        inputs: Float[Tensor, "*#c u"] | None = None,
        time: int = 0,
        dt: float | Float[Tensor, "*#b"] | None = None,
    ) -> Predicted:
        """Predict the state and its observation by one transition; `update` takes the result.

        Args:
            state: state from `init`, `step` or `update`.
            inputs: inputs u of models with B or D, also those of the observation.
            time: index of this step in a time-varying model, from 0.
            dt: time since the previous step, for all targets or each; required by continuous-time models.

        Law: tests/laws/test_predict_and_update_are_a_step.py.

        >>> import torch
        >>> from gradlogz.filters import Prior, constant_velocity
        >>> line = constant_velocity(1, dt=1.0, spectral_density=0.1, observation_variance=1.0)
        >>> online = SwitchingFilter(SwitchingModel.of([line], transition=torch.ones(1, 1)))
        >>> predicted = online.predict(online.init(Prior(torch.tensor([2.0, 1.0]), torch.eye(2))))
        >>> predicted.expected_observation
        tensor([3.])
        """
        call = "SwitchingFilter.predict"
        nothing = state.mean.new_full((*state.log_likelihood.shape, self.model.observation_size), torch.nan)
        parameters = self._prepared(call, state, nothing, inputs, None, time, dt).parameters
        now = next(parameters.each(1))
        branches = predict_modes(now, state, self.order)
        moments = expect_modes(now, *branches[:3])
        name = filter_name(self.order)
        return Predicted(*moments, branches=branches, parameters=now, filter=name)  # type: ignore[arg-type, misc]

    @without_autocast
    def update(
        self,
        predicted: Predicted,
        observation: Float[Tensor, "*y o"],
        *,
        mask: Bool[Tensor, "*m"] | None = None,
        association: Float[Tensor, "*b n1"] | None = None,
        step_log_likelihood: Float[Tensor, "*b"] | None = None,
    ) -> tuple[FilterState, Filtered]:
        """Condition a predicted state on its observation, or on several detections of which one may be its own.

        Args:
            predicted: result of `predict`.
            observation: one observation for each target, [*b, o], NaN where missing; with `association` n detections
                for each, [*b, n, o].
            mask: True where the observation counts; only without `association`.
            association: probability that none of the detections belongs to the target, then that of each detection,
                given all detections: those of PDA (`association_probability`) or the marginal ones of JPDA. Targets
                with fewer detections have NaN detections of probability 0. Modes and states are averaged over
                associations and moment matched (association.py).
            step_log_likelihood: with `association` log p(detections | past), if known. It is added to the log
                likelihood, which otherwise does not change.

        Law: tests/laws/test_associations_are_averaged.py.
        """
        call = "SwitchingFilter.update"
        self._check_predicted(call, predicted)
        observation, association = self._as_tensor(call, observation), from_array(association)
        before, now, validate = predicted.branches, predicted.parameters, self.model.validate
        batch = before.log_likelihood.shape
        if association is not None and mask is not None:
            remedy = "Give detections that do not count the probability 0."
            raise InputValueError(call, "mask", "mask cannot be combined with association", remedy)
        if association is None and step_log_likelihood is not None:
            problem, remedy = "step_log_likelihood needs association", "Drop it; the filter computes it."
            raise InputValueError(call, "step_log_likelihood", problem, remedy)
        if association is not None:
            check_association(call, self.model, association, observation, batch, step_log_likelihood)
        else:
            check_floats(call, observation=observation, model=self.model.R)
            check_observation(call, self.model, observation, batch)
        y, observed = without_gaps(call, observation, mask, validate=validate)
        if association is None:
            state, moved = update_modes(now, before, y, observed, self.order)
        else:
            each = hypotheses(now, before, y, observed)
            state, moved = associated(*update_modes(*each, self.order), before, association, step_log_likelihood)
        if validate:
            check_densities(call, moved.failure, self.model.R)
        if association is None:
            return self._named(state), combined(moved, now, y, observed, state.log_likelihood)
        expected, by_mode = predicted.expected_observation, predicted.mode_expected_observation
        result = combined(moved, now, expected, None, state.log_likelihood)  # its innovation is replaced below
        y, beta = observation, association[..., 1:]
        v = average_innovation(now.difference(y, expected.unsqueeze(-2)), beta)
        mode_v = average_innovation(now.difference(y.unsqueeze(-3), by_mode.unsqueeze(-2)), beta.unsqueeze(-2))
        return self._named(state), result._replace(innovation=v, mode_innovation=mode_v)

    @without_autocast
    def log_density(self, predicted: Predicted, detections: Float[Tensor, "*b n o"]) -> Float[Tensor, "*b n"]:
        """Predicted log density of each of n detections, -inf for missing ones: the logits of an association."""
        call = "SwitchingFilter.log_density"
        self._check_predicted(call, predicted)
        before, now, validate = predicted.branches, predicted.parameters, self.model.validate
        detections = self._as_tensor(call, detections)
        check_detections(call, self.model, detections, before.log_likelihood.shape)
        y, observed = without_gaps(call, detections, None, validate=validate)
        _, moved = update_modes(*hypotheses(now, before, y, observed, none=False), self.order)
        if validate:
            check_densities(call, moved.failure, self.model.R)
        density = moved.step_log_likelihood
        return density if observed is None else density.masked_fill(~observed.any(-1), -torch.inf)

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

    def _as_tensor(self, call: str, observation: Tensor) -> Tensor:
        """Observation as a tensor, if it is a numpy array."""
        if not isinstance(observation, Tensor):
            observation = from_array(observation)
            check_floats(call, observation=observation, model=self.model.R)
        return observation

    def _named(self, state: FilterState) -> FilterState:
        """State with the name of this filter."""
        return state if state.filter is not None else FilterState(*state, filter=filter_name(self.order))

    def _prepared(
        self,
        call: str,
        state: FilterState,
        observation: Tensor,
        inputs: Tensor | None,
        mask: Tensor | None,
        time: int,
        dt: float | Tensor | None,
    ) -> PreparedSeries:
        """Validated arguments of one step, as a series of length 1."""
        steps = self.model.steps
        check_state(call, self.model, state, depth=self.order)
        if dt is None and self.model.continuous:
            problem = "dt= is missing, and this model is continuous in time (Generator)"
            raise InputValueError(call, "dt", problem, "Pass the time since the previous step.")
        if not 0 <= time < (steps or time + 1):
            remedy = "Count steps from 0."
            raise InputValueError(call, "time", f"time must be a step from 0 to {(steps or 1) - 1}, got {time}", remedy)
        batch = state.log_likelihood.shape
        if steps is not None:
            check_targets(call, self.model, batch)
        check_observation(call, self.model, observation, batch)
        if mask is not None:
            check_mask(call, mask, observation)
        series = Series(
            observation.unsqueeze(-2),
            inputs=None if inputs is None else inputs.unsqueeze(-2),
            mask=None if mask is None else mask.unsqueeze(len(batch)),
            times=None if dt is None else _interval(dt, observation).unsqueeze(-1),
        )
        model = self.model if steps is None else self.model.narrow(time)
        return prepared(call, model, series, validate=model.validate)

    def _check_predicted(self, call: str, predicted: object) -> None:
        """Check that a predicted state was created by `predict` of a filter of this depth."""
        if not isinstance(predicted, Predicted):
            fact, remedy = type(predicted).__name__, "Pass the result of predict."
            raise InputTypeError(call, "predicted", f"predicted must be a Predicted, got {fact}", remedy)
        sizes = (self.model.modes, self.model.state_size)
        if predicted.filter != filter_name(self.order) or predicted.mode_mean.shape[-2:] != sizes:
            condition = f"predicted must come from {filter_name(self.order)} with [k, s] = {list(sizes)}"
            problem = f"{condition}, got {predicted.filter} with {list(predicted.mode_mean.shape[-2:])}"
            raise InputValueError(call, "predicted", problem, "Call predict and update of one SwitchingFilter.")


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


def filter_prepared(
    call: str, chosen: SwitchingFilter, series: PreparedSeries, state: FilterState, fields: Collection[str] | None
) -> Filtered:
    """Filter a series that has been validated, from a state of imm or gpb2 at time 0; short series are compiled too."""
    return filter_from(call, chosen, series, state, fields)[1]


def filter_from(
    call: str, chosen: SwitchingFilter, series: PreparedSeries, state: FilterState, fields: Collection[str] | None
) -> tuple[FilterState, Filtered]:
    """`filter_prepared`, with the state after the last step."""
    wanted = _requested_fields(call, fields)
    return _pass(call, chosen, series, state, last=False, wanted=wanted, is_online=True)


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
    """Run all steps, by a compiled kernel if there is one."""
    compiled = _compiled_pass(chosen, series, state, last=last, wanted=wanted, is_online=is_online)
    if compiled is None and series.observations.shape[-2] > 1:
        compiled = _differentiable_pass(call, chosen, series, state, last=last, wanted=wanted)
    return _torch_pass(call, chosen, series, state, last=last, wanted=wanted) if compiled is None else compiled


def _torch_pass(
    call: str,
    chosen: SwitchingFilter,
    series: PreparedSeries,
    state: FilterState,
    *,
    last: bool,
    wanted: frozenset[str],
) -> tuple[FilterState, Filtered]:
    """Run all steps in torch; combined fields are computed once for all steps."""
    parameters, y, observed = series
    steps = y.shape[-2]
    masks = [None] * steps if observed is None else observed.unbind(-2)
    moves: list[Moved] = []
    for now, observation, mask_now in zip(parameters.each(steps), y.unbind(-2), masks, strict=True):
        state, moved = advance(now, state, observation, mask_now, chosen.order)
        if last and moves:  # earlier steps are dropped, except for their error codes
            moved = moved._replace(failure=torch.maximum(moves.pop().failure, moved.failure))
        moves.append(moved)
    joined = moves[0] if last else Moved.joined(moves)
    if chosen.model.validate:
        check_densities(call, joined.failure, chosen.model.R)
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
    if wanted is ALL:
        return result
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
    depth = chosen.order
    if not isinstance(parameters, Parameters) or parameters.has is not None:
        computed = filter_functions(
            depth, parameters, state, y, observed, last=last, wanted=wanted, is_online=is_online
        )
        if computed is None:
            return None
        after = FilterState(*computed[1:], filter=filter_name(depth))
        return after, Filtered._make((*computed.reported, computed.log_likelihood))
    fields = tuple(parameters[:7])
    filters = y.shape[:-1].numel() * chosen.model.modes ** max(depth, 1)
    kernel = filtering_kernel((*fields, *state, y), filters, is_online=is_online)
    result = (
        None if kernel is None else kernel.forward(depth, fields, tuple(state), y, observed, last=last, wanted=wanted)
    )
    return (
        None
        if result is None
        else (
            FilterState(*result[1:], filter=filter_name(depth)),
            Filtered._make((*result.reported, result.log_likelihood)),
        )
    )


def _differentiable_pass(
    call: str,
    chosen: SwitchingFilter,
    series: PreparedSeries,
    state: FilterState,
    *,
    last: bool,
    wanted: frozenset[str],
) -> tuple[FilterState, Filtered] | None:
    """Run all steps in a compiled kernel whose gradient is compiled; None if no kernel supports them."""
    parameters, y, observed = series
    if torch.compiler.is_compiling():  # torch.compile traces the torch path
        return None
    if not isinstance(parameters, Parameters) or parameters.has is not None:
        return None
    name, names = filter_name(chosen.order), [name for name in Filtered._fields[:-1] if name in wanted]

    def arguments(tensors: Tensors) -> tuple[PreparedSeries, FilterState]:
        *model, m, P, log_h, log_likelihood, y = tensors
        return PreparedSeries(Parameters(*model), y, observed), FilterState(m, P, log_h, log_likelihood, filter=name)

    def flat(after: FilterState, filtered: Filtered) -> Tensors:
        return (*after, *(getattr(filtered, name) for name in names))

    def compiled(tensors: Tensors) -> Tensors | None:
        result = _compiled_pass(chosen, *arguments(tensors), last=last, wanted=wanted, is_online=False)
        return None if result is None else flat(*result)

    def by_torch(tensors: Tensors) -> Tensors:
        return flat(*_torch_pass(call, chosen, *arguments(tensors), last=last, wanted=wanted))

    steps = Pass(chosen.order, observed, compiled, by_torch, advance)
    results = filter_with_gradient(steps, (*parameters[:7], *state, y), reports=bool(names))
    if results is None:
        return None
    fields = dict(zip(names, results[4:], strict=True))
    filtered = Filtered._make([*(fields.get(name) for name in Filtered._fields[:-1]), results[3]])
    return FilterState(*results[:4], filter=name), filtered


def _begin(call: str, chosen: SwitchingFilter, batch: torch.Size, prior: Prior) -> FilterState:
    """State at time 0 in the form that this filter keeps."""
    if chosen.method not in ("imm", "gpb") or chosen.depth < 1:
        condition = 'method must be "imm" or "gpb" and depth at least 1'
        fact = f"method={chosen.method!r} and depth={chosen.depth}"
        raise InputValueError(call, "method", f"{condition}, got {fact}", "Use depth 1 for gpb1, 2 for gpb2.")
    state = initial_state(call, chosen.model, prior, batch)
    if chosen.method == "gpb" and chosen.depth == 1:
        has = chosen.model.has if chosen.model.fill == "modes" else None
        mean, covariance = one_gaussian(state.log_probability, state.mean, state.covariance, has)
        state = dataclasses.replace(state, mean=mean, covariance=covariance)
    return chosen._named(state)


def _interval(dt: float | Tensor, like: Tensor) -> Tensor:
    """Elapsed time as a tensor on the device of `like`, without synchronisation."""
    return dt.to(like) if isinstance(dt, Tensor) else torch.full((), dt, dtype=like.dtype, device=like.device)
