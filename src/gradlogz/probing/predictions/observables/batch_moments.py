"""Moments of the tokens of a batch, cached for all predictions.

    token_moments(x)       count, mean and products of the real tokens of one tensor [b, n, D]
    token_moments(x, y)    moments of two tensors, with their cross products

Products of a wide residual stream dominate the memory of a probe; predictions declare their size in bytes.

Read next: ../../statistics/comoments.py.
"""

from typing import Literal

from ...._typing import Bool, Float, Tensor
from ...batch_pass import BatchPass
from ...inside.architecture import Architecture
from ...statistics import GROUPS, Comoments, GroupMoments, comoments_of
from ...statistics.comoments import numbers_of

DOUBLE = 8  # bytes of a float64


def token_moments(
    x: Float[Tensor, "b n D"],
    y: Float[Tensor, "b n E"] | None = None,
    *,
    batch_pass: BatchPass,
    mask: Bool[Tensor, "b n"],
    yy: Literal["full", "diagonal", "trace"] = "trace",
) -> Comoments:
    """Moments of the tokens under a mask, for the group of the batch; those of one tensor are cached."""
    group, weights = batch_pass.batch.group, mask.flatten()
    if y is not None:
        return comoments_of(x.flatten(0, 1), y.flatten(0, 1), group=group, weights=weights, yy=yy)
    return batch_pass.once(x, "moments", lambda: comoments_of(x.flatten(0, 1), group=group, weights=weights))


def bytes_of_moments(width: int, other: int = 0) -> int:
    """Bytes of the products of tokens of this width, and with vectors of another width, for all groups in float64."""
    return DOUBLE * GROUPS * (numbers_of(width) + width * other)


def matrices_of_attention_inputs(architecture: Architecture) -> dict[str, int]:
    """Bytes of the products of the inputs of each attention sublayer."""
    size = bytes_of_moments(architecture.width)
    return {f"input of {s.name}": size for s in architecture.sublayers if s.kind == "attention"}


def on_cpu(comoments: Comoments | None) -> Comoments | None:
    """Moments on the CPU, where the weights of heads are."""
    if comoments is None:
        return None
    groups = ((None if g is None else [None if t is None else t.cpu() for t in g]) for g in comoments.groups)
    return Comoments(tuple(None if g is None else GroupMoments(*g) for g in groups))  # type: ignore[arg-type]
