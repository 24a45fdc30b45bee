"""What a filter knows, after each step and between steps.

    m = sum_j pi_j m_j,   P = sum_j pi_j (P_j + (m_j - m)(m_j - m)^T)              the modes combined, never fed back
    v_j = y - H_j m_j - d_j,   S_j = H_j P_j H_j^T + R_j                            what each mode expected to see
    v = y - sum_j c_j (H_j m_j + d_j)                                               what all of them did

Read next: gaussian/switching.py (where these come from), gaussian/consistency.py (whether they are what they claim).
"""

from typing import NamedTuple, Protocol, runtime_checkable

import torch

from .._typing import Bool, Float, Int, Tensor
from .moment_matching import GaussianMoments, collapse, to_one


class FilterState(NamedTuple):
    """What a filter carries from one step to the next: Gaussians of mode histories and their probabilities.

    For imm and gpb2 the histories h are the k modes. gpb1 keeps one Gaussian (g = 1) and k probabilities; deeper ones
    keep up to k^(depth-1) histories, the newest mode last in the index. Tensors may be those that were given to `init`
    or are reported: what is changed in place is changed in both.
    """

    mean: Float[Tensor, "*b g s"]
    covariance: Float[Tensor, "*b g s s"]
    log_probability: Float[Tensor, "*b h"]
    log_likelihood: Float[Tensor, "*b"]


class Filtered(NamedTuple):
    """The law of the state at each time given what was observed up to it; *b holds targets and, of a series, time.

    Where a filter was asked for some `fields`, the others are None.

    Attributes:
        mean: of the state, all modes combined.
        covariance: of the state, with the spread between modes.
        mode_mean: given the mode of this time; of a mode that is impossible, what it would predict.
        mode_covariance: likewise.
        log_mode_probability: of each mode, -inf where it is impossible.
        predicted_mean: the same before the observation of this time.
        predicted_covariance: likewise.
        predicted_mode_mean: likewise, given the mode.
        predicted_mode_covariance: likewise.
        predicted_log_mode_probability: likewise.
        innovation: the observation minus what was expected of it; NaN where nothing was observed.
        innovation_covariance: of the innovation.
        mode_innovation: the same given the mode.
        mode_innovation_covariance: likewise.
        mode_log_likelihood: log p(y_t | s_t, past).
        step_log_likelihood: log p(y_t | past); -inf for what no mode can produce, which then changes nothing.
        log_likelihood: log p(y_1 ... y_t), over the whole series; [*b] without time.
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


class Moved(NamedTuple):
    """One step, mode by mode: what is known before and after the observation."""

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
        """Steps one after the other, time after targets."""
        first = moved[0].step_log_likelihood.ndim
        return cls(*(torch.stack(parts, first) for parts in zip(*moved, strict=True)))


@runtime_checkable
class Observing(Protocol):
    """What reporting needs of the parameters of a step, whether matrices or functions (models/)."""

    @property
    def has(self) -> Bool[Tensor, "k s"] | None:
        """Which components of the state each mode has."""

    def expect(self, mean: Float[Tensor, "*#b k s"], covariance: Float[Tensor, "*#b k s s"]) -> GaussianMoments:
        """The distribution of the next observation, mode by mode."""

    def difference(self, left: Float[Tensor, "*#b o"], right: Float[Tensor, "*#b o"]) -> Float[Tensor, "*#b o"]:
        """left - right, wrapped where observations are angles."""


def combined(
    moved: Moved,
    parameters: Observing,
    observation: Float[Tensor, "*b o"],
    seen: Bool[Tensor, "*b o"] | None,
    log_likelihood: Float[Tensor, "*c"],
) -> Filtered:
    """All that is reported, from what each mode says; for one step, or for all steps of a series at once."""
    before, after = moved.predicted_log_probability.exp(), moved.log_probability.exp()
    mean, covariance = to_one(after, moved.mean, moved.covariance, parameters.has)
    predicted_mean, predicted_covariance = to_one(
        before, moved.predicted_mean, moved.predicted_covariance, parameters.has
    )
    expected, S = parameters.expect(moved.predicted_mean, moved.predicted_covariance)
    overall, overall_S = collapse(before, expected, S)
    y = observation if seen is None else observation.masked_fill(~seen, torch.nan)
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
