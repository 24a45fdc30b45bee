"""What kernels of switching filters read and write, whoever compiles them.

Read next: cpu.py and gpu.py, who do.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..._typing import Float, Tensor

MODEL_ENDS = {"T": 2, "F": 3, "Q": 3, "H": 3, "R": 3, "b": 2, "d": 2}  # dimensions of one step
# The fields of `Filtered` but for the last, and the shapes of one step: modes k, state s, observation o.
SHAPES = {
    "mean": "s",
    "covariance": "ss",
    "mode_mean": "ks",
    "mode_covariance": "kss",
    "log_mode_probability": "k",
    "predicted_mean": "s",
    "predicted_covariance": "ss",
    "predicted_mode_mean": "ks",
    "predicted_mode_covariance": "kss",
    "predicted_log_mode_probability": "k",
    "innovation": "o",
    "innovation_covariance": "oo",
    "mode_innovation": "ko",
    "mode_innovation_covariance": "koo",
    "mode_log_likelihood": "k",
    "step_log_likelihood": "",
}


class Finished(NamedTuple):
    """The fields of `Filtered` in their order, but for the last, None where not wanted; and what is carried on."""

    reported: tuple[Tensor | None, ...]
    mean: Float[Tensor, "*b g s"]
    covariance: Float[Tensor, "*b g s s"]
    log_probability: Float[Tensor, "*b h"]
    log_likelihood: Float[Tensor, "*b"]


def in_one_piece(field: Tensor, ending: int, batch: Sequence[int]) -> tuple[Tensor, int, int]:
    """A tensor whose last dimensions are those of a step; its numbers from target to target, and from step to step.

    Before the last dimensions may be time, and targets; 0 where it does not change.
    """
    if field.ndim == ending:
        return field.contiguous(), 0, 0
    *own, steps = field.shape[: field.ndim - ending]
    items = field.shape[field.ndim - ending :].numel()
    is_shared = all(n == 1 or stride == 0 for n, stride in zip(own, field.stride(), strict=False))
    field = field[(0,) * len(own)] if is_shared else field.expand(*batch, *field.shape[len(own) :])
    return field.contiguous(), 0 if is_shared else steps * items, items if steps > 1 else 0
