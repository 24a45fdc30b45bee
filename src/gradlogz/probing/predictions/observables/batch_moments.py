"""The moments of the tokens of a batch, taken once for all predictions that want them.

    cloud(x)       count, mean and products of the real tokens of one tensor [b, n, D]
    cloud(x, y)    those of two tensors and their products with each other

Predictions see the same event, and several need the products of the same tensors: they are remembered as long as the
tensor lives. Products of a wide stream are what takes the memory of a probe, and `bytes_of` says how much beforehand.

Read next: ../../statistics/comoments.py.
"""

from collections.abc import Iterable
from typing import Literal

from torch.utils.weak import WeakIdKeyDictionary

from ...._typing import Bool, Float, Tensor
from ...corpus.text import Batch
from ...inside.architecture import Layout
from ...statistics import GROUPS, Comoments, Moments, comoments_of
from ...statistics.comoments import numbers_of

_known: WeakIdKeyDictionary = WeakIdKeyDictionary()  # what is here follows from its key alone


def cloud(
    x: Float[Tensor, "b n D"],
    y: Float[Tensor, "b n E"] | None = None,
    *,
    batch: Batch,
    mask: Bool[Tensor, "b n"],
    yy: Literal["full", "diagonal", "trace"] = "trace",
) -> Comoments:
    """The moments of the tokens under a mask, of the group of the batch."""
    if y is not None:
        return comoments_of(x.flatten(0, 1), y.flatten(0, 1), group=batch.group, weights=mask.flatten(), yy=yy)
    if x not in _known:
        _known[x] = comoments_of(x.flatten(0, 1), group=batch.group, weights=mask.flatten())
    return _known[x]


def bytes_of(layout: Layout, names: Iterable[str]) -> int:
    """What the products of the stream take, once all groups were met, for the predictions of these names.

    In float64 for eight groups: of what each attention sublayer reads for tie and qk_geometry, which share it; of what
    each feed-forward sublayer reads and of its stream, with its update, for linearity.
    """
    wanted, D = set(names), layout.width
    own, numbers = numbers_of(D), 0
    for sublayer in layout.sublayers:
        if sublayer.kind == "attention" and wanted & {"tie", "qk_geometry"}:
            numbers += own
        if sublayer.kind == "feed_forward" and "linearity" in wanted:
            numbers += (own + D * D) * (1 if sublayer.reads is None else 2)
    return 8 * GROUPS * numbers


def on_cpu(comoments: Comoments | None) -> Comoments | None:
    """The same moments where the weights of heads are."""
    if comoments is None:
        return None
    groups = ((None if g is None else [None if t is None else t.cpu() for t in g]) for g in comoments.groups)
    return Comoments(tuple(None if g is None else Moments(*g) for g in groups))  # type: ignore[arg-type]
