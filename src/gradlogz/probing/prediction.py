"""What a prediction is: one file with the same five names.

    formula        what is computed, in one line
    statistics     of an event in a batch: statistics that merge, by name
    evaluate       of the merged statistics: values with intervals, by layer and head
    null           the same values where the claim says nothing: of random weights, rotated matrices, permuted heads
    verdict        of values beside their nulls: supported, refuted, undecided or not applicable, and why

and two sentences, `claim` (what the theory predicts) and `refutes` (what would refute it).

Read next: predictions/entropy.py (the plainest), run_probe.py (who calls them).
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch

from .._typing import Bool, Tensor
from .corpus.text import Batch
from .findings import Finding
from .inside.architecture import Layout
from .inside.capturing import Attended, Event, Normed, Passed
from .inside.weights import HeadWeights

Ruling = Literal["supported", "refuted", "undecided", "not applicable"]


class Finished(NamedTuple):
    """A batch has passed the model: what it returned, [b, n, vocabulary] logits where it has a head for words."""

    output: Any
    inputs: dict[str, Tensor]


class Probed(NamedTuple):
    """A model that is probed.

    weights: the matrices of each attention layer, or the reason why it has none.
    seed: of everything random in evaluations and nulls.
    """

    name: str
    layout: Layout
    weights: Mapping[str, HeadWeights | str]
    seed: int


class Measured(NamedTuple):
    """One value with its interval; of a null, the value expected and the band it stays in.

    layer: the name that `capture` gives, numbered from the second call of a tied layer on.
    head: None for what concerns the whole layer; layer "" for what concerns the whole model.
    """

    layer: str
    head: int | None
    quantity: str
    value: float
    low: float = torch.nan
    high: float = torch.nan
    tokens: int = 0


class Judgement(NamedTuple):
    """The findings with their verdicts, and the verdict on the claim for the whole model with a sentence of reasons.

    value, low, high, null: the number that the sentence is about; quantity: which of the quantities of the findings it
        is a summary of.
    note: how many heads stand after the correction of Benjamini and Hochberg.
    """

    findings: list[Finding]
    verdict: Ruling
    words: str
    value: float = torch.nan
    low: float = torch.nan
    high: float = torch.nan
    null: float = torch.nan
    quantity: str = ""
    note: str = ""


class Twin(NamedTuple):
    """The same architecture with random weights, and what it showed on a part of the same tokens."""

    state: dict[str, Any]
    model: Probed


@runtime_checkable
class Prediction(Protocol):
    """A file of predictions/."""

    __name__: str
    claim: str
    formula: str
    refutes: str

    @staticmethod
    def statistics(event: Event | Finished, batch: Batch, memory: dict[str, Any]) -> dict[str, Any] | None:
        """What this event adds, by names of the prediction's own choice; `memory` lasts for one batch."""

    @staticmethod
    def evaluate(state: Mapping[str, Any], model: Probed) -> list[Measured]:
        """Values with intervals."""

    @staticmethod
    def null(state: Mapping[str, Any], model: Probed, twin: Twin | None) -> list[Measured]:
        """Values under the null, for the same layers, heads and quantities; those without one are left out."""

    @staticmethod
    def verdict(findings: list[Finding]) -> Judgement:
        """The verdicts."""


def real(batch: Batch, event: Attended | Passed | Normed) -> Bool[Tensor, "b n"]:
    """The tokens of an event that are no padding: its queries, or the tokens of the stream."""
    shape = event.attention.log_normalizer.shape if isinstance(event, Attended) else event[1].shape[:2]
    b, n = shape[0], shape[-1]
    device = event.attention.log_normalizer.device if isinstance(event, Attended) else event[1].device
    for name in ("attention_mask", "decoder_attention_mask"):
        mask = batch.inputs.get(name)
        if mask is not None and tuple(mask.shape) == (b, n):
            return mask.to(device).bool()
    return torch.ones(b, n, dtype=torch.bool, device=device)


def split(layer: str) -> tuple[str, int]:
    """The module of a layer and which call of it: "layer#2" is the second."""
    name, _, call = layer.partition("#")
    return name, int(call or 1)
