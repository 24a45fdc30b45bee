"""Smoothers and particle filters say what is wrong with a method, a lag, a number of particles or a model."""

import torch

from gradlogz import KalmanModel, SwitchingModel, exact, rao_blackwell, smooth
from support.error_form import each_of, refused

F64 = torch.float64
eye = torch.eye(2, dtype=F64)
T = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=F64)
good = {"F": eye.expand(2, 2, 2), "Q": eye.expand(2, 2, 2), "H": torch.ones(2, 1, 2, dtype=F64)}
model = SwitchingModel(T, **good, R=torch.ones(2, 1, 1, dtype=F64))
unequal = SwitchingModel(T, **good, R=torch.ones(2, 1, 1, dtype=F64), components=((0,), (0, 1)))
start = {"mean": torch.zeros(2, dtype=F64), "covariance": eye}
y = torch.zeros(4, 1, dtype=F64)

ERRORS = [
    (
        TypeError,
        "smooth: model must be a SwitchingModel or a NonlinearModel; got KalmanModel.",
        lambda: smooth(KalmanModel(eye, eye, eye[:1], eye[:1, :1]), y, **start),
    ),
    (
        TypeError,
        "exact: model must be a SwitchingModel or a NonlinearModel; got KalmanModel.",
        lambda: exact(KalmanModel(eye, eye, eye[:1], eye[:1, :1]), y, **start),
    ),
    (
        TypeError,
        "rao_blackwell: model must be a SwitchingModel or a NonlinearModel; got KalmanModel.",
        lambda: rao_blackwell(KalmanModel(eye, eye, eye[:1], eye[:1, :1]), y, **start),
    ),
    (
        ValueError,
        'smooth: method must be "imm", "gpb2", "kim" or "exact"; got \'gpb1\'.',
        lambda: smooth(model, y, method="gpb1", **start),
    ),
    (
        ValueError,
        'smooth: lag must be 0 or more, for "imm", "gpb2" and "kim"; and keep be for "exact" alone; '
        "got lag=-1 and keep=None for 'gpb2'.",
        lambda: smooth(model, y, lag=-1, **start),
    ),
    (
        ValueError,
        'smooth: lag must be 0 or more, for "imm", "gpb2" and "kim"; and keep be for "exact" alone; '
        "got lag=1 and keep=None for 'exact'.",
        lambda: smooth(model, y, method="exact", lag=1, **start),
    ),
    (
        ValueError,
        'smooth: lag must be 0 or more, for "imm", "gpb2" and "kim"; and keep be for "exact" alone; '
        "got lag=None and keep=5 for 'imm'.",
        lambda: smooth(model, y, method="imm", keep=5, **start),
    ),
    (
        ValueError,
        "smooth: observations must be [*b, t, o=1] with one step or more; got shape (4, 2).",
        lambda: smooth(model, torch.zeros(4, 2, dtype=F64), **start),
    ),
    (
        ValueError,
        "smooth: covariance must be positive semidefinite; got a smallest eigenvalue of -1.",
        lambda: smooth(model, y, mean=start["mean"], covariance=-eye),
    ),
    (
        ValueError,
        "rao_blackwell: particles must be at least 1 and threshold in [0, 1]; got 0 and 0.5.",
        lambda: rao_blackwell(model, y, particles=0, **start),
    ),
    (
        ValueError,
        "rao_blackwell: particles must be at least 1 and threshold in [0, 1]; got 256 and 2.",
        lambda: rao_blackwell(model, y, threshold=2, **start),
    ),
    (
        ValueError,
        'rao_blackwell: model must say what a component is that a mode lacks; got components and fill="modes".',
        lambda: rao_blackwell(unequal, y, **start),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
