"""Losses of rows by the tiles of a GPU: values and gradients are those of the definition, written out in float64.

The kernels run in Triton's interpreter, in float32; on a GPU tests/device compares them in half precision.
"""

import pytest
import torch

from gradlogz.kernels.losses.row_loss import CLIP, MASS, MEAN, ONE, SIGMOIDS
from support.row_loss_cases import Case, cases, derivatives
from support.scales import close

tiled_rows = pytest.importorskip("gradlogz.kernels.losses.tiled_rows", reason="needs Triton")
pytestmark = pytest.mark.usefixtures("bounds_of_loops")
COEFFICIENT, FACTOR = 0.37, 1.9
ALL = 1 << 27  # one block of rows; with 1 each row of tiles is a block


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    small = tiled_rows.Tiling(32, 32, 32, 4, 1)
    monkeypatch.setattr(tiled_rows, "TILINGS", dict.fromkeys(tiled_rows.TILINGS, small))


def by_tiles(problem, q, k, b, wanted=(True, True, True)):
    return tiled_rows.sum_and_gradients(q, k, b, problem, COEFFICIENT, FACTOR, wanted, torch.float32)


@pytest.mark.parametrize(
    ("shape", "biased", "slopes"),
    [
        ((70, 70, 24), False, ALL),
        ((64, 64, 40), True, 1),
        ((50, 37, 33), True, ALL),
        ((1, 70, 16), False, 1),
        ((96, 96, 24), False, 64 * 128),  # the last block has a tile behind the last row
    ],
)
def test_values_and_gradients(shape, biased, slopes, monkeypatch):
    monkeypatch.setattr(tiled_rows, "SLOPES", slopes)
    c = Case(*shape)
    for _, loss, formula in cases(c):
        problem = loss.problem()
        if problem.kind not in tiled_rows.TILINGS:
            continue
        tensors = [0.3 * c.query, c.key, *([c.bias] if biased else [])]

        def by_definition(q, k, b=None, formula=formula):
            s = FACTOR * q @ k.mT
            return COEFFICIENT * formula(s if b is None else s + b).sum() / 2

        total, grads = by_tiles(problem, *tensors[:2], tensors[2] if biased else None)
        expected = derivatives(by_definition, [t.double() for t in tensors])
        expected[0] *= 2
        found = [total, *(g for g in grads if g is not None)]
        for got, want in zip(found, expected, strict=True):
            close(got.double(), want, scale=float(want.abs().max()) + 1.0, tolerance=2e-5)


def test_logits_far_apart_keep_their_digits():
    """Logits of +-1e4: the sums are relative to the largest negative of each row and column."""
    c = Case(40, 40, 16)
    c.query, c.key = 60 * torch.eye(40, 16), 90 * torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    for name, loss, formula in cases(c):
        problem = loss.problem()
        if problem.kind in tiled_rows.TILINGS and problem.mask is None and "sigmoids" not in name:
            total, grads = by_tiles(problem, c.query, c.key, None)

            def by_definition(q, k, formula=formula):
                return COEFFICIENT * formula(FACTOR * q @ k.mT).sum() / 2

            value, *expected = derivatives(by_definition, [c.query.double(), c.key.double()])
            close(total.double(), 2 * value, scale=float(value.abs()) + 1.0, tolerance=1e-5)
            for got, want in zip(grads, expected, strict=False):
                close(got.double(), want, scale=float(want.abs().max()), tolerance=1e-5)


def test_only_what_is_wanted_is_computed():
    c = Case(40, 40, 16)
    _, loss, _ = next(cases(c))
    both = by_tiles(loss.problem(), c.query, c.key, None)
    for wanted in ((True, False, False), (False, True, False), (False, False, False)):
        total, grads = by_tiles(loss.problem(), c.query, c.key, None, wanted)
        assert torch.equal(total, both[0])
        for want, gradient, expected in zip(wanted, grads, both[1], strict=True):
            assert torch.equal(gradient, expected) if want else gradient is None


# One form of each loss without, and one with everything that the loss may have.
FORMS = [
    tiled_rows.LossForm(ONE, "own number", False, False, False, False, False),
    tiled_rows.LossForm(ONE, "index", True, False, True, True, True),
    tiled_rows.LossForm(ONE, "index", False, True, True, False, False),
    tiled_rows.LossForm(MEAN, "own number", True, False, False, True, False),
    tiled_rows.LossForm(MEAN, "index", False, False, True, True, False),
    tiled_rows.LossForm(MASS, "none", False, False, True, True, False),
    tiled_rows.LossForm(SIGMOIDS, "own number", False, False, False, False, False),
    tiled_rows.LossForm(SIGMOIDS, "index", False, False, True, True, False),
    tiled_rows.LossForm(CLIP, "own number", False, False, False, False, False),
    tiled_rows.LossForm(CLIP, "own number", False, False, True, True, True),
]


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.setattr(tiled_rows, "HALF", torch.float32)  # the interpreter multiplies the bits of bfloat16
    tiled_rows._checked.cache_clear()
    yield lambda form: tiled_rows.is_right(form, torch.device("cpu"))
    tiled_rows._checked.cache_clear()


@pytest.mark.parametrize("form", FORMS)
def test_right_kernels_pass_their_check(form, checked):
    problem = tiled_rows._example(form, 40, torch.device("cpu")).problem()
    assert tiled_rows.form_of(problem, form.biased) == form
    assert checked(form)


@pytest.mark.parametrize("form", FORMS[1::2])  # one of each loss
def test_wrong_kernels_do_not_pass_their_check(form, checked, monkeypatch):
    right = tiled_rows.sum_and_gradients

    def wrong(*arguments, **options):
        total, (dq, dk, dbias) = right(*arguments, **options)
        several_blocks = options["block"] is not None
        return total, [dq, dk.roll(1, 0) if several_blocks else dk, dbias]

    monkeypatch.setattr(tiled_rows, "sum_and_gradients", wrong)
    with pytest.warns(RuntimeWarning, match=r"wrong results \(gradient of the key"):
        assert not checked(form)


def test_kernels_that_give_no_numbers_do_not_pass_their_check(checked, monkeypatch):
    right = tiled_rows.sum_and_gradients

    def wrong(*arguments, **options):
        total, grads = right(*arguments, **options)
        return total * torch.nan, grads

    monkeypatch.setattr(tiled_rows, "sum_and_gradients", wrong)
    with pytest.warns(RuntimeWarning, match="wrong results"):
        assert not checked(FORMS[0])
