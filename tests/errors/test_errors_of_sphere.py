"""Sphere and the Bessel functions say what is wrong with a dimension, a radius and an order."""

import torch

from gradlogz import Sphere
from gradlogz.special.bessel import bessel_ratio, log_bessel
from support.error_form import each_of, refused

one = torch.ones(())
order = "order must be one of 0, 1/2, 1, 3/2, ...; got"

ERRORS = [
    (TypeError, "Sphere: dim", "an int", lambda: Sphere(3.0)),
    (TypeError, "Sphere: dim", "an int", lambda: Sphere("3")),
    (TypeError, "Sphere: dim", "an int", lambda: Sphere(torch.tensor(3))),
    (ValueError, "Sphere: dim", "least", lambda: Sphere(1)),
    (TypeError, "Sphere: radius", "a tensor", lambda: Sphere(3, "1.0")),
    (TypeError, "Sphere: radius", "float32", lambda: Sphere(3, torch.tensor(1))),
    (
        ValueError,
        "Sphere: radius",
        "finite",
        lambda: Sphere(3, one * torch.nan),
    ),
    (ValueError, "Sphere: radius", "positive", lambda: Sphere(3, one * 0)),
    (ValueError, "Sphere: radius", "positive", lambda: Sphere(3, -one)),
    (ValueError, "log_bessel: order", "one", lambda: log_bessel(0.3, one)),
    (ValueError, "log_bessel: order", "one", lambda: log_bessel(-0.5, one)),
    (ValueError, "bessel_ratio: order", "one", lambda: bessel_ratio(0.3, one)),
]


@each_of(ERRORS)
def test_it_is_refused_in_one_sentence(refusal):
    refused(refusal)
