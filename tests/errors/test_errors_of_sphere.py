"""Sphere and the Bessel functions say what is wrong with a dimension, a radius and an order."""

import torch

from gradlogz import Sphere
from gradlogz.special.bessel import bessel_ratio, log_bessel
from support.error_form import each_of, refused

one = torch.ones(())
order = "order must be one of 0, 1/2, 1, 3/2, ...; got"

ERRORS = [
    (TypeError, "Sphere: dim must be an int; got float.", lambda: Sphere(3.0)),
    (TypeError, "Sphere: dim must be an int; got str.", lambda: Sphere("3")),
    (TypeError, "Sphere: dim must be an int; got Tensor.", lambda: Sphere(torch.tensor(3))),
    (ValueError, "Sphere: dim must be at least 2; got dim=1.", lambda: Sphere(1)),
    (TypeError, "Sphere: radius must be a tensor; got str.", lambda: Sphere(3, "1.0")),
    (TypeError, "Sphere: radius must be float32 or float64; got torch.int64.", lambda: Sphere(3, torch.tensor(1))),
    (
        ValueError,
        "Sphere: radius must be finite; got 1 of 1 entries that are NaN or infinite.",
        lambda: Sphere(3, one * torch.nan),
    ),
    (ValueError, "Sphere: radius must be positive; got 1 of 1 entries at or below 0.", lambda: Sphere(3, one * 0)),
    (ValueError, "Sphere: radius must be positive; got 1 of 1 entries at or below 0.", lambda: Sphere(3, -one)),
    (ValueError, f"log_bessel: {order} order=0.3.", lambda: log_bessel(0.3, one)),
    (ValueError, f"log_bessel: {order} order=-0.5.", lambda: log_bessel(-0.5, one)),
    (ValueError, f"bessel_ratio: {order} order=0.3.", lambda: bessel_ratio(0.3, one)),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
