"""Losses of rows by compiled code: values and gradients are those of the definition, written out in float64."""

import pytest
import torch
from torch.nn.functional import softplus

from gradlogz.kernels.losses.logit_losses import COMPILED, sum_of_rows
from gradlogz.kernels.losses.softmax_losses import BothDirections, OnePositive, Sigmoids, SomePositives
from gradlogz.kernels.losses.visible_pairs import VisiblePairs
from gradlogz.kernels.optional import kernel_module
from support.scales import close

COEFFICIENT, FACTOR = 0.37, 1.9
SHAPES = [(64, 64, 128), (5, 5, 3), (1, 1, 16), (100, 37, 80), (7, 200, 33), (130, 130, 20)]

pytestmark = pytest.mark.skipif(kernel_module(COMPILED, "numba") is None, reason="numba is not installed")


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
    return torch.where(negatives, behind.exp(), 0.0).sum(-1).log1p()


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
        if c.m > 1:
            loss = OnePositive(c.m, own.roll(1), VisiblePairs(itself=False))
            yield "not itself", loss, lambda s: one_positive(s, own.roll(1), ~eye & ~eye.roll(1, 0))


def derivatives(function, tensors):
    tensors = [t.detach().requires_grad_() for t in tensors]
    value = function(*tensors)
    return [value.detach().double(), *(g.double() for g in torch.autograd.grad(2 * value, tensors))]


def compare(c, loss, formula, biased, scale=1.0):
    tensors = [scale * c.query, c.key, *([c.bias] if biased else [])]

    def by_definition(q, k, b=None):
        s = FACTOR * q @ k.mT
        return COEFFICIENT * formula(s if b is None else s + b).sum()

    def compiled(q, k, b=None):
        result = sum_of_rows(loss, q, k, b, COEFFICIENT, factor=FACTOR)
        assert type(result.grad_fn).__name__ == "_CompiledSumBackward"
        return result

    expected = derivatives(by_definition, [t.double() for t in tensors])
    for got, want in zip(derivatives(compiled, tensors), expected, strict=True):
        close(got, want, scale=float(want.abs().max()) + 1.0, tolerance=2e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, biased, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        c = Case(*shape)
        for _, loss, formula in cases(c):
            compare(c, loss, formula, biased, scale=0.3)
    finally:
        torch.set_num_threads(before)


def test_rows_in_parts(monkeypatch):
    """A matrix of slopes smaller than all rows: the gradients of keys are added part by part."""
    kernel = kernel_module(COMPILED, "numba")
    monkeypatch.setattr(kernel, "MATRIX", 1)
    kernel.layout.cache_clear()
    c = Case(130, 37, 20)
    for name, loss, formula in cases(c):
        if "clip" not in name:
            compare(c, loss, formula, True, scale=0.3)
    kernel.layout.cache_clear()


def test_columns_that_lie_far_below_the_largest_logit():
    """Their exponentials about the maxima of rows would vanish; the loss is then computed by torch."""
    c = Case(40, 40, 16)
    c.query, c.key = torch.eye(40, 16) * 60, torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    eye = torch.eye(40, dtype=torch.bool)

    def both(s):
        rest = s.masked_fill(eye, -torch.inf)
        return sum(softplus(x.logsumexp(1) - s.diagonal(), threshold=1e3) for x in (rest, rest.mT)) / 2

    kernel, problem = kernel_module(COMPILED, "numba"), BothDirections(VisiblePairs()).problem()
    assert kernel.sum_and_gradients(problem, c.query, c.key, None, 1.0, FACTOR, (True, True, False)) is None
    compare(c, BothDirections(VisiblePairs()), both, False)


def test_nan_stays_nan():
    c = Case(9, 9, 16)
    c.query[3, 2] = torch.nan
    for loss in (
        OnePositive(9, None, VisiblePairs()),
        BothDirections(VisiblePairs()),
        Sigmoids(9, None, VisiblePairs()),
    ):
        assert sum_of_rows(loss, c.query, c.key, None, 1.0).isnan()


def test_threads_give_the_same_bits():
    c, results = Case(200, 300, 48), []
    loss = OnePositive(200, c.positive, VisiblePairs())
    for threads in (1, 2, 5):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        results.append(derivatives(lambda q, k: sum_of_rows(loss, q, k, None, 1.0), [c.query, c.key]))
        torch.set_num_threads(before)
    assert all(torch.equal(x, y) for other in results[1:] for x, y in zip(results[0], other, strict=True))
