"""Models of functions that numba compiled say where they need functions of torch."""

import pytest
import torch

from gradlogz import Prior, imm
from gradlogz.filters import Generator, NonlinearModel
from support.error_form import each_of, refused

njit = pytest.importorskip("numba").njit

F64 = torch.float64
noise = torch.ones(1, 1, 1, dtype=F64)
start = Prior(torch.zeros(1, dtype=F64), torch.eye(1, dtype=F64))


@njit
def still(x):
    return x


def own(**changes):
    """A model of compiled functions, with something wrong."""
    parts = {"transition": torch.ones(1, 1, dtype=F64), "move": still, "observe": still, "method": "ukf"}
    return lambda: NonlinearModel(Q=noise, R=noise, **{**parts, **changes})


def differentiated():
    y = torch.zeros(2, 1, dtype=F64, requires_grad=True)
    imm(own()(), y, start).mean.sum().backward()


def differentiated_forward():
    model = own()()
    torch.func.jvp(lambda y: imm(model, y, start).mean, (torch.zeros(2, 1, dtype=F64),), (torch.ones(2, 1, dtype=F64),))


ERRORS = [
    (ValueError, "NonlinearModel: method", "torch", own(method="ekf")),
    (ValueError, "NonlinearModel: move", "torch", own(transition=Generator(torch.zeros(1, 1, dtype=F64)))),
    (TypeError, "NonlinearModel: residual", "torch", own(residual=still)),
    (TypeError, "NonlinearModel: move", "derivatives", differentiated),
    (TypeError, "NonlinearModel: move", "derivatives", differentiated_forward),
]


@each_of(ERRORS)
def test_what_is_wrong_with_functions_of_numba_is_said(refusal):
    refused(refusal)
