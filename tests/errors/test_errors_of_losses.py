"""Losses of statistics refuse what has no statistics."""

import torch

from gradlogz import attend
from gradlogz.attention import entropy_loss, logit_variance_loss, z_loss
from support.error_form import each_of, refused

q = torch.randn(2, 3, 5, 4)
attention = attend(q, q, q)

ERRORS = [
    (TypeError, "z_loss: statistics", "Attention", lambda: z_loss(attention.log_normalizer)),
    (ValueError, "z_loss: statistics", "empty", lambda: z_loss({})),
    (ValueError, "z_loss: query_mask", "(2, 4)", lambda: z_loss(attention, query_mask=torch.ones(2, 4))),
    (ValueError, "entropy_loss: floor", "ceiling", lambda: entropy_loss(attention)),
    (
        ValueError,
        "logit_variance_loss: statistics",
        "none",
        lambda: logit_variance_loss(attend(q, q, q, statistics="none")),
    ),
]


@each_of(ERRORS)
def test_errors_name_the_argument(refusal):
    refused(refusal)
