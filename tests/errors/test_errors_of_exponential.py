"""The classical families say what is wrong with their parameters."""

import torch

from gradlogz import Gamma, InverseGaussian, OneHot, Poisson, Spins
from support.error_form import each_of, refused

one, two = torch.ones(1), torch.ones(2)

ERRORS = [
    # Gamma
    (TypeError, "Gamma: concentration", "a tensor", lambda: Gamma(1.0, one)),
    (TypeError, "Gamma: rate", "a tensor", lambda: Gamma(one, None)),
    (TypeError, "Gamma: rate", "float32", lambda: Gamma(one, one.long())),
    (
        TypeError,
        "Gamma: None",
        "share",
        lambda: Gamma(one, one.double()),
    ),
    (
        ValueError,
        "Gamma: None",
        "device",
        lambda: Gamma(one, one.to("meta")),
    ),
    (
        ValueError,
        "Gamma: fields",
        "[*b, d]",
        lambda: Gamma(torch.ones(()), torch.ones(())),
    ),
    (ValueError, "Gamma: fields", "[*b, d]", lambda: Gamma(one, two)),
    (
        ValueError,
        "Gamma: None",
        "agree",
        lambda: Gamma(two, two.expand(3, 2)),
    ),
    (
        ValueError,
        "Gamma: rate",
        "finite",
        lambda: Gamma(one, one * torch.inf),
    ),
    (
        ValueError,
        "Gamma: concentration",
        "positive",
        lambda: Gamma(-one, one),
    ),
    (ValueError, "Gamma: rate", "positive", lambda: Gamma(two, 0 * two)),
    # InverseGaussian
    (TypeError, "InverseGaussian: loc", "a tensor", lambda: InverseGaussian(1.0, one)),
    (
        ValueError,
        "InverseGaussian: fields",
        "[*b, d]",
        lambda: InverseGaussian(one, two),
    ),
    (
        ValueError,
        "InverseGaussian: loc",
        "finite",
        lambda: InverseGaussian(one * torch.nan, one),
    ),
    (
        ValueError,
        "InverseGaussian: loc",
        "positive",
        lambda: InverseGaussian(-one, one),
    ),
    (
        ValueError,
        "InverseGaussian: concentration",
        "positive",
        lambda: InverseGaussian(one, -one),
    ),
    # Poisson
    (TypeError, "Poisson: rate", "float32", lambda: Poisson(one.long())),
    (ValueError, "Poisson: fields", "[*b, d]", lambda: Poisson(torch.ones(()))),
    (ValueError, "Poisson: rate", "positive", lambda: Poisson(0 * one)),
    # Spins
    (TypeError, "Spins: bias", "a tensor", lambda: Spins([0.0])),
    (ValueError, "Spins: fields", "[*b, d]", lambda: Spins(torch.zeros(()))),
    (
        ValueError,
        "Spins: bias",
        "finite",
        lambda: Spins(one * torch.inf),
    ),
    # OneHot
    (TypeError, "OneHot: log_probabilities", "a tensor", lambda: OneHot([0.0])),
    (
        TypeError,
        "OneHot: log_probabilities",
        "float32",
        lambda: OneHot(0 * one.half()),
    ),
    (
        ValueError,
        "OneHot: log_probabilities",
        "with",
        lambda: OneHot(torch.zeros(())),
    ),
    (
        ValueError,
        "OneHot: log_probabilities",
        "with",
        lambda: OneHot(torch.zeros(2, 0)),
    ),
    (
        ValueError,
        "OneHot: log_probabilities",
        "finite",
        lambda: OneHot(one * torch.nan),
    ),
    (
        ValueError,
        "OneHot: exp(log_probabilities)",
        "sum",
        lambda: OneHot(0 * two),
    ),
    (
        ValueError,
        "OneHot: exp(log_probabilities)",
        "sum",
        lambda: OneHot(-torch.inf * two),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
