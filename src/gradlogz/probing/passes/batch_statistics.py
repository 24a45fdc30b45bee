"""One batch through the model: its contribution to the state of every prediction.

    batch -> model -> events -> statistics(event, batch_pass) of each prediction -> merged

Read next: ../inside/following.py (the events), ../batch_pass.py (results shared by predictions), ../run_probe.py (all
batches).
"""

import gc
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..._errors import InputError, InputRuntimeError, InputValueError
from ..._typing import Tensor
from ..batch_pass import BatchPass
from ..corpus.batching import Batch
from ..inside.architecture import Architecture
from ..inside.events import Attended, Event, ForwardOutput
from ..inside.following import follow
from ..inside.hooks import without_cache
from ..prediction import Prediction
from ..statistics import merge
from .extreme_tokens import Candidates, ExtremeToken, candidates, resolved

LOGGER = logging.getLogger(__name__)


def statistics_of(
    model: nn.Module,
    architecture: Architecture,
    batch: Batch,
    predictions: Sequence[Prediction],
    state: dict[str, Any] | None = None,
    *,
    merged: int = 0,
) -> tuple[dict[str, Any], list[ExtremeToken]]:
    """Return {prediction: its state} for one batch, and the extreme tokens of the batch.

    A batch that does not fit into memory is split into halves, which add the events that the batch had not reached.

    state: that of the preceding batches, to which this batch is added event by event. It is used up: matrices before
        and after a batch are never stored together.
    merged: number of events of this batch that are in `state`.
    """
    state = {} if state is None else state
    fitted = _fitting(model, architecture, batch, predictions, state, merged)
    if not isinstance(fitted, int):
        return state, fitted
    rows = len(batch.keys)
    if rows == 1:
        tokens = next(iter(batch.inputs.values())).shape[-1]
        remedy = "Pass a smaller length=, or use another device."
        raise InputRuntimeError("probe", "length", f"a row of {tokens} tokens does not fit into memory", remedy)
    LOGGER.info("a batch of %d rows does not fit into memory and is halved", rows)
    gc.collect()  # the failed pass may have left reference cycles
    if batch.keys.is_cuda:
        torch.cuda.empty_cache()
    halves = [batch.rows(range(rows // 2)), batch.rows(range(rows // 2, rows))]
    extreme: list[ExtremeToken] = []
    for half in halves:
        state, others = statistics_of(model, architecture, half, predictions, state, merged=fitted)
        extreme += others
    return state, extreme


def _fitting(
    model: nn.Module,
    architecture: Architecture,
    batch: Batch,
    predictions: Sequence[Prediction],
    state: dict[str, Any],
    merged: int,
) -> list[ExtremeToken] | int:
    """Add an undivided batch to the state, but for its first `merged` events, and return its extreme tokens.

    If the batch does not fit, its memory is freed, and the number of its events in the state is returned.
    """
    for prediction in predictions:
        state.setdefault(prediction.name, prediction.empty())
    batch_pass = BatchPass(batch)
    faults: dict[str, Tensor] = {}
    largest: list[Candidates] = []
    handled = 0

    def handle(event: Event | ForwardOutput) -> None:
        nonlocal handled
        batch_pass.begin_event()
        if isinstance(event, Attended):
            rows = batch_pass.real(event).unsqueeze(1)
            bad = torch.isnan(event.attention.log_normalizer) | torch.isposinf(event.attention.log_normalizer)
            faults[event.layer] = (bad & rows).any(-1).any(0)
            largest.extend(candidates(event, batch_pass))
        added = {p.name: p.statistics(event, batch_pass) for p in predictions}
        if handled >= merged:
            state.update(merge(state, added))  # of all predictions at once, since they share statistics
        handled += 1

    try:
        with follow(model, architecture, handle), torch.no_grad():
            output = model(**batch.inputs, **without_cache(model))
        with torch.no_grad():
            handle(ForwardOutput(output, batch.inputs))
    except torch.OutOfMemoryError:
        return max(handled, merged)
    except (NotImplementedError, RuntimeError) as error:
        if isinstance(error, InputError) or not getattr(model, "is_quantized", False):
            raise
        problem = f"quantised layers do not compute what a prediction needs ({str(error).partition(chr(10))[0][:80]})"
        remedy = "Pass the model before quantisation; gradlogz probe dequantises checkpoints that it loads."
        raise InputRuntimeError("probe", "model", problem, remedy) from error
    _check_numbers(faults)
    return resolved(largest, batch)


def _check_numbers(faults: Mapping[str, Tensor]) -> None:
    """Raise if a log normaliser is NaN or infinite; checked once per batch, since the check synchronises the GPU."""
    if not faults or not bool(torch.stack([bad.any() for bad in faults.values()]).any()):
        return
    layer = next(layer for layer, bad in faults.items() if bool(bad.any()))
    head = int(faults[layer].nonzero()[0, 0])
    remedy = "Check the weights for NaN; if the model is in half precision, load it in float32."
    raise InputValueError("probe", "model", f"head {head} of {layer} has log normalisers that are not finite", remedy)
