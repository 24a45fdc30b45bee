"""What a worker computes for a part: statistics, values of draws, or the matrices of one layer.

    text       statistics of the model, and its extreme tokens
    baseline   statistics of the random-weights baseline, or the reason why there is none
    draws      values of predictions in draws of the matched baseline, or the reason why there are none
    weights    matrices of one attention layer of the model, or of its baseline

Read next: divided_pass.py (which joins them), model_source.py (the model of a worker).
"""

from typing import Any, Literal, NamedTuple

import torch

from ...engine.work_folder import WorkFolder
from ..corpus.batching import Batch
from ..inside.architecture import Architecture
from ..inside.embeddings import WordVectors, word_vectors_of
from ..inside.head_weights import HeadWeights
from ..inside.weights import weights_of
from ..passes.batch_statistics import statistics_of
from ..passes.extreme_tokens import ExtremeToken, greatest
from ..passes.matched_draws import Draw, drawn
from ..passes.placement import placed
from ..prediction import Probed
from .corpus_parts import Part, batches_in
from .model_source import MODELS, ModelSource, Opened, predictions_of


class PartWork(NamedTuple):
    """One item of work. layer: number of the attention layer whose matrices are computed."""

    kind: Literal["text", "baseline", "draws", "weights", "model"]
    part: Part
    random: bool = False
    layer: int = 0


class TextState(NamedTuple):
    """Statistics of a part of the text, and its extreme tokens."""

    state: dict[str, Any]
    extreme: list[ExtremeToken]


class ModelState(NamedTuple):
    """Architecture and word vectors of a model; of a baseline the architecture alone."""

    architecture: Architecture
    words: dict[str, WordVectors]


PartState = TextState | ModelState | dict[str, Any] | list[Draw] | HeadWeights | str | None


def part_state(place: WorkFolder, source: ModelSource, first: str, work: PartWork) -> PartState:
    """Return the state of a part; a text is the reason why there is none."""
    (batch,) = batches_in(place, Part([first]))
    opened = MODELS.opened(source, batch, random=work.random)
    if opened.reason:
        return opened.reason
    if work.kind in ("model", "weights"):
        return _of_model(opened, batch, work)
    predictions = predictions_of(source)
    batches = batches_in(place, work.part)
    if work.kind == "draws":
        probed = Probed(source.label, opened.architecture, {}, source.seed)
        matched = [p for p in predictions if p.baseline == "matched"]
        try:
            return list(drawn(opened.model, list(batches), work.part.numbers, matched, probed))
        except (ValueError, torch.OutOfMemoryError) as error:  # logits that overflow, or too little memory
            return str(error)
    measured = [p for p in predictions if not work.random or p.baseline != "weights"]
    state: dict[str, Any] = {}
    extreme: list[ExtremeToken] = []
    for each in batches:
        state, found = statistics_of(opened.model, opened.architecture, placed(each, opened.model), measured, state)
        extreme = greatest([*extreme, *found])
    return state if work.random else TextState(state, extreme)


def _of_model(opened: Opened, first: Batch, work: PartWork) -> PartState:
    model, architecture = opened.model, opened.architecture
    if work.kind == "model":
        return ModelState(architecture, {} if work.random else word_vectors_of(model, architecture))
    layer = architecture.attention[work.layer]
    return weights_of(model, architecture, placed(first, model).inputs, only=layer).get(layer)
