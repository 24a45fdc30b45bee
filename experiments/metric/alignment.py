"""Cosines of QK matrices with targets, and their rotation null: the definitions of `qk_geometry`.

    cosine             <B_s, T> / |B_s| |T|,  B_s = (B + B^T)/2
    rotation null      cosine of Q B_s Q^T with T, Q uniform: mean tr B_s tr T / (d |B_s| |T|), standard deviation
                       sqrt(2 / ((d - 1)(d + 2))) |B_0| |T_0| / (|B_s| |T|),  B_0, T_0 the traceless parts
    positive cosine    |B_+| / |B|,  B_+ the positive semidefinite part of B_s
    traceless cosine   cosine of B_0 with T_0

None changes with the basis of queries and keys, W_q to W_q M and W_k to W_k M^-T.
Law: tests/experiments/test_heads_learn_what_is_known.py, against gradlogz.probing.predictions.qk_geometry.

Read next: estimation.py (what is learned), ../../src/gradlogz/probing/predictions/qk_geometry.py.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class RotationNull(NamedTuple):
    """Mean and standard deviation of a cosine under rotations, [r]."""

    mean: Tensor
    deviation: Tensor


def symmetric(B: Tensor) -> Tensor:
    """(B + B^T) / 2."""
    return (B + B.mT) / 2


def cosine(B: Tensor, T: Tensor) -> Tensor:
    """Cosines [r] of the symmetric parts of B [r, d, d] with T [r, d, d]."""
    S = symmetric(B)
    return (S * T).sum((-2, -1)) / (_norm(S) * _norm(T))


def traceless(B: Tensor) -> Tensor:
    """The matrix without its multiple of the identity."""
    d = B.shape[-1]
    return B - _trace(B)[..., None, None] * torch.eye(d, dtype=B.dtype) / d


def positive_cosine(B: Tensor) -> Tensor:
    """Cosine of B with the nearest positive semidefinite matrix, [r]."""
    return torch.linalg.eigvalsh(symmetric(B)).clamp(min=0.0).norm(dim=-1) / _norm(B)


def rotation_null(B: Tensor, T: Tensor) -> RotationNull:
    """Distribution of the cosine if B were rotated at random."""
    S, d = symmetric(B), B.shape[-1]
    sizes = _norm(S) * _norm(T)
    spread = math.sqrt(2 / ((d - 1) * (d + 2))) * _norm(traceless(S)) * _norm(traceless(T)) / sizes
    return RotationNull(_trace(S) * _trace(T) / (d * sizes), spread)


def _norm(X: Tensor) -> Tensor:
    return X.norm(dim=(-2, -1))


def _trace(X: Tensor) -> Tensor:
    return X.diagonal(dim1=-2, dim2=-1).sum(-1)
