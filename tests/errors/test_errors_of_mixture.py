"""Mixture says what is wrong with its weights, its components and its gates."""

import math

import torch

from gradlogz import Gaussian, Mixture
from support.error_form import each_of, refused

half = torch.full((2,), math.log(0.5))
components = Gaussian.diagonal(torch.zeros(2, 3), torch.ones(2, 3))
mixture, eta = Mixture(half, components), torch.zeros(3)
dtypes = "tensors must share one dtype; got"

ERRORS = [
    (TypeError, "Mixture: components", "a measure", lambda: Mixture(half, [components])),
    (TypeError, "Mixture: log_weights", "a tensor", lambda: Mixture([0.0], components)),
    (
        TypeError,
        "Mixture: log_weights",
        "float32",
        lambda: Mixture(half.long(), components),
    ),
    (
        TypeError,
        "Mixture: None",
        "share",
        lambda: Mixture(half.double(), components),
    ),
    (
        ValueError,
        "Mixture: None",
        "device",
        lambda: Mixture(half.to("meta"), components),
    ),
    (
        ValueError,
        "Mixture: log_weights",
        "with",
        lambda: Mixture(torch.zeros(()), components),
    ),
    (
        ValueError,
        "Mixture: log_weights",
        "with",
        lambda: Mixture(torch.zeros(0), components),
    ),
    (
        ValueError,
        "Mixture: components",
        "dimension",
        lambda: Mixture(half, Gaussian.diagonal(eta, eta)),
    ),
    (
        ValueError,
        "Mixture: components",
        "dimension",
        lambda: Mixture(torch.zeros(1), components),
    ),
    (
        ValueError,
        "Mixture: None",
        "agree",
        lambda: Mixture(half, Gaussian.diagonal(torch.zeros(4, 2, 3), torch.ones(4, 2, 3))),
    ),
    (
        ValueError,
        "Mixture: None",
        "agree",
        lambda: Mixture(half.expand(3, 2), Gaussian.diagonal(torch.zeros(4, 2, 3), torch.ones(4, 2, 3))),
    ),
    (
        ValueError,
        "Mixture: log_weights",
        "finite",
        lambda: Mixture(half + torch.nan, components),
    ),
    (
        ValueError,
        "Mixture: exp(log_weights)",
        "sum",
        lambda: Mixture(torch.zeros(2), components),
    ),
    (
        ValueError,
        "Mixture: eta",
        "log_weights",
        lambda: Mixture(half.expand(4, 2), components).mean(torch.zeros(3, 3)),
    ),
    # gates
    (
        TypeError,
        "Mixture.lower_bound: log_gates",
        "a tensor",
        lambda: mixture.lower_bound(eta, [0.0, 0.0]),
    ),
    (
        TypeError,
        "Mixture.lower_bound: None",
        "share",
        lambda: mixture.lower_bound(eta, half.double()),
    ),
    (
        ValueError,
        "Mixture.lower_bound: eta",
        "dimension",
        lambda: mixture.lower_bound(half),
    ),
    (
        ValueError,
        "Mixture.lower_bound: log_gates",
        "log_weights",
        lambda: mixture.lower_bound(eta, torch.zeros(3)),
    ),
    (
        ValueError,
        "Mixture.lower_bound: log_gates",
        "finite",
        lambda: mixture.lower_bound(eta, half + torch.inf),
    ),
    (
        ValueError,
        "Mixture.lower_bound: exp(log_gates)",
        "sum",
        lambda: mixture.lower_bound(eta, torch.zeros(2)),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
