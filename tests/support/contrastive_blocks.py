"""The sums of large batches on small ones: no matrix of all pairs, and blocks of few rows."""

import contextlib

import pytest

from gradlogz.contrastive import likelihood
from gradlogz.contrastive.losses import two_views
from gradlogz.kernels.attention import blocked
from gradlogz.kernels.losses import logit_losses, pairwise_log_sum_exp


@contextlib.contextmanager
def by_blocks():
    """Compute as for large batches: no matrix of all pairs, blocks of about two rows."""
    sizes = [
        (likelihood, "DENSE"),
        (logit_losses, "DENSE"),
        (pairwise_log_sum_exp, "SMALL"),
        (two_views, "ONE_MATRIX"),
        (two_views, "DENSE"),
    ]
    with pytest.MonkeyPatch.context() as patch:
        for module, name in sizes:
            patch.setattr(module, name, 0)
        patch.setattr(blocked, "LOGITS_ON_CPU", 14)
        yield
