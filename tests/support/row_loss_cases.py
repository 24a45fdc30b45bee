"""Losses of rows of logits with their formulas, on operands of any shape."""

import torch
from torch.nn.functional import softplus

from gradlogz.kernels.losses.similarity_losses import Circle, MultiSimilarity
from gradlogz.kernels.losses.softmax_losses import BothDirections, OnePositive, Sigmoids, SomePositives
from gradlogz.kernels.losses.visible_pairs import VisiblePairs


class Case:
    """Operands and a loss; `definition` is its sum by the formula, on logits in float64."""

    def __init__(self, m, n, d, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.m, self.n = m, n
        self.query, self.key = torch.randn(m, d, generator=g), torch.randn(n, d, generator=g) + 0.5
        self.bias = torch.randn(n, generator=g)
        self.labels = torch.randint(4, (m,), generator=g), torch.randint(4, (n,), generator=g)
        self.positive = torch.randint(n, (m,), generator=g)
        self.mask = torch.rand(m, n, generator=g) > 0.4

    def same(self):
        return self.labels[0].unsqueeze(-1) == self.labels[1]

    def negatives_of_one(self, allowed):
        return allowed & (torch.arange(self.n) != self.positive.unsqueeze(-1))


def one_positive(s, positive, negatives, margin=0.0):
    """log(1 + sum over negatives of exp(s - s_+ + margin)) of each row."""
    behind = s - s.gather(1, positive.unsqueeze(-1)) + margin
    return torch.cat((torch.zeros_like(s[:, :1]), behind.masked_fill(~negatives, -torch.inf)), 1).logsumexp(1)


def several(s, positives, negatives, kind):
    losses = []
    for row, is_positive, is_negative in zip(s, positives, negatives, strict=True):
        mine, others = row[is_positive], row[is_negative]
        if not len(mine):
            losses.append(row.sum() * 0)
        elif kind == "pair":
            losses.append(torch.stack([torch.cat([p.view(1), others]).logsumexp(0) - p for p in mine]).mean())
        else:
            total = torch.cat([mine, others]).logsumexp(0)
            losses.append(total - (mine.mean() if kind == "mean" else mine.logsumexp(0)))
    return torch.stack(losses)


def multi_similarity(s, positives, negatives, alpha, beta, base):
    """log(1 + sum exp(-alpha (s - base))) / alpha over positives, and the same with beta over negatives."""
    sides = ((positives, -alpha), (negatives, beta))
    sums = [torch.where(side, (a * (s - base)).exp(), 0.0).sum(1).log1p() / abs(a) for side, a in sides]
    return sums[0] + sums[1]


def circle(s, positives, negatives, r, scale):
    """log(1 + the sum over negatives times the sum over positives), with weights that have no gradient."""
    x = s.detach()
    above = (-scale * (1 + r - x).clamp(min=0) * (s - 1 + r)).masked_fill(~positives, -torch.inf)
    below = (scale * (x + r).clamp(min=0) * (s - r)).masked_fill(~negatives, -torch.inf)
    both = (above.unsqueeze(-1) + below.unsqueeze(-2)).flatten(1)  # a term for each pair of a positive and a negative
    return torch.cat((torch.zeros_like(both[:, :1]), both), 1).logsumexp(1)


def cases(c):
    """Name, loss and formula."""
    every, eye = torch.ones(c.m, c.n, dtype=torch.bool), torch.eye(c.m, c.n, dtype=torch.bool)
    other = VisiblePairs(labels=c.labels, same=False)
    plain = OnePositive(c.m, c.positive, VisiblePairs())
    yield "one", plain, lambda s: one_positive(s, c.positive, c.negatives_of_one(every))
    loss = OnePositive(c.m, c.positive, other, margin=0.3)
    yield "ids, margin", loss, lambda s: one_positive(s, c.positive, c.negatives_of_one(~c.same()), 0.3)
    loss = OnePositive(c.m, c.positive, VisiblePairs(mask=c.mask))
    yield "mask", loss, lambda s: one_positive(s, c.positive, c.negatives_of_one(c.mask))
    signs = 1 - 2 * torch.zeros(c.m, c.n).scatter(1, c.positive.unsqueeze(-1), 1.0).double()
    yield "sigmoids", Sigmoids(c.m, c.positive, VisiblePairs()), lambda s: softplus(signs * s, threshold=1e3).sum(-1)
    for kind in ("mean", "mass", "pair"):
        loss = SomePositives(c.m, VisiblePairs(labels=c.labels), other, kind)
        yield f"labels, {kind}", loss, lambda s, kind=kind: several(s, c.same(), ~c.same(), kind)
    sides = VisiblePairs(labels=c.labels), other
    loss = MultiSimilarity(c.m, *sides, (0.7, 1.9, 0.2))
    yield "multi-similarity", loss, lambda s: multi_similarity(s, c.same(), ~c.same(), 0.7, 1.9, 0.2)
    sides = VisiblePairs(labels=c.labels, excluded=c.positive), other
    chosen = c.same() & (torch.arange(c.n) != c.positive.unsqueeze(-1))
    yield "circle", Circle(c.m, *sides, (0.4, 0.3)), lambda s: circle(s, chosen, ~c.same(), 0.4, 0.3)
    if c.m == c.n:
        own, labels = torch.arange(c.m), (c.labels[0], c.labels[0])
        same = c.labels[0].unsqueeze(-1) == c.labels[0]
        yield "own number", OnePositive(c.m, None, VisiblePairs()), lambda s: one_positive(s, own, ~eye)

        def both(s, allowed=~eye):
            return (one_positive(s, own, allowed) + one_positive(s.mT, own, allowed)) / 2

        yield "clip", BothDirections(VisiblePairs()), both
        loss = BothDirections(VisiblePairs(labels=labels, same=False))
        yield "clip, ids", loss, lambda s: both(s, ~same)
        sides = VisiblePairs(labels=labels, itself=False), VisiblePairs(labels=labels, same=False)
        loss = SomePositives(c.m, *sides, "mean")
        yield "labels of others", loss, lambda s: several(s, same & ~eye, ~same, "mean")
        loss = Circle(c.m, *sides, (0.4, 0.3))
        yield "circle of others", loss, lambda s: circle(s, same & ~eye, ~same, 0.4, 0.3)
        if c.m > 1:
            loss = OnePositive(c.m, own.roll(1), VisiblePairs(itself=False))
            yield "not itself", loss, lambda s: one_positive(s, own.roll(1), ~eye & ~eye.roll(1, 0))


def derivatives(function, tensors):
    tensors = [t.detach().requires_grad_() for t in tensors]
    value = function(*tensors)
    return [value.detach().double(), *(g.double() for g in torch.autograd.grad(2 * value, tensors))]
