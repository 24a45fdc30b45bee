"""`fit` says what cannot be learned."""

import dataclasses

import torch

from gradlogz import Prior, SwitchingModel, fit
from gradlogz.filters import NonlinearModel
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
        "fit: model must be a SwitchingModel; got NonlinearModel.",
        fitted(NonlinearModel(T, torch.sin, both, torch.cos, both)),
    ),
    (ValueError, "fit: learn must name some of transition, Q, R, F, H, b, d, initial; got ['P'].", fitted(learn=["P"])),
    (ValueError, 'fit: method must be "em" or "gradient"; got \'newton\'.', fitted(method="newton")),
    (ValueError, "fit: the model must have b to learn it; got None.", fitted(learn=["b"])),
    (
        ValueError,
        'fit: structure must say "full", "diagonal" or "scale" of Q and R; got {\'Q\': \'round\'}.',
        fitted(structure={"Q": "round"}),
    ),
    (
        ValueError,
        "fit: shared must name parameters that are learned, F and b together with Q, H and d together with R; "
        "got ['F'].",
        fitted(learn=["F", "Q"], shared=["F"]),
    ),
    (
        ValueError,
        "fit: the model must be one for all series; got one for each target.",
        fitted(dataclasses.replace(model, F=both.expand(3, 1, 2, 2, 2))),
    ),
    (
        ValueError,
        'fit: learn must be Q and R as "scale", or "initial", of a model that changes in time; got',
        fitted(dataclasses.replace(model, F=both.expand(4, 2, 2, 2))),
    ),
    (
        ValueError,
        "fit: the model must have no inputs and no components; got some.",
        fitted(dataclasses.replace(model, B=torch.ones(2, 2, 1, dtype=F64))),
    ),
    (
        ValueError,
        "fit: prior.mean must be [2] or [2, 2] and prior.covariance [2, 2] or [2, 2, 2]; got shapes (3,) and (3, 3).",
        fitted(prior=Prior(torch.zeros(3, dtype=F64), torch.eye(3, dtype=F64))),
    ),
    (
        ValueError,
        "fit: prior.log_mode_probability must be [2]; got shape (3,).",
        fitted(prior=Prior(start.mean, eye, torch.zeros(3, dtype=F64))),
    ),
    (ValueError, "fit: observations must hold something seen; got gaps alone.", fitted(y=y * torch.nan)),
    (
        ValueError,
        "fit: modes must differ at the beginning; got modes that are all alike.",
        fitted(SwitchingModel(transition=T, **{name: eye.expand(2, 2, 2) for name in fields})),
    ),
    (ValueError, "fit: starts and max_iterations must be at least 1; got 0 and 200.", fitted(starts=0)),
    (
        ValueError,
        "fit: Q must be regular at the beginning to be learned freely; got a singular one.",
        fitted(dataclasses.replace(model, Q=0 * both), method="gradient"),
    ),
    (
        ValueError,
        "fit: R must be regular at the beginning to be learned freely; got a singular one.",
        fitted(dataclasses.replace(model, R=0 * both), learn=["R"], method="gradient", structure={"R": "diagonal"}),
    ),
    (
        ValueError,
        "fit: covariance must be regular at the beginning to be learned freely; got a singular one.",
        fitted(prior=Prior(start.mean, 0 * eye), learn=["initial"], method="gradient"),
    ),
    (
        TypeError,
        "fit: tensors must share one dtype; got prior.mean torch.float32, model torch.float64.",
        fitted(prior=Prior(torch.zeros(2), torch.eye(2))),
    ),
]


@each_of(ERRORS)
def test_what_is_wrong_is_said(refusal):
    refused(refusal)
