"""Results of a filter, and the state between two steps.

    m = sum_j pi_j m_j,   P = sum_j pi_j (P_j + (m_j - m)(m_j - m)^T)              all modes combined; only reported
    v_j = y - H_j m_j - d_j,   S_j = H_j P_j H_j^T + R_j                            innovation of each mode
    v = y - sum_j c_j (H_j m_j + d_j)                                               innovation of all modes combined

Read next: gaussian/switching.py (the filters), gaussian/consistency.py (NIS and NEES).
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from .._errors import InputValueError
from .._pytree import record, static_field
from .._typing import Bool, Float, Int, Tensor
from .moment_matching import GaussianMoments, collapse, to_one
from .records import TensorRecord


@record
class FilterState(TensorRecord):
    """State of a filter between two steps: Gaussians of mode histories and their probabilities.

    For imm and gpb2 the histories h are the k modes. gpb1 keeps one Gaussian (g = 1) and k probabilities; deeper
    filters keep up to k^(depth-1) histories, with the newest mode last in the index. Tensors may share memory with the
    arguments of `init` and with reported fields, so do not modify them in place.

    `state[index]` selects targets, and `FilterState.cat(states)` joins the targets of several states. Iterating yields
    the tensors. `filter` is the name of the filter that made the state, and only this filter accepts it; a state made
    of tensors has None, and is checked by its sizes alone.
    """

    mean: Float[Tensor, "*b g s"]
    covariance: Float[Tensor, "*b g s s"]
    log_probability: Float[Tensor, "*b h"]
    log_likelihood: Float[Tensor, "*b"]
    filter: str | None = static_field(default=None, kw_only=True)

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.mean, self.covariance, self.log_probability, self.log_likelihood))

    def __getitem__(self, index: Any) -> "FilterState":
        """State of some targets, by their index, slice, mask or list of indices."""
        if self.log_likelihood.ndim == 0:
            problem, remedy = "the state is that of one target", "Use the state itself."
            raise InputValueError("FilterState", "index", problem, remedy)
        return FilterState(*(t[index] for t in self), filter=self.filter)

    @classmethod
    def cat(cls, states: "Sequence[FilterState]") -> "FilterState":
        """Join the targets of several states of one filter, along their first dimension."""
        filters = {state.filter for state in states}
        if len(filters) != 1 or any(state.log_likelihood.ndim == 0 for state in states):
            condition = "states must come from one filter, with a batch of targets each"
            fact = f"{len(states)} states of {sorted(map(str, filters))}"
            raise InputValueError(
                "FilterState.cat", "states", f"{condition}, got {fact}", "Use init(batch_shape=(n,))."
            )
        return cls(*(torch.cat(parts) for parts in zip(*states, strict=True)), filter=filters.pop())


class Filtered(NamedTuple):
    """Filtered and predicted moments, mode probabilities and log likelihoods; *b holds targets and, for a series, time.

    Fields that were not requested with `fields=` are None.

    Attributes:
        mean: filtered mean of the state, all modes combined.
        covariance: filtered covariance of the state, including the spread between modes.
        mode_mean: filtered mean given the current mode; for a mode of probability 0, the mean it would have.
        mode_covariance: filtered covariance given the current mode.
        log_mode_probability: filtered log probability of each mode, -inf for probability 0.
        predicted_mean: mean before the observation, all modes combined.
        predicted_covariance: covariance before the observation, all modes combined.
        predicted_mode_mean: mean before the observation, given the mode.
        predicted_mode_covariance: covariance before the observation, given the mode.
        predicted_log_mode_probability: log probability of each mode before the observation.
        innovation: observation minus its predicted mean; NaN where nothing was observed.
        innovation_covariance: covariance of the innovation.
        mode_innovation: innovation given the mode.
        mode_innovation_covariance: covariance of the innovation given the mode.
        mode_log_likelihood: log p(y_t | s_t, past).
        step_log_likelihood: log p(y_t | past); -inf if no mode can produce y_t, which is then ignored.
        log_likelihood: log p(y_1 ... y_t) of the series; [*b] without time.
    """

    mean: Float[Tensor, "*b s"]
    covariance: Float[Tensor, "*b s s"]
    mode_mean: Float[Tensor, "*b k s"]
    mode_covariance: Float[Tensor, "*b k s s"]
    log_mode_probability: Float[Tensor, "*b k"]
    predicted_mean: Float[Tensor, "*b s"]
    predicted_covariance: Float[Tensor, "*b s s"]
    predicted_mode_mean: Float[Tensor, "*b k s"]
    predicted_mode_covariance: Float[Tensor, "*b k s s"]
    predicted_log_mode_probability: Float[Tensor, "*b k"]
    innovation: Float[Tensor, "*b o"]
    innovation_covariance: Float[Tensor, "*b o o"]
    mode_innovation: Float[Tensor, "*b k o"]
    mode_innovation_covariance: Float[Tensor, "*b k o o"]
    mode_log_likelihood: Float[Tensor, "*b k"]
    step_log_likelihood: Float[Tensor, "*b"]
    log_likelihood: Float[Tensor, "*c"]


class PredictedBranches(NamedTuple):
    """Predicted Gaussians of a step, before the observation.

    Attributes:
        mode_mean: predicted mean given the mode.
        mode_covariance: predicted covariance given the mode.
        log_mode_probability: predicted log probability of each mode.
        mean: predicted means of every history by every mode for gpb of depth 2 and more; else those of the modes.
        covariance: their covariances.
        log_probability: log probability of each history before the transition; of each mode for imm and gpb1.
        share: probability of each of these given the mode after the transition.
        log_likelihood: log likelihood of the observations so far.
    """

    mode_mean: Float[Tensor, "*b k s"]
    mode_covariance: Float[Tensor, "*b k s s"]
    log_mode_probability: Float[Tensor, "*b k"]
    mean: Float[Tensor, "*h k s"]
    covariance: Float[Tensor, "*h k s s"]
    log_probability: Float[Tensor, "*b g"]
    share: Float[Tensor, "*b g k"]
    log_likelihood: Float[Tensor, "*b"]


class Moved(NamedTuple):
    """Predicted and filtered moments of one step, mode by mode."""

    predicted_mean: Float[Tensor, "*b k s"]
    predicted_covariance: Float[Tensor, "*b k s s"]
    predicted_log_probability: Float[Tensor, "*b k"]
    mean: Float[Tensor, "*b k s"]
    covariance: Float[Tensor, "*b k s s"]
    log_probability: Float[Tensor, "*b k"]
    mode_log_likelihood: Float[Tensor, "*b k"]
    step_log_likelihood: Float[Tensor, "*b"]
    failure: Int[Tensor, "*b k"]

    @classmethod
    def joined(cls, moved: "list[Moved]") -> "Moved":
        """Stack steps along a time dimension after the targets."""
        first = moved[0].step_log_likelihood.ndim
        return cls(*(torch.stack(parts, first) for parts in zip(*moved, strict=True)))


@runtime_checkable
class Observing(Protocol):
    """Interface of the parameters of a step, linear or nonlinear, that `combined` needs (models/)."""

    @property
    def has(self) -> Bool[Tensor, "k s"] | None:
        """Mask [k, s] of the components that each mode has."""

    def expect(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """Predicted moments of the observation, mode by mode."""

    def difference(self, left: Float[Tensor, "*#b o"], right: Float[Tensor, "*#b o"]) -> Float[Tensor, "*#b o"]:
        """left - right, wrapped where observations are angles."""


def expect_modes(
    parameters: Observing,
    mean: Float[Tensor, "*b k s"],
    covariance: Float[Tensor, "*b k s s"],
    log_probability: Float[Tensor, "*b k"],
) -> tuple[Tensor, ...]:
    """Predicted moments of the state and of the observation, for all modes combined and given each mode."""
    share = log_probability.exp()
    overall = to_one(share, mean, covariance, parameters.has)
    by_mode = parameters.expect(mean, covariance)
    return (*overall, mean, covariance, log_probability, *collapse(share, *by_mode), *by_mode)


def combined(
    moved: Moved,
    parameters: Observing,
    observation: Float[Tensor, "*b o"],
    observed: Bool[Tensor, "*b o"] | None,
    log_likelihood: Float[Tensor, "*c"],
) -> Filtered:
    """Compute all fields of `Filtered` from those of each mode, for one step or all steps of a series."""
    after = moved.log_probability.exp()
    mean, covariance = to_one(after, moved.mean, moved.covariance, parameters.has)
    predicted_mean, predicted_covariance, *_, overall, overall_S, expected, S = expect_modes(
        parameters, moved.predicted_mean, moved.predicted_covariance, moved.predicted_log_probability
    )
    y = observation if observed is None else observation.masked_fill(~observed, torch.nan)
    return Filtered(
        mean,
        covariance,
        moved.mean,
        moved.covariance,
        moved.log_probability,
        predicted_mean,
        predicted_covariance,
        moved.predicted_mean,
        moved.predicted_covariance,
        moved.predicted_log_probability,
        parameters.difference(y, overall),
        overall_S,
        parameters.difference(y.unsqueeze(-2), expected),
        S,
        moved.mode_log_likelihood,
        moved.step_log_likelihood,
        log_likelihood,
    )


torch.serialization.add_safe_globals([FilterState, Filtered])  # for torch.load with weights_only=True
