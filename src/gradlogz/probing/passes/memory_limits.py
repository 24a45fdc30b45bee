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
from ..inside.offloading import device_of
from ..prediction import Prediction
from ..statistics import GROUPS, SAMPLE

LARGE = 2**30  # bytes of matrices from which their size is reported before the pass
VECTORS = 4  # float32 vectors of a sampled token that the statistics of a layer store, at most
BUNDLE = 2**33  # bytes of the matrices of one group for which predictions share a pass
JUDGED = 5  # copies of the matrices of a layer, in all groups, that its judgement stores
OTHERS = 2**24  # bytes of all other statistics of a layer; benchmarks/probe_memory.py measured half of it
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
    memory = memory_of(device_of(model))
    gibibytes = f"{size / 2**30:.1f} GiB"
    if memory is not None and size > memory:
        problem = (
            f"the matrices of the predictions need {gibibytes} at width {architecture.width}, but the memory has "
            f"{memory / 2**30:.1f} GiB"
        )
        *others, last = [p.name for p in predictions if p.matrices(architecture)]
        names = f"{', '.join(others)} and {last}" if others else last
        remedy = f"Divide the work (--resume FOLDER), leave out {names}, or use another device."
        raise InputValueError("probe", "predictions", problem, remedy)
    return f"The matrices of the residual stream need {gibibytes} of memory."


def bundles_of(architecture: Architecture, predictions: Sequence[Prediction]) -> list[list[Prediction]]:
    """Return predictions in bundles, each for a pass of its own, such that the matrices of one group fit into BUNDLE.

    A prediction whose matrices alone are larger has a bundle to itself. Nothing depends on the machine.
    """
    bundles: list[list[Prediction]] = [[]]
    for prediction in sorted(predictions, key=lambda p: matrix_bytes(architecture, [p])):  # stable: small ones together
        joined = [*bundles[-1], prediction]
        if bundles[-1] and matrix_bytes(architecture, joined) > BUNDLE * GROUPS:
            bundles.append([prediction])
        else:
            bundles[-1] = joined
    return bundles


def part_bytes(architecture: Architecture, predictions: Sequence[Prediction]) -> int:
    """Return a bound of the bytes of statistics in a process that measures a part, joins parts, or judges all of them.

    A part has the matrices of one group and of one bundle; in the first bundle, which has the predictions without
    matrices, also samples of tokens. Those of two groups are in memory while they are joined. The matrices of one layer
    are judged at a time, in all groups.
    """
    layers = max(1, len(architecture.sublayers) // 2)
    samples, others = VECTORS * 4 * SAMPLE * architecture.width * layers, OTHERS * layers
    matrices = [matrix_bytes(architecture, bundle) // GROUPS for bundle in bundles_of(architecture, predictions)]
    of_layer = max((size for p in predictions for size in p.matrices(architecture).values()), default=0)
    return max(matrices[0] + 2 * samples + others, *matrices[1:], JUDGED * of_layer + samples)


def check_part_memory(architecture: Architecture, predictions: Sequence[Prediction], device: torch.device) -> None:
    """Raise if the matrices of one group of documents do not fit into memory."""
    size, memory = part_bytes(architecture, predictions), memory_of(device)
    if memory is not None and size > memory:
        problem = (
            f"a part needs {size / 2**30:.1f} GiB for matrices at width {architecture.width}, but the memory has "
            f"{memory / 2**30:.1f} GiB"
        )
        names = ", ".join(p.name for p in predictions if p.matrices(architecture))
        raise InputValueError("probe", "predictions", problem, f"Leave out {names}, or use another machine.")


def tokens_of_a_batch(model: nn.Module) -> int:
    """Return the number of tokens of a batch, padding included; larger on a GPU, where launch time dominates."""
    device = device_of(model)
    room = (memory_of(device) or 0) // ROOM if device.type == "cuda" else 1
    return PADDED * min(max(room, 1), MOST)


def memory_of(device: torch.device) -> int | None:
    """Return the memory of a device in bytes, None if unknown."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    known = device.type == "cpu" and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if known else None
