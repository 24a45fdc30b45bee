"""Losses of rows by compiled code: values and gradients are those of the definition, written out in float64."""

import pytest
import torch
from torch.nn.functional import softplus

from gradlogz.kernels.losses.logit_losses import COMPILED, sum_of_rows
from gradlogz.kernels.losses.softmax_losses import BothDirections, OnePositive, Sigmoids
from gradlogz.kernels.losses.visible_pairs import VisiblePairs
from gradlogz.kernels.optional import kernel_module
from support.row_loss_cases import Case, cases, derivatives
from support.scales import close

COEFFICIENT, FACTOR = 0.37, 1.9
SHAPES = [(64, 64, 128), (5, 5, 3), (1, 1, 16), (100, 37, 80), (7, 200, 33), (130, 130, 20)]

pytestmark = pytest.mark.skipif(kernel_module(COMPILED, "numba") is None, reason="numba is not installed")


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
    assert kernel.sum_and_gradients(c.query, c.key, None, problem, 1.0, FACTOR, (True, True, False)) is None
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
