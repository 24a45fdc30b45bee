"""Keyword arguments that losses pass on to each other."""

from typing import TYPE_CHECKING, TypedDict

import torch

from ..._typing import Bool, Float, Int, Tensor
from ..validation import Ids
from .mined_pairs import MinedPairs

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Temperature = float | Float[Tensor, ""]


class InfoNCEOptions(TypedDict, total=False):
    """Keyword arguments that `n_pair` passes on to `info_nce`."""

    temperature: Temperature
    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None
    log_weights: Float[Tensor, " n"] | None
    ids: Ids | None
    mask: Bool[Tensor, "m n"] | None
    bias: Float[Tensor, "m n"] | None
    margin: float
    hard_negatives: Float[Tensor, "m k d"] | None
    decoupled: bool
    normalize: bool
    precision: torch.dtype | None
    group: "ProcessGroup | None"
    ring: bool


class LossOptions(TypedDict, total=False):
    """Keyword arguments that `Contrastive` passes on to its loss."""

    positive: Int[Tensor, " m"] | Float[Tensor, "m d"] | None
    negatives: Int[Tensor, "m k"] | Int[Tensor, " k"] | None
    log_weights: Float[Tensor, " n"] | None
    ids: Ids | None
    mask: Bool[Tensor, "m n"] | None
    bias: Float[Tensor, "m n"] | None
    noise: Float[Tensor, " n"]
    log_normalizer: float | Float[Tensor, ""] | Float[Tensor, " m"]
    offset: float | Float[Tensor, ""]
    margin: float
    hard_negatives: Float[Tensor, "m k d"] | None
    candidates: Float[Tensor, "n d"] | None
    candidate_labels: Int[Tensor, " n"] | None
    group: "ProcessGroup | None"
    ring: bool
    denominator: str
    pairs: MinedPairs | None
    mean_inside_log: bool
    expected_accuracy: bool
    decoupled: bool
    normalize: bool
    precision: torch.dtype | None
    reduction: str
