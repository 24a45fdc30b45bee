"""The classical families say what is wrong with their parameters."""

import torch

from gradlogz import Gamma, InverseGaussian, OneHot, Poisson, Spins
from support.error_form import each_of, refused

one, two = torch.ones(1), torch.ones(2)

ERRORS = [
    # Gamma
    (TypeError, "Gamma: concentration must be a tensor; got float.", lambda: Gamma(1.0, one)),
    (TypeError, "Gamma: rate must be a tensor; got NoneType.", lambda: Gamma(one, None)),
    (TypeError, "Gamma: rate must be float32 or float64; got torch.int64.", lambda: Gamma(one, one.long())),
    (
        TypeError,
        "Gamma: tensors must share one dtype; got concentration torch.float32, rate torch.float64.",
        lambda: Gamma(one, one.double()),
    ),
    (
        ValueError,
        "Gamma: tensors must be on one device; got concentration on cpu, rate on meta.",
        lambda: Gamma(one, one.to("meta")),
    ),
    (
        ValueError,
        "Gamma: fields must be [*b, d]; got concentration (), rate ().",
        lambda: Gamma(torch.ones(()), torch.ones(())),
    ),
    (ValueError, "Gamma: fields must be [*b, d]; got concentration (1,), rate (2,).", lambda: Gamma(one, two)),
    (
        ValueError,
        "Gamma: batch dimensions must agree; got () and (3,).",
        lambda: Gamma(two, two.expand(3, 2)),
    ),
    (
        ValueError,
        "Gamma: rate must be finite; got 1 of 1 entries that are NaN or infinite.",
        lambda: Gamma(one, one * torch.inf),
    ),
    (
        ValueError,
        "Gamma: concentration must be positive; got 1 of 1 entries at or below 0.",
        lambda: Gamma(-one, one),
    ),
    (ValueError, "Gamma: rate must be positive; got 2 of 2 entries at or below 0.", lambda: Gamma(two, 0 * two)),
    # InverseGaussian
    (TypeError, "InverseGaussian: loc must be a tensor; got float.", lambda: InverseGaussian(1.0, one)),
    (
        ValueError,
        "InverseGaussian: fields must be [*b, d]; got loc (1,), concentration (2,).",
        lambda: InverseGaussian(one, two),
    ),
    (
        ValueError,
        "InverseGaussian: loc must be finite; got 1 of 1 entries that are NaN or infinite.",
        lambda: InverseGaussian(one * torch.nan, one),
    ),
    (
        ValueError,
        "InverseGaussian: loc must be positive; got 1 of 1 entries at or below 0.",
        lambda: InverseGaussian(-one, one),
    ),
    (
        ValueError,
        "InverseGaussian: concentration must be positive; got 1 of 1 entries at or below 0.",
        lambda: InverseGaussian(one, -one),
    ),
    # Poisson
    (TypeError, "Poisson: rate must be float32 or float64; got torch.int64.", lambda: Poisson(one.long())),
    (ValueError, "Poisson: fields must be [*b, d]; got rate ().", lambda: Poisson(torch.ones(()))),
    (ValueError, "Poisson: rate must be positive; got 1 of 1 entries at or below 0.", lambda: Poisson(0 * one)),
    # Spins
    (TypeError, "Spins: bias must be a tensor; got list.", lambda: Spins([0.0])),
    (ValueError, "Spins: fields must be [*b, d]; got bias ().", lambda: Spins(torch.zeros(()))),
    (
        ValueError,
        "Spins: bias must be finite; got 1 of 1 entries that are NaN or infinite.",
        lambda: Spins(one * torch.inf),
    ),
    # OneHot
    (TypeError, "OneHot: log_probabilities must be a tensor; got list.", lambda: OneHot([0.0])),
    (
        TypeError,
        "OneHot: log_probabilities must be float32 or float64; got torch.float16.",
        lambda: OneHot(0 * one.half()),
    ),
    (
        ValueError,
        "OneHot: log_probabilities must be [*b, d] with d >= 1; got shape ().",
        lambda: OneHot(torch.zeros(())),
    ),
    (
        ValueError,
        "OneHot: log_probabilities must be [*b, d] with d >= 1; got shape (2, 0).",
        lambda: OneHot(torch.zeros(2, 0)),
    ),
    (
        ValueError,
        "OneHot: log_probabilities must be finite or -inf; got 1 of 1 entries that are NaN or +inf.",
        lambda: OneHot(one * torch.nan),
    ),
    (
        ValueError,
        "OneHot: exp(log_probabilities) must sum to one; got a log sum of 0.693 at worst.",
        lambda: OneHot(0 * two),
    ),
    (
        ValueError,
        "OneHot: exp(log_probabilities) must sum to one; got a log sum of inf at worst.",
        lambda: OneHot(-torch.inf * two),
    ),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
