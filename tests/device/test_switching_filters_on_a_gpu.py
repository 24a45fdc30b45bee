"""Filters on a GPU give the numbers of the CPU, with their gradients, and never wait for it between steps."""

import warnings

import pytest
import torch
from torch.utils._pytree import tree_map

from gradlogz import SwitchingFilter, SwitchingModel
from gradlogz.filters import Filtered, enumerate_modes, normalized_innovation
from support.switching_oracles import F64, beginning, observed, same, system

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
METHODS = {"gpb1": ("gpb", 1), "gpb2": ("gpb", 2), "gpb3": ("gpb", 3), "imm": ("imm", 2)}
each = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
FIELDS = ("transition", "F", "Q", "H", "R", "b", "d")


def moved(model, validate=True):
    return SwitchingModel(**{f: getattr(model, f).cuda() for f in FIELDS}, validate=validate)


def there(given):
    return tree_map(torch.Tensor.cuda, given)


@each
def test_the_numbers_are_those_of_the_cpu(method):
    model, start = system(3, 4, 2), beginning(3, 4)
    y = observed(model, 6, 50)
    y[3, 2], y[4, 1, 0] = torch.nan, torch.nan
    expected = SwitchingFilter(model, method[0], depth=method[1]).filter(y, start)
    found = SwitchingFilter(moved(model), method[0], depth=method[1]).filter(y.cuda(), there(start))
    same(Filtered(*(part.cpu() for part in found)), expected, 1e3)
    nis = normalized_innovation(found)
    torch.testing.assert_close(nis.value.cpu(), normalized_innovation(expected).value, equal_nan=True)


@each
def test_gradients_are_those_of_the_cpu(method):
    model, start = system(2), beginning(2)
    y = observed(model, 5, 7)

    def slopes(model, y, start):
        leaves = [y, *(getattr(model, f) for f in FIELDS)]
        leaves = [t.detach().clone().requires_grad_() for t in leaves]
        changed = SwitchingModel(*leaves[1:], validate=False)
        found = SwitchingFilter(changed, method[0], depth=method[1]).filter(leaves[0], start)
        return torch.autograd.grad(found.log_likelihood.sum() + found.mean.sum(), leaves)

    for a, e in zip(slopes(moved(model), y.cuda(), there(start)), slopes(model, y, start), strict=True):
        torch.testing.assert_close(a.cpu(), e, rtol=1e-9, atol=1e-9 * float(1 + e.abs().max()))


@each
def test_steps_do_not_wait_for_the_gpu(method):
    model, start = system(3, 4, 2), beginning(3, 4)
    online = SwitchingFilter(moved(model, validate=False), method[0], depth=method[1])
    state, y = online.init(there(start), batch_shape=(20,)), observed(model, 1, 20).squeeze(1).cuda()
    mask = torch.ones(20, 2, dtype=torch.bool, device="cuda")
    state, _ = online.step(state, y, mask=mask)  # libraries load
    try:
        with warnings.catch_warnings():  # it says that it may miss some
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        for _ in range(3):
            state, found = online.step(state, y, mask=mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.mean.isfinite().all()


def test_every_history_is_there_too():
    model, start = system(2), beginning(2)
    y = observed(model, 5, 3)
    found = enumerate_modes(moved(model), y.cuda(), there(start), max_histories=20)
    expected = enumerate_modes(model, y, start, max_histories=20)
    same(Filtered(*(part.cpu() for part in found.filtered)), expected.filtered, 1e3)
    assert found.mean.dtype == F64
