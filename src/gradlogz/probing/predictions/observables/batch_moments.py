"""The moments of the tokens of a batch, taken once for all predictions that want them.

    token_moments(x)       count, mean and products of the real tokens of one tensor [b, n, D]
    token_moments(x, y)    those of two tensors and their products with each other

Products of a wide stream are what takes the memory of a probe; predictions declare beforehand how many bytes.

Read next: ../../statistics/comoments.py.
"""

from typing import Literal

from ...._typing import Bool, Float, Tensor
from ...batch_pass import BatchPass
from ...inside.architecture import Architecture
from ...statistics import GROUPS, Comoments, GroupMoments, comoments_of
from ...statistics.comoments import numbers_of

DOUBLE = 8  # bytes of a number of float64


def token_moments(
    x: Float[Tensor, "b n D"],
    y: Float[Tensor, "b n E"] | None = None,
    *,
    batch_pass: BatchPass,
    mask: Bool[Tensor, "b n"],
    yy: Literal["full", "diagonal", "trace"] = "trace",
) -> Comoments:
    """The moments of the tokens under a mask, of the group of the batch; of one tensor once for all predictions."""
    group, weights = batch_pass.batch.group, mask.flatten()
    if y is not None:
        return comoments_of(x.flatten(0, 1), y.flatten(0, 1), group=group, weights=weights, yy=yy)
    return batch_pass.once(x, "moments", lambda: comoments_of(x.flatten(0, 1), group=group, weights=weights))


def bytes_of_moments(width: int, other: int = 0) -> int:
    """What the products of tokens of this width, and with vectors of another one, take for all groups in float64."""
    return DOUBLE * GROUPS * (numbers_of(width) + width * other)


def matrices_of_attention_inputs(architecture: Architecture) -> dict[str, int]:
    """The bytes of the products of what each attention sublayer reads."""
    size = bytes_of_moments(architecture.width)
    return {f"input of {s.name}": size for s in architecture.sublayers if s.kind == "attention"}


def on_cpu(comoments: Comoments | None) -> Comoments | None:
    """The same moments where the weights of heads are."""
    if comoments is None:
        return None
    groups = ((None if g is None else [None if t is None else t.cpu() for t in g]) for g in comoments.groups)
    return Comoments(tuple(None if g is None else GroupMoments(*g) for g in groups))  # type: ignore[arg-type]
