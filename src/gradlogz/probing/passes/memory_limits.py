"""Memory limits of a device: the size of a batch, and the matrices that predictions accumulate.

Read next: ../prediction.py (declares the matrices), ../run_probe.py (checks the memory before a pass).
"""

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..._errors import InputValueError
from ..corpus.batching import PADDED
from ..inside.architecture import Architecture
from ..prediction import Prediction

LARGE = 2**30  # bytes of matrices from which their size is reported before the pass
ROOM, MOST = 2**34, 8  # GPU memory in bytes per PADDED tokens of a batch, and the maximum multiple of PADDED


def matrix_bytes(architecture: Architecture, predictions: Iterable[Prediction]) -> int:
    """Return the size in bytes of the matrices of all predictions; matrices of equal name are stored once."""
    matrices: dict[str, int] = {}
    for prediction in predictions:
        matrices |= prediction.matrices(architecture)
    return sum(matrices.values())


def check_memory(
    model: nn.Module, architecture: Architecture, predictions: Sequence[Prediction], *, baseline: bool
) -> str:
    """Raise if the matrices of the residual stream do not fit into memory; return a sentence if they are large.

    baseline: whether the random-weights baseline is measured too.
    """
    size = matrix_bytes(architecture, predictions)
    if baseline:
        size += matrix_bytes(architecture, [p for p in predictions if p.baseline == "statistics"])
    if size < LARGE:
        return ""
    memory = memory_of(next(model.parameters()).device)
    gibibytes = f"{size / 2**30:.1f} GiB"
    if memory is not None and size > memory:
        problem = (
            f"the matrices of the predictions need {gibibytes} at width {architecture.width}, but the memory has "
            f"{memory / 2**30:.1f} GiB"
        )
        *others, last = [p.name for p in predictions if p.matrices(architecture)]
        names = f"{', '.join(others)} and {last}" if others else last
        remedy = f"Leave out {names}, pass baseline=0, or use another device."
        raise InputValueError("probe", "predictions", problem, remedy)
    return f"The matrices of the residual stream need {gibibytes} of memory."


def tokens_of_a_batch(model: nn.Module) -> int:
    """Return the number of tokens of a batch, padding included; larger on a GPU, where launch time dominates."""
    device = next(model.parameters()).device
    room = (memory_of(device) or 0) // ROOM if device.type == "cuda" else 1
    return PADDED * min(max(room, 1), MOST)


def memory_of(device: torch.device) -> int | None:
    """Return the memory of a device in bytes, None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    known = device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else None
