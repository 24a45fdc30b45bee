"""Smoothers and particle filters say what is wrong with a method, a lag, a number of particles or a model."""

import math

import torch

from gradlogz import KalmanModel, Prior, SwitchingModel, smooth
from gradlogz.filters import enumerate_modes, filter_in_blocks, rao_blackwell_filter
from support.error_form import each_of, refused

F64 = torch.float64
eye = torch.eye(2, dtype=F64)
T = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=F64)
good = {"F": eye.expand(2, 2, 2), "Q": eye.expand(2, 2, 2), "H": torch.ones(2, 1, 2, dtype=F64)}
model = SwitchingModel(T, **good, R=torch.ones(2, 1, 1, dtype=F64))
unequal = SwitchingModel(T, **good, R=torch.ones(2, 1, 1, dtype=F64), components=((0,), (0, 1)))
start = Prior(torch.zeros(2, dtype=F64), eye)
y = torch.zeros(4, 1, dtype=F64)

ERRORS = [
    (TypeError, "filter_in_blocks: model", "components", lambda: filter_in_blocks(unequal, y, start)),
    (
        ValueError,
        "filter_in_blocks: observations",
        "one series",
        lambda: filter_in_blocks(model, y.expand(3, 4, 1), start),
    ),
    (ValueError, "filter_in_blocks: method", "imm", lambda: filter_in_blocks(model, y, start, method="gpb1")),
    (ValueError, "filter_in_blocks: tolerance", "-1", lambda: filter_in_blocks(model, y, start, tolerance=-1.0)),
    (ValueError, "filter_in_blocks: tolerance", "nan", lambda: filter_in_blocks(model, y, start, tolerance=math.nan)),
    (ValueError, "filter_in_blocks: block", "overlap", lambda: filter_in_blocks(model, y, start, block=10, overlap=11)),
    (
        TypeError,
        "smooth: model",
        "SwitchingModel",
        lambda: smooth(KalmanModel(eye, eye, eye[:1], eye[:1, :1]), y, start),
    ),
    (
        TypeError,
        "enumerate_modes: model",
        "SwitchingModel",
        lambda: enumerate_modes(KalmanModel(eye, eye, eye[:1], eye[:1, :1]), y, start),
    ),
    (
        TypeError,
        "rao_blackwell_filter: model",
        "SwitchingModel",
        lambda: rao_blackwell_filter(KalmanModel(eye, eye, eye[:1], eye[:1, :1]), y, start),
    ),
    (
        ValueError,
        "smooth: method",
        "enumerate",
        lambda: smooth(model, y, start, method="gpb1"),
    ),
    (
        ValueError,
        "smooth: fields",
        "Smoothed",
        lambda: smooth(model, y, start, fields=["means"]),
    ),
    (
        ValueError,
        "smooth: lag",
        "enumerate",
        lambda: smooth(model, y, start, lag=-1),
    ),
    (
        ValueError,
        "smooth: lag",
        "enumerate",
        lambda: smooth(model, y, start, method="enumerate", lag=1),
    ),
    (
        ValueError,
        "smooth: lag",
        "enumerate",
        lambda: smooth(model, y, start, method="imm", max_histories=5),
    ),
    (
        ValueError,
        "smooth: observations",
        "[*b,",
        lambda: smooth(model, torch.zeros(4, 2, dtype=F64), start),
    ),
    (
        ValueError,
        "smooth: prior.covariance",
        "positive semidefinite",
        lambda: smooth(model, y, Prior(start.mean, -eye)),
    ),
    (
        ValueError,
        "rao_blackwell_filter: particles",
        "threshold",
        lambda: rao_blackwell_filter(model, y, start, particles=0),
    ),
    (
        ValueError,
        "rao_blackwell_filter: particles",
        "threshold",
        lambda: rao_blackwell_filter(model, y, start, threshold=2),
    ),
    (
        ValueError,
        "rao_blackwell_filter: model",
        "component",
        lambda: rao_blackwell_filter(unequal, y, start),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
