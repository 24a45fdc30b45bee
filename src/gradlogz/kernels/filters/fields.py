"""What kernels of switching filters read and write, whoever compiles them.

Read next: cpu.py and gpu.py, who do.
"""

from collections.abc import Sequence
from typing import NamedTuple

from ..._typing import Float, Tensor

MODEL_ENDS = {"T": 2, "F": 3, "Q": 3, "H": 3, "R": 3, "b": 2, "d": 2}  # dimensions of one step
# What is computed for the fields that are wanted, and not else: the mean and the covariance of all modes together, what
# each mode says (where histories are not modes), what each expected, the same together, what was not expected.
MEAN, COVARIANCE, MODES, BEFORE, BEFORE_TOGETHER, INNOVATION = (1 << i for i in range(6))


class ReportedField(NamedTuple):
    """A field of `Filtered`, for one step.

    Attributes:
        shape: letters of its dimensions: modes k, state s, observation o.
        array: where it lies in the memory of a CPU thread (`Memory` of targets_in_lanes.py).
        needs: what must be computed for it on the CPU.
    """

    shape: str
    array: str
    needs: int


# The fields of `Filtered` in their order, but for the last; the constants of targets_in_threads.cu are made from it.
# Law: tests/kernels/test_the_fields_of_kernels_are_those_of_filtered.py.
FIELDS = {
    "mean": ReportedField("s", "whole_m", MODES | MEAN),
    "covariance": ReportedField("ss", "whole_P", MODES | MEAN | COVARIANCE),
    "mode_mean": ReportedField("ks", "mode_m", MODES),
    "mode_covariance": ReportedField("kss", "mode_P", MODES),
    "log_mode_probability": ReportedField("k", "log_pi", MODES),
    "predicted_mean": ReportedField("s", "whole_predicted_m", BEFORE | BEFORE_TOGETHER),
    "predicted_covariance": ReportedField("ss", "whole_predicted_P", BEFORE | BEFORE_TOGETHER),
    "predicted_mode_mean": ReportedField("ks", "predicted_m", BEFORE),
    "predicted_mode_covariance": ReportedField("kss", "predicted_P", BEFORE),
    "predicted_log_mode_probability": ReportedField("k", "log_c", BEFORE),
    "innovation": ReportedField("o", "innovation", BEFORE | INNOVATION),
    "innovation_covariance": ReportedField("oo", "whole_S", BEFORE | INNOVATION),
    "mode_innovation": ReportedField("ko", "expected", BEFORE | INNOVATION),
    "mode_innovation_covariance": ReportedField("koo", "S", BEFORE),
    "mode_log_likelihood": ReportedField("k", "likelihood", BEFORE),
    "step_log_likelihood": ReportedField("", "step", 0),
}


class KernelResult(NamedTuple):
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
