"""Affine read-outs of a known quantity from features of a model.

    R² = 1 - |y - X b|² / |y - mean|²      b by ridge regression on other series; y centred by position

    permutation null    R² with the targets of other series
    features            residual stream; log variances; attention weights by lag; log variance that attention drops

Read next: experiment.py.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..exporting import projections
from ..transformer import Transformer

RIDGE = 1e-3  # relative to the variance of standardised features
PERMUTATIONS = 20


class Decoded(NamedTuple):
    """Held-out R² of a read-out, and the largest R² of the permutations."""

    r2: float
    null: float


def decoded(features: Tensor, target: Tensor, fitted: int) -> Decoded:
    """Decode a target [n, t] from features [n, t, d]; the first `fitted` series are fitted, the others judged."""
    X, y = features.double(), target.double()
    y = y - y[:fitted].mean(0)  # the mean of a position is no evidence
    centre, scale = X[:fitted].mean((0, 1)), X[:fitted].std((0, 1)).clamp(min=1e-9)
    X = (X - centre) / scale
    train, test = X[:fitted].flatten(0, 1), X[fitted:].flatten(0, 1)
    gram = train.mT @ train
    gram += RIDGE * len(train) * torch.eye(len(gram), dtype=gram.dtype)
    generator = torch.Generator().manual_seed(0)
    orders = [torch.arange(len(y)), *(_within_halves(len(y), fitted, generator) for _ in range(PERMUTATIONS))]
    targets = torch.stack([y[order] for order in orders], -1)  # [n, t, permutations]
    coefficients = torch.linalg.solve(gram, train.mT @ targets[:fitted].flatten(0, 1))
    truth = targets[fitted:].flatten(0, 1)
    r2 = 1 - (truth - test @ coefficients).square().sum(0) / truth.square().sum(0)
    return Decoded(float(r2[0]), float(r2[1:].max()))


def _within_halves(n: int, fitted: int, generator: torch.Generator) -> Tensor:
    first = torch.randperm(fitted, generator=generator)
    return torch.cat((first, fitted + torch.randperm(n - fitted, generator=generator)))


# Features -------------------------------------------------------------------------------------------------------------


def quadratic_window(observations: Tensor, window: int = 4) -> Tensor:
    """The last observations and their products, [n, t, d]; zero before the series."""
    n, t, o = observations.shape
    padded = torch.cat((observations.new_zeros(n, window - 1, o), observations), 1)
    last = torch.stack([padded[:, i : i + t] for i in range(window)], -1).flatten(2)
    rows, columns = torch.triu_indices(last.shape[-1], last.shape[-1])
    return torch.cat((last, last[..., rows] * last[..., columns]), -1)


def attention_features(model: Transformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Attention weights by lag, and the log variance of the values under them: [n, t, d] for all heads of all layers.

    The variance is the trace of the covariance that attention drops, in the coordinates of each head.
    """
    lags, variances = [], []
    block: Any
    for block, state in zip(model.blocks, model.states(tokens)[:-1], strict=True):
        x = block.before[0](state.mean)
        maps = projections(block.attention.layer)
        q, k, v = (
            torch.nn.functional.linear(x, *each).unflatten(-1, (model.settings.heads, -1)).transpose(1, 2)
            for each in (maps.query, maps.key, maps.value)
        )
        n = x.shape[1]
        logits = q @ k.mT / q.shape[-1] ** 0.5
        p = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
        index = torch.arange(n)
        back = (index.unsqueeze(-1) - index).clamp(min=0)  # key of each lag
        inside = (index.unsqueeze(-1) >= index).float()  # lags within the series
        lags.append((p.gather(-1, back.expand_as(p)) * inside).transpose(1, 2).flatten(2))
        variance = (p @ v.square() - (p @ v).square()).sum(-1)
        variances.append(variance.clamp(min=1e-9).log().transpose(1, 2))
    return torch.cat(lags, -1), torch.cat(variances, -1)
