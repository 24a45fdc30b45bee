"""What fits into the memory of a device: tokens of a batch, and the matrices that predictions keep.

Read next: ../prediction.py (who declares matrices), ../run_probe.py (who asks beforehand).
"""

import os
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ..._errors import InputValueError
from ..corpus.batching import PADDED
from ..inside.architecture import Architecture
from ..prediction import Prediction

LARGE = 2**30  # bytes of matrices that are told beforehand
ROOM, MOST = 2**34, 8  # bytes of a GPU for each 8192 tokens of a batch, and how many times these are enough


def matrix_bytes(architecture: Architecture, predictions: Iterable[Prediction]) -> int:
    """The bytes of the matrices of all predictions; those of one name are kept once."""
    matrices: dict[str, int] = {}
    for prediction in predictions:
        matrices |= prediction.matrices(architecture)
    return sum(matrices.values())


def check_memory(model: nn.Module, architecture: Architecture, predictions: Sequence[Prediction], *, twin: bool) -> str:
    """The matrices of the stream will fit, those of the random twin too; a sentence about them if they are large."""
    size = matrix_bytes(architecture, predictions)
    if twin:
        size += matrix_bytes(architecture, [p for p in predictions if p.baseline == "statistics"])
    if size < LARGE:
        return ""
    memory = memory_of(next(model.parameters()).device)
    words = f"{size / 2**30:.1f} GiB of matrices of the stream"
    if memory is not None and size > memory:
        fact, there = f"{words}, of width {architecture.width}", f"There are {memory / 2**30:.1f}"
        *others, last = [p.name for p in predictions if p.matrices(architecture)]
        names = f"{', '.join(others)} and {last}" if others else last
        remedy = f"{there}: choose predictions without {names}, or twin=0, or another device."
        raise InputValueError("probe", "statistics", f"statistics must fit into memory, got {fact}", remedy)
    return f"{words} will be kept."


def tokens_of_a_batch(model: nn.Module) -> int:
    """With padding: as many more on a GPU as it has room for, since there a batch costs the host the same time."""
    device = next(model.parameters()).device
    room = (memory_of(device) or 0) // ROOM if device.type == "cuda" else 1
    return PADDED * min(max(room, 1), MOST)


def memory_of(device: torch.device) -> int | None:
    """The bytes of memory of a device; None if it does not say."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    known = device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else None
