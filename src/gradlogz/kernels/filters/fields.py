"""Names and shapes of the tensors that kernels of switching filters read and write.

Read next: cpu.py (numba), gpu.py (CUDA).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..._typing import Float, Tensor

MODEL_ENDS = {"T": 2, "F": 3, "Q": 3, "H": 3, "R": 3, "b": 2, "d": 2}  # dimensions of one step
# Parts of the computation that requested fields need: combined mean and covariance, filtered modes (if histories are
# not modes), predicted modes, combined prediction, innovations.
MEAN, COVARIANCE, MODES, BEFORE, BEFORE_TOGETHER, INNOVATION = (1 << i for i in range(6))


class ReportedField(NamedTuple):
    """A field of `Filtered`, for one step.

    Attributes:
        shape: letters of its dimensions: modes k, state s, observation o.
        array: its array in the memory of a CPU thread (`Memory` of targets_in_lanes.py).
        needs: bits of the computations that it needs on the CPU.
    """

    shape: str
    array: str
    needs: int


# Fields of `Filtered` in order, except the last; gpu.py makes the constants of targets_in_threads.cu from them.
# Law: tests/kernels/test_the_fields_of_kernels_are_those_of_filtered.py.
FIELDS = {
    "mean": ReportedField("s", "combined_m", MODES | MEAN),
    "covariance": ReportedField("ss", "combined_P", MODES | MEAN | COVARIANCE),
    "mode_mean": ReportedField("ks", "mode_m", MODES),
    "mode_covariance": ReportedField("kss", "mode_P", MODES),
    "log_mode_probability": ReportedField("k", "log_pi", MODES),
    "predicted_mean": ReportedField("s", "combined_predicted_m", BEFORE | BEFORE_TOGETHER),
    "predicted_covariance": ReportedField("ss", "combined_predicted_P", BEFORE | BEFORE_TOGETHER),
    "predicted_mode_mean": ReportedField("ks", "predicted_m", BEFORE),
    "predicted_mode_covariance": ReportedField("kss", "predicted_P", BEFORE),
    "predicted_log_mode_probability": ReportedField("k", "log_c", BEFORE),
    "innovation": ReportedField("o", "innovation", BEFORE | INNOVATION),
    "innovation_covariance": ReportedField("oo", "combined_S", BEFORE | INNOVATION),
    "mode_innovation": ReportedField("ko", "expected", BEFORE | INNOVATION),
    "mode_innovation_covariance": ReportedField("koo", "S", BEFORE),
    "mode_log_likelihood": ReportedField("k", "likelihood", BEFORE),
    "step_log_likelihood": ReportedField("", "step", 0),
}


# Fields of `Filtered` that backward passes read.
FILTERED_MODES = ("mode_mean", "mode_covariance", "log_mode_probability")


class KernelResult(NamedTuple):
    """Fields of `Filtered` except the last, None if not requested; and the state after the last step."""

    reported: tuple[Tensor | None, ...]
    mean: Float[Tensor, "*b g s"]
    covariance: Float[Tensor, "*b g s s"]
    log_probability: Float[Tensor, "*b h"]
    log_likelihood: Float[Tensor, "*b"]


def in_one_piece(field: Tensor, ending: int, batch: Sequence[int]) -> tuple[Tensor, int, int]:
    """Return a contiguous field, and its strides from target to target and from step to step.

    The last `ending` dimensions are those of one step; time and targets may precede them. A stride is 0 if the field
    does not change.
    """
    if field.ndim == ending:
        return field.contiguous(), 0, 0
    *targets, steps = field.shape[: field.ndim - ending]
    items = field.shape[field.ndim - ending :].numel()
    is_shared = all(n == 1 or stride == 0 for n, stride in zip(targets, field.stride(), strict=False))
    field = field[(0,) * len(targets)] if is_shared else field.expand(*batch, *field.shape[len(targets) :])
    return field.contiguous(), 0 if is_shared else steps * items, items if steps > 1 else 0


def summed(outside: Tensor, slope: Tensor, shape: torch.Size) -> Tensor:
    """Sum over targets of the gradient of each target times that in its result, in the shape of a field."""
    weighted = slope * outside.reshape(*outside.shape, *[1] * (slope.ndim - outside.ndim))
    if len(shape) == weighted.ndim + 1:  # a time dimension of size 1 after the targets
        weighted = weighted.unsqueeze(outside.ndim)
    return weighted.sum_to_size(shape)
