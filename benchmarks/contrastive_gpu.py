"""Contrastive losses and a language-model head on a GPU in bfloat16, forward and backward, within a time limit.

PYTHONPATH=src python3 benchmarks/contrastive_gpu.py [folder] [seconds]     writes contrastive_gpu.json after every row

"compiled" is the loss of one matrix of logits with torch.compile. "chunked" computes 8192 rows at a time, compiled, and
recomputes them in the backward pass. "row blocks" computes loss and gradient of 1024 rows at a time in the forward
pass, the arithmetic of Liger's fused linear cross-entropy in plain torch. "attention" is InfoNCE by two calls of the
kernel of attention. Vectors are float32 and rounded to bfloat16 before products; gradients are float32. An alternative
that does not fit into memory has no entry.

Processes that compile, and compute nothing else, run first and fill the caches of Triton and of torch.compile.
"""

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy, logsigmoid, normalize
from torch.utils.checkpoint import checkpoint

import gradlogz as gz
from gradlogz.contrastive import linear_cross_entropy
from gradlogz.kernels.losses import row_loss

START = time.perf_counter()
T, OFFSET, HALF = 0.1, -10.0, torch.bfloat16
SIZES, DIMENSIONS = (8192, 65_536, 32_768), (128, 768, 512)
ROUNDS = {8192: 15, 32_768: 3, 65_536: 2}
CHUNK, BLOCK = 8192, 1024  # rows
CLASS = 8  # vectors of a class
HEAD = (8192, 2048, 128_256)  # tokens, dimension, words
EXACT = (4096, 0.01)  # pairs and temperature of the comparison with float64
COMPILERS, SECONDS_TO_COMPILE = 12, 45
Call = Callable[[], object]


# Losses of a block of logits [rows, n], whose first row is `first` ----------------------------------------------------


def info_nce(s: torch.Tensor, first: int = 0, temperature: float = T) -> torch.Tensor:
    targets = torch.arange(first, first + len(s), device=s.device)
    return cross_entropy(s.float() / temperature, targets, reduction="sum") / s.shape[1]


def clip_loss(s: torch.Tensor, first: int = 0, temperature: float = T) -> torch.Tensor:
    return (info_nce(s, first, temperature) + info_nce(s.mT, first, temperature)) / 2


def siglip(s: torch.Tensor, first: int = 0, temperature: float = T) -> torch.Tensor:
    row, column = (torch.arange(count, device=s.device) for count in s.shape)
    sign = torch.where((row + first).unsqueeze(-1) == column, 1.0, -1.0)
    return -logsigmoid(sign * (s.float() / temperature + OFFSET)).sum() / s.shape[1]


def supervised(s: torch.Tensor, first: int = 0, temperature: float = T) -> torch.Tensor:
    row, column = (torch.arange(count, device=s.device) for count in s.shape)
    itself = (row + first).unsqueeze(-1) == column
    positive = ((row + first).unsqueeze(-1) // CLASS == column // CLASS) & ~itself
    log_p = (s.float() / temperature).masked_fill(itself, -torch.inf).log_softmax(-1)
    return -log_p.masked_fill(~positive, 0.0).sum() / (CLASS - 1) / s.shape[1]


DENSE: dict[str, Callable[..., torch.Tensor]] = {
    "info_nce": info_nce,
    "clip_loss": clip_loss,
    "siglip": siglip,
    "supervised_contrastive": supervised,
}
IN_CHUNKS = ("info_nce", "siglip", "supervised_contrastive")


def of_vectors(loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The dense loss of two batches of vectors."""

    def dense(a: torch.Tensor, b: torch.Tensor, temperature: float = T) -> torch.Tensor:
        return loss(a.to(HALF) @ b.to(HALF).mT, 0, temperature)

    return dense


def ours(name: str, a: torch.Tensor, b: torch.Tensor, temperature: float, precision: torch.dtype | None) -> torch.Tensor:
    options = {"temperature": temperature, "precision": precision}
    if name == "siglip":
        return gz.siglip(a, b, offset=OFFSET, **options)
    if name == "supervised_contrastive":
        classes = torch.arange(len(a), device=a.device) // CLASS
        return gz.supervised_contrastive(a, classes, candidates=b, candidate_labels=classes, **options)
    return getattr(gz, name)(a, b, **options)
