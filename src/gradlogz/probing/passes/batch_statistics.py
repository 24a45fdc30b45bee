"""One batch through the model: what it adds to the state of every prediction.

    batch -> model -> events -> statistics(event, batch_pass) of each prediction -> merged

Read next: ../inside/following.py (the events), ../batch_pass.py (what predictions share), ../run_probe.py (all
batches).
"""

import gc
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..._errors import InputRuntimeError, InputValueError
from ..._typing import Tensor
from ..batch_pass import BatchPass
from ..corpus.batching import Batch
from ..inside.architecture import Architecture
from ..inside.events import Attended, Event, ForwardOutput
from ..inside.following import follow
from ..inside.hooks import without_cache
from ..prediction import Prediction
from ..statistics import merge
from .extreme_tokens import Candidates, Standing, candidates, resolved


def statistics_of(
    model: nn.Module, architecture: Architecture, batch: Batch, predictions: Sequence[Prediction]
) -> tuple[dict[str, Any], list[Standing]]:
    """{prediction: its state} of one batch, and the tokens of the batch that stand out.

    A batch that does not fit into memory is passed in halves.
    """
    found = _fitting(model, architecture, batch, predictions)
    if found is not None:
        return found
    rows = len(batch.keys)
    if rows == 1:
        fact = f"one row of {next(iter(batch.inputs.values())).shape[-1]} tokens that does not"
        remedy = "Pass a smaller length=, or another device."
        raise InputRuntimeError("probe", "batch", f"a batch must fit into memory, got {fact}", remedy)
    gc.collect()  # what the pass that failed has left may hold itself
    if batch.keys.is_cuda:
        torch.cuda.empty_cache()
    halves = [batch.rows(range(rows // 2)), batch.rows(range(rows // 2, rows))]
    one, other = (statistics_of(model, architecture, half, predictions) for half in halves)
    return merge(one[0], other[0]), [*one[1], *other[1]]


def _fitting(
    model: nn.Module, architecture: Architecture, batch: Batch, predictions: Sequence[Prediction]
) -> tuple[dict[str, Any], list[Standing]] | None:
    """The same of a batch as it is; None if it does not fit into memory, with nothing of it left there."""
    state: dict[str, Any] = {p.name: p.empty() for p in predictions}
    batch_pass = BatchPass(batch)
    faults: dict[str, Tensor] = {}
    standing: list[Candidates] = []

    def tell(event: Event | ForwardOutput) -> None:
        batch_pass.begin_event()
        if isinstance(event, Attended):
            rows = batch_pass.real(event).unsqueeze(1)
            bad = torch.isnan(event.attention.log_normalizer) | torch.isposinf(event.attention.log_normalizer)
            faults[event.layer] = (bad & rows).any(-1).any(0)
            standing.extend(candidates(event, batch_pass))
        for prediction in predictions:
            added = prediction.statistics(event, batch_pass)
            if added is not None:
                state[prediction.name] = merge(state[prediction.name], added)

    try:
        with follow(model, architecture, tell), torch.no_grad():
            output = model(**batch.inputs, **without_cache(model))
        with torch.no_grad():
            tell(ForwardOutput(output, batch.inputs))
    except torch.OutOfMemoryError:
        return None
    _check_numbers(faults)
    return state, resolved(standing, batch)


def _check_numbers(faults: Mapping[str, Tensor]) -> None:
    """Every log normaliser was a number; asked once for a batch, since a GPU waits for the answer."""
    if not faults or not bool(torch.stack([bad.any() for bad in faults.values()]).any()):
        return
    layer = next(layer for layer, bad in faults.items() if bool(bad.any()))
    head = int(faults[layer].nonzero()[0, 0])
    remedy = "Look for NaN in the weights; in half precision, load the model in float32."
    raise InputValueError("probe", "model", f"log normalisers must be numbers, got NaN in {layer}, head {head}", remedy)
