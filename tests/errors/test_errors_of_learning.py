"""`fit` says what cannot be learned."""

import dataclasses

import torch

from gradlogz import Prior, SwitchingModel, fit
from gradlogz.filters import Clutter, Generator, NonlinearModel
from support.error_form import each_of, refused

F64 = torch.float64
eye = torch.eye(2, dtype=F64)
both = torch.stack((eye, 2 * eye))
fields = {"F": both, "Q": both, "H": both, "R": both}
T = torch.tensor([[0.9, 0.1], [0.4, 0.6]], dtype=F64)
model = SwitchingModel(transition=T, **fields)
y = torch.zeros(3, 4, 2, dtype=F64)
start = Prior(torch.zeros(2, dtype=F64), eye)


def fitted(m=model, y=y, prior=start, **options):
    return lambda: fit(m, y, prior, **options)


ERRORS = [
    (
        TypeError,
        "fit: model",
        "a SwitchingModel",
        fitted(NonlinearModel(T, torch.sin, both, torch.cos, both)),
    ),
    (ValueError, "fit: learn", "transition", fitted(learn=["P"])),
    (ValueError, "fit: method", "gradient", fitted(method="newton")),
    (ValueError, "fit: smoother", "em", fitted(smoother="enumerate")),
    (ValueError, "fit: smoother", "kim", fitted(smoother="gbp2", method="em")),
    (ValueError, "fit: model", "learn", fitted(learn=["b"])),
    (
        ValueError,
        "fit: structure",
        "diagonal",
        fitted(structure={"Q": "round"}),
    ),
    (
        ValueError,
        "fit: shared",
        "parameters",
        fitted(learn=["F", "Q"], shared=["F"], method="em"),
    ),
    (
        ValueError,
        "fit: model",
        "series",
        fitted(dataclasses.replace(model, F=both.expand(3, 1, 2, 2, 2))),
    ),
    (
        ValueError,
        "fit: learn",
        "initial",
        fitted(dataclasses.replace(model, F=both.expand(4, 2, 2, 2))),
    ),
    (
        ValueError,
        "fit: model",
        "components",
        fitted(dataclasses.replace(model, B=torch.ones(2, 2, 1, dtype=F64))),
    ),
    (
        ValueError,
        "fit: prior.mean",
        "[3, 2, 2]",
        fitted(prior=Prior(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))),
    ),
    (
        ValueError,
        "fit: prior.log_mode_probability",
        "modes",
        fitted(prior=Prior(start.mean, eye, torch.zeros(3, dtype=F64))),
    ),
    (ValueError, "fit: observations", "missing", fitted(y=y * torch.nan)),
    (
        ValueError,
        "fit: modes",
        "identical",
        fitted(SwitchingModel(transition=T, **{name: eye.expand(2, 2, 2) for name in fields})),
    ),
    (
        ValueError,
        "fit: prior.mean",
        "initial_mean",
        fitted(prior=Prior(torch.zeros(3, 1, 2, dtype=F64), eye), learn=["initial"]),
    ),
    (ValueError, "fit: model", "rate", fitted(learn=["rate"])),
    (ValueError, "fit: model", "transition", fitted(SwitchingModel(transition=Generator(T - eye), **fields))),
    (ValueError, "fit: clutter", "Clutter", fitted(learn=["R", "clutter"])),
    (TypeError, "fit: clutter", "Clutter", fitted(clutter=0.01)),
    (ValueError, "fit: probability", "from 0 to 1", fitted(clutter=Clutter(1.5, eye))),
    (ValueError, "fit: covariance", "all steps", fitted(clutter=Clutter(0.1, eye.expand(4, 2, 2)))),
    (ValueError, "fit: covariance", "semidefinite", fitted(clutter=Clutter(0.1, -eye))),
    (ValueError, "fit: probability", "to be learned", fitted(clutter=Clutter(0.0, eye), learn=["clutter"])),
    (ValueError, "fit: starts", "least", fitted(starts=0)),
    (
        ValueError,
        "fit: Q",
        "positive definite",
        fitted(dataclasses.replace(model, Q=0 * both), method="gradient"),
    ),
    (
        ValueError,
        "fit: R",
        "positive definite",
        fitted(dataclasses.replace(model, R=0 * both), learn=["R"], method="gradient", structure={"R": "diagonal"}),
    ),
    (
        ValueError,
        "fit: covariance",
        "positive definite",
        fitted(prior=Prior(start.mean, 0 * eye), learn=["initial"], method="gradient"),
    ),
    (
        TypeError,
        "fit: None",
        "share",
        fitted(prior=Prior(torch.zeros(2), torch.eye(2))),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
