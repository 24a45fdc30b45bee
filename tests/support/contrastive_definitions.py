"""Contrastive losses by definition: all pairs in one matrix, or sums written out anchor by anchor."""

import math

import torch

TEMPERATURES = (1e-3, 1e-2, 0.07, 1.0, 30.0, 1e3)


def log_mean_free(s, mask):
    """Return log sum exp of each row over the entries of the mask, computed relative to the maximum."""
    s = s.masked_fill(~mask, -torch.inf)
    top = s.amax(-1, keepdim=True)
    top = top.masked_fill(top == -torch.inf, 0.0)
    return (s - top).exp().sum(-1).log() + top.squeeze(-1)


def everything(m, n):
    return torch.ones(m, n, dtype=torch.bool)


def info_nce(a, x, T):
    s = a @ x.mT / T
    return (log_mean_free(s, everything(*s.shape)) - s.diagonal()).mean()


def clip(a, b, T):
    return (info_nce(a, b, T) + info_nce(b, a, T)) / 2


def nt_xent(a, b, T, *, decoupled=False):
    """Compute NT-Xent anchor by anchor."""
    z, m = torch.cat([a, b]), len(a)
    losses = []
    for i in range(2 * m):
        positive = (i + m) % (2 * m)
        others = [j for j in range(2 * m) if j != i and not (decoupled and j == positive)]
        s = z[others] @ z[i] / T
        losses.append(s.logsumexp(0) - z[positive] @ z[i] / T)
    return torch.stack(losses).mean()


def supervised_contrastive(z, y, T, *, inside=False, pair=False, reduction="mean"):
    losses, weights = [], []
    for i in range(len(z)):
        others = [j for j in range(len(z)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        if not positives:
            continue
        s = z @ z[i] / T
        G = s[others].logsumexp(0)
        if inside:
            losses.append(G - s[positives].logsumexp(0) + math.log(len(positives)))
        elif pair:
            negatives = [j for j in others if y[j] != y[i]]
            losses.append(torch.stack([s[[p, *negatives]].logsumexp(0) - s[p] for p in positives]).mean())
        else:
            losses.append((G - s[positives]).mean())
        weights.append(float(len(positives)) if reduction == "pairs" else 1.0)
    weight = torch.tensor(weights, dtype=z.dtype)
    return (torch.stack(losses) * weight).sum() / weight.sum()


def nca(x, y, T):
    losses = []
    for i in range(len(x)):
        others = [j for j in range(len(x)) if j != i]
        positives = [j for j in others if y[j] == y[i]]
        if positives:
            s = -(x - x[i]).square().sum(-1) / T
            losses.append(s[others].logsumexp(0) - s[positives].logsumexp(0))
    return torch.stack(losses).mean()


def uniformity(x, t):
    distances = [(x[i] - x[j]).square().sum() for i in range(len(x)) for j in range(i)]
    return torch.stack([-t * d for d in distances]).logsumexp(0) - math.log(len(distances))


def bernoulli(a, x, T, offset):
    s = a @ x.mT / T + offset
    sign = 2 * torch.eye(*s.shape, dtype=s.dtype) - 1
    return -torch.nn.functional.logsigmoid(sign * s).sum(-1).mean()
